"""Stages of a captured model: their nodes and values, their modules, and this rank's stage for inputs of certain
shapes. Values are passed on from stage to stage."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.atomic_subcomponents import Atoms, CapturedBatch
from grace.pipeline.torch.capture import fake_values, source_line
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.point_to_point import Crossing, PointToPointStage


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


def shape_key(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of all that stages are built for: shapes and dtypes of tensors, other values, and the active
    autocast."""
    known = [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else repr(one) for one in flat]
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    gpu = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (*known, cast, gpu)


class BuiltStage:
    """The stage of this rank for micro-batches of certain shapes.

    Args:
        micro_batch: the user's model, captured for this rank's rows of a micro-batch.
        nodes: names of the nodes of each stage.
        mesh: the pipeline's ranks.
        device: device of this rank's stage.
        recompute, before_communication: see :class:`PointToPointStage`.
    """

    def __init__(
        self,
        micro_batch: CapturedBatch,
        nodes: Sequence[Sequence[str]],
        mesh: Mesh,
        device: torch.device,
        recompute: bool,
        before_communication: Callable[[], None] | None = None,
    ):
        self.captured = micro_batch.captured
        specs = stage_specs(micro_batch.atoms, nodes)
        self.spec = specs[mesh.stage]
        is_last = self.spec is specs[-1]
        # computed under the active autocast, which decides the dtypes that cross
        value_of = {node.name: value for node, value in fake_values(self.captured).items()}
        axes = {} if mesh.equal_replicas else _row_axes(micro_batch, value_of)
        receives, sends = (
            [_make_crossing(name, value_of[name], axes, mesh.equal_replicas) for name in names]
            for names in (self.spec.receives, self.spec.sends)
        )
        self.stage = PointToPointStage(
            build_module(micro_batch.atoms, self.spec, is_last),
            mesh,
            receives,
            sends,
            micro_batch.rows,
            device,
            recompute and not is_last,
            before_communication,
        )

    def inputs(self, flat: Sequence[Any]) -> list[Any]:
        """Return the model's inputs that this rank's stage reads."""
        by_name = dict(zip(self.captured.inputs, flat, strict=True))
        return [by_name[name] for name in self.spec.inputs]

    def output(self, flat: Sequence[Any]) -> Any:
        """Return the model's output, made of the last stage's flat outputs."""
        return pytree.tree_unflatten(list(flat), self.captured.out_spec)


def evaluation_stages(
    atoms: Atoms, nodes: Sequence[Sequence[str]], owners: Mapping[str, Collection[int]]
) -> Sequence[Sequence[str]]:
    """Return the nodes of each stage in evaluation: as in training where nodes have the same names, else by their
    parameters."""
    stages = {name: i for i, names in enumerate(nodes) for name in names}
    with contextlib.suppress(ConfigError):
        found = assign_by_owners(atoms, owners, len(nodes), stages)
        if all(found):
            return found
    return assign_by_owners(atoms, owners, len(nodes), {})


def assign_by_owners(
    atoms: Atoms, owners: Mapping[str, Collection[int]], count: int, least: Mapping[str, int]
) -> list[list[str]]:
    """Assign the nodes of a graph that was not planned (evaluation's) to stages: each node to the first stage that has
    its parameters and comes after the nodes that it reads.

    Args:
        atoms: the atomic subcomponents of the graph.
        owners: the stages that have each parameter and buffer.
        count: number of stages.
        least: the first stage that a node may be in, by name.

    Raises:
        ConfigError: a node fits into no stage.
    """
    mates = {name: group for group in atoms.inseparable for name in group}
    stage_of = {node.name: least.get(node.name, 0) for node in atoms.dynamic}
    before: dict[str, int] = {}
    while before != stage_of:  # moving a node may move its readers, until nothing changes
        before = dict(stage_of)
        for node in atoms.dynamic:
            low = max(
                stage_of[node.name],
                *(stage_of.get(one.name, 0) for one in atoms.reads(node)),
                *(stage_of[name] for name in mates.get(node.name, (node.name,))),
            )
            sets = [owners[str(one.target)] for one in atoms.constants(node) if str(one.target) in owners]
            fits = [stage for stage in range(low, count) if all(stage in own for own in sets)]
            if not fits:
                raise ConfigError(
                    f"in this mode (training or not) the model reads parameters in another order: {node.name!r} "
                    f"({source_line(node)}) comes after stage {low}, and its parameters are in an earlier one"
                )
            stage_of[node.name] = fits[0]
    stages: list[list[str]] = [[] for _ in range(count)]
    for name, stage in stage_of.items():
        stages[stage].append(name)
    return stages


def _row_axes(micro_batch: CapturedBatch, value_of: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the dimension of rows of each value: the only one that doubles if the batch has twice as many rows."""
    rows = micro_batch.rows
    doubled = [
        torch.cat([one, one]) if isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) and not whole else one
        for one, whole in zip(micro_batch.flat, micro_batch.whole, strict=True)
    ]
    twice = fake_values(micro_batch.with_inputs(doubled).captured)
    double_value_of = {node.name: value for node, value in twice.items()}
    axes: dict[str, int | None] = {}
    for name, value in value_of.items():
        if isinstance(value, torch.Tensor) and name in double_value_of:
            sizes = list(zip(value.shape, double_value_of[name].shape, strict=False))
            differ = [i for i, (a, b) in enumerate(sizes) if a != b]
            axes[name] = differ[0] if len(differ) == 1 and sizes[differ[0]] == (rows, 2 * rows) else None
    return axes


def _make_crossing(name: str, value: Any, axes: Mapping[str, int | None], equal: bool) -> Crossing:
    """Return the description of a value that crosses between stages; refuse one without rows if replicas are
    unequal."""
    axis = axes.get(name)
    if axis is None and not equal:
        raise ConfigError(
            f"the value of {name!r} (shape {tuple(value.shape)}) has no dimension of its own for rows, so it cannot "
            "cross between stages with different numbers of replicas: cut elsewhere, or let all stages have as many"
        )
    return Crossing(name, tuple(value.shape), value.dtype, value.requires_grad, axis)
