"""A module for each stage, of the nodes that a plan gives it; values are passed on stage by stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.torch.pipeline.atoms import Atoms


@dataclass(frozen=True)
class Piece:
    """What one stage computes.

    Attributes:
        index: of the stage.
        nodes: names of its nodes.
        receives: names of the values that come from the stage before it.
        inputs: names of the model's inputs that it reads, which every rank has of its own.
        sends: names of the values that go to the next stage; what the last one returns are the flat outputs.
        attributes: names of the parameters and buffers that it reads.
    """

    index: int
    nodes: tuple[str, ...]
    receives: tuple[str, ...]
    inputs: tuple[str, ...]
    sends: tuple[str, ...]
    attributes: tuple[str, ...]


def pieces(atoms: Atoms, stages: Sequence[Sequence[str]]) -> list[Piece]:
    """The stages as pieces.

    Args:
        atoms: of the captured model.
        stages: for each stage the names of its nodes; each dynamic node in one stage.

    Raises:
        ConfigError: a node is in no stage or in two, reads what a later stage computes, or is apart from nodes that it
            must be with.
    """
    graph = atoms.graph(1)
    by_name = {node.name: node for node in atoms.order}
    inputs = set(graph.inputs)
    hands = [tuple(name for name in names if name not in inputs) for names in graph.passed_on(stages)]
    for name in (name for names in hands for name in names):
        if not isinstance(atoms.values[by_name[name]], torch.Tensor):
            raise ConfigError(f"the value of {name!r} is no tensor and cannot be passed on: keep it with its readers")
    found = []
    for i, names in enumerate(stages):
        own = [by_name[name] for name in names]
        used = [one for node in own for one in (*atoms.reads(node), *atoms.constants(node))]
        last = i == len(stages) - 1
        if last:
            used += _outputs_constants(atoms) + [one for one in atoms.outputs() if one.op == "placeholder"]
        found.append(
            Piece(
                i,
                tuple(sorted(names, key=lambda name: atoms.order[by_name[name]])),
                hands[i - 1] if i else (),
                tuple(dict.fromkeys(one.name for one in used if one.op == "placeholder")),
                () if last else hands[i],
                tuple(dict.fromkeys(str(one.target) for one in used if one.op == "get_attr")),
            )
        )
    return found


def _outputs_constants(atoms: Atoms) -> list[fx.Node]:
    """The constant nodes that the model's outputs are made of."""
    found: dict[fx.Node, None] = {}
    for one in atoms.captured.outputs:
        if isinstance(one, fx.Node) and one.op != "placeholder" and one not in atoms.dynamic:
            found.update(dict.fromkeys([*atoms.constants(one), one]))
    return list(found)


def module_of(atoms: Atoms, piece: Piece, last: bool) -> fx.GraphModule:
    """A stage's module. Its parameters and buffers are the model's own, under the model's names.

    It is called with the values of ``piece.receives`` and then those of ``piece.inputs``, and returns a tuple: the
    values of ``piece.sends``, or the flat outputs if it is the last.
    """
    nodes = {node.name: node for node in atoms.order}
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    for name in (*piece.receives, *piece.inputs):
        new[nodes[name]] = graph.placeholder(name)
    own = [nodes[name] for name in piece.nodes]
    needed = dict.fromkeys(one for node in own for one in (*atoms.constants(node), node))
    if last:
        needed.update(dict.fromkeys(_outputs_constants(atoms)))
    for node in sorted(needed, key=atoms.order.__getitem__):
        new[node] = graph.node_copy(node, new.__getitem__)
    if last:
        graph.output(tuple(new[one] if isinstance(one, fx.Node) else one for one in atoms.captured.outputs))
    else:
        graph.output(tuple(new[nodes[name]] for name in piece.sends))
    attributes = {name: atoms.captured.attributes[name] for name in piece.attributes}
    module = fx.GraphModule(attributes, graph, class_name=f"Stage{piece.index}")
    module.train(atoms.captured.module.training)
    return module


def run(atoms: Atoms, stages: Sequence[Sequence[str]], args: Sequence[Any], kwargs: Any = None) -> Any:
    """The stages one after the other in this process; what the model would return.

    >>> from grace.torch.pipeline.capture import capture
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(4, 2)
    >>> atoms = Atoms(capture(model, (x,)))
    >>> bool((run(atoms, [["linear"], ["relu"]], (x,)) == model(x)).all())
    True
    """
    cut = pieces(atoms, stages)
    flat = dict(zip(atoms.captured.inputs, atoms.captured.flat(args, kwargs or {}), strict=True))
    received: dict[str, Any] = {}
    for piece in cut:
        module = module_of(atoms, piece, piece is cut[-1])
        out = module(*(received[name] for name in piece.receives), *(flat[name] for name in piece.inputs))
        received = dict(zip(piece.sends, out, strict=False))
    return pytree.tree_unflatten(out, atoms.captured.out_spec)
