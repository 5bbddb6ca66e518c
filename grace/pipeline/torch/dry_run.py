"""The graph for planning a pipeline, of a model alone: no ranks, no optimizer."""

from pathlib import Path
from typing import Any

import torch

from grace.pipeline.planning.graph import Graph
from grace.pipeline.torch import node_costs
from grace.pipeline.torch.capture import check_plain_model, split_call
from grace.pipeline.torch.captured_batch import CapturedBatch


def build_graph(
    model: torch.nn.Module, example_inputs: Any, dry: bool = False, profiles: str | Path | None = None
) -> Graph:
    """Return a model's atomic subcomponents and their costs, as :class:`grace.torch.Pipeline` plans with on every rank.

    Args:
        model: any module that ``torch.export`` takes; it is put into training mode. One on ``meta`` is never run.
        example_inputs: as :class:`grace.torch.Pipeline` takes them.
        dry: estimate seconds from FLOPs and bytes, and run nothing.
        profiles: the file of measured seconds; None measures anew.

    Raises:
        ConfigError: ``torch.export`` cannot take the model, or it is not a plain module.

    >>> graph = build_graph(torch.nn.Linear(2, 3), torch.ones(4, 2), dry=True)
    >>> graph.rows, [node.name for node in graph.nodes], graph.variable("weight").shape
    (4, ['linear'], (3, 2))
    """
    check_plain_model(model)
    batch = CapturedBatch(model.train(True), *split_call(example_inputs))
    return batch.atoms.graph(batch.rows, node_costs.costs_by_rows(batch, dry, profiles))
