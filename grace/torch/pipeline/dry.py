"""The graph that a pipeline is planned from, of a model alone: no ranks, no optimizer."""

from pathlib import Path
from typing import Any

import torch

from grace.partition.graph import Graph
from grace.torch.pipeline import profile
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.capture import call_of, capture, check_plain
from grace.torch.pipeline.rows import rows_of


def graph_of(
    model: torch.nn.Module, example_inputs: Any, dry: bool = False, profiles: str | Path | None = None
) -> Graph:
    """A model's atomic subcomponents, and what each takes: as :class:`grace.torch.Pipeline` sees it, on every rank.

    Args:
        model: any module that ``torch.export`` takes; it is put into training mode. One on ``meta`` is never run.
        example_inputs: as :class:`grace.torch.Pipeline` takes them.
        dry: estimate seconds from FLOPs and bytes, and run nothing.
        profiles: the file of measured seconds; None measures anew.

    Raises:
        ConfigError: ``torch.export`` cannot take the model, or it is no plain one.

    >>> graph = graph_of(torch.nn.Linear(2, 3), torch.ones(4, 2), dry=True)
    >>> graph.rows, [node.name for node in graph.nodes], graph.variable("weight").shape
    (4, ['linear'], (3, 2))
    """
    check_plain(model)
    args, kwargs = call_of(example_inputs)
    captured = capture(model.train(True), args, kwargs)
    atoms, flat = Atoms(captured), captured.flat(args, kwargs)
    dry = dry or any(p.is_meta for p in model.parameters())
    if dry:
        costs = profile.estimated_by_rows(model, atoms, flat, [False] * len(flat))
    else:
        costs = profile.measured_by_rows(model, atoms, flat, [False] * len(flat), profiles)
    return atoms.graph(rows_of(flat), costs)
