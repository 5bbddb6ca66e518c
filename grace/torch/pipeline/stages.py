"""Modules of the stages, made of the nodes that a plan gives them. Values are passed on from stage to stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from grace.errors import ConfigError
from grace.torch.pipeline.atoms import Atoms


@dataclass(frozen=True)
class StageSpec:
    """The nodes, inputs and outputs of one stage.

    Attributes:
        index: number of the stage.
        nodes: names of the stage's nodes.
        receives: names of the values that come from the previous stage.
        inputs: names of the model's inputs that the stage reads. Every rank has its own inputs.
        sends: names of the values that go to the next stage; empty for the last stage, which returns the flat outputs.
        attributes: names of the parameters and buffers that the stage reads.
    """

    index: int
    nodes: tuple[str, ...]
    receives: tuple[str, ...]
    inputs: tuple[str, ...]
    sends: tuple[str, ...]
    attributes: tuple[str, ...]


def stage_specs(atoms: Atoms, stages: Sequence[Sequence[str]]) -> list[StageSpec]:
    """Return the specifications of all stages.

    Args:
        atoms: the subcomponents of the captured model.
        stages: names of the nodes of each stage; each dynamic node is in one stage.

    Raises:
        ConfigError: a node is in no stage or in two, reads a value of a later stage, or is separated from nodes that
            must be in the same stage.
    """
    graph = atoms.graph(1)
    by_name = {node.name: node for node in atoms.order}
    inputs = set(graph.inputs)
    passed = [tuple(name for name in names if name not in inputs) for names in graph.passed_on(stages)]
    for name in (name for names in passed for name in names):
        if not isinstance(atoms.values[by_name[name]], torch.Tensor):
            raise ConfigError(f"the value of {name!r} is no tensor and cannot be passed on: keep it with its readers")
    specs = []
    for i, names in enumerate(stages):
        own = [by_name[name] for name in names]
        used = [one for node in own for one in (*atoms.reads(node), *atoms.constants(node))]
        last = i == len(stages) - 1
        if last:
            used += _outputs_constants(atoms) + [one for one in atoms.outputs() if one.op == "placeholder"]
        specs.append(
            StageSpec(
                i,
                tuple(sorted(names, key=lambda name: atoms.order[by_name[name]])),
                passed[i - 1] if i else (),
                tuple(dict.fromkeys(one.name for one in used if one.op == "placeholder")),
                () if last else passed[i],
                tuple(dict.fromkeys(str(one.target) for one in used if one.op == "get_attr")),
            )
        )
    return specs


def _outputs_constants(atoms: Atoms) -> list[fx.Node]:
    """Return the constant nodes that the model's outputs are made of."""
    found: dict[fx.Node, None] = {}
    for one in atoms.captured.outputs:
        if isinstance(one, fx.Node) and one.op != "placeholder" and one not in atoms.dynamic:
            found.update(dict.fromkeys([*atoms.constants(one), one]))
    return list(found)


def build_module(atoms: Atoms, spec: StageSpec, last: bool) -> fx.GraphModule:
    """Return a stage's module. Its parameters and buffers are the model's own, under the model's names.

    The module is called with the values of ``spec.receives`` and then those of ``spec.inputs``. It returns a tuple: the
    values of ``spec.sends``, or the flat outputs if it is the last.
    """
    nodes = {node.name: node for node in atoms.order}
    graph = fx.Graph()
    new = dict[fx.Node, Any]()
    for name in (*spec.receives, *spec.inputs):
        new[nodes[name]] = graph.placeholder(name)
    own = [nodes[name] for name in spec.nodes]
    needed = dict.fromkeys(one for node in own for one in (*atoms.constants(node), node))
    if last:
        needed.update(dict.fromkeys(_outputs_constants(atoms)))
    for node in sorted(needed, key=atoms.order.__getitem__):
        new[node] = graph.node_copy(node, new.__getitem__)
    if last:
        graph.output(tuple(new[one] if isinstance(one, fx.Node) else one for one in atoms.captured.outputs))
    else:
        graph.output(tuple(new[nodes[name]] for name in spec.sends))
    attributes = {name: atoms.captured.attributes[name] for name in spec.attributes}
    module = fx.GraphModule(attributes, graph, class_name=f"Stage{spec.index}")
    module.train(atoms.captured.module.training)
    return module
