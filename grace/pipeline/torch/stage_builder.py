"""Stages of a captured model: their nodes and values, their modules, and this rank's stage for inputs of certain
shapes. Values are passed on from stage to stage."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.planning.blocks import units
from grace.pipeline.planning.graph import Graph
from grace.pipeline.torch.atomic_subcomponents import Atoms, CapturedBatch
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.point_to_point import Crossing, PointToPointStage

SUMS = ("aten::sum", "aten::nansum", "aten::count_nonzero")
SAME_VALUE = ("aten::to", "aten::_to_copy", "aten::detach", "aten::alias", "aten::clone")
"""Operators that sum, and those that pass a sum on."""
SUM_REDUCTION = 2
"""Value of ``reduction="sum"`` in operators of losses."""


@dataclass(frozen=True)
class StageSpec:
    """The nodes, inputs and outputs of one stage.

    Attributes:
        index: number of the stage.
        nodes: the stage's operations and the constant nodes that feed them, in order.
        receives: names of the values that come from the previous stage.
        inputs: names of the model's inputs that the stage reads. Every rank has its own inputs.
        sends: names of the values that go to the next stage; empty for the last stage, which returns the flat outputs.
    """

    index: int
    nodes: tuple[fx.Node, ...]
    receives: tuple[str, ...]
    inputs: tuple[str, ...]
    sends: tuple[str, ...]

    @property
    def attributes(self) -> set[str]:
        """Names of the parameters and buffers that the stage reads."""
        return {str(node.target) for node in self.nodes if node.op == "get_attr"}


def stage_specs(atoms: Atoms, stages: Sequence[Sequence[str]]) -> list[StageSpec]:
    """Return the specifications of all stages, of the names of the nodes of each; each dynamic node is in one stage.

    Raises:
        ConfigError: a node is in no stage or in two, reads a value of a later stage, or is separated from nodes that
            must be in the same stage.
    """
    graph = atoms.graph(1)
    by_name = {node.name: node for node in atoms.order}
    passed = [tuple(n for n in names if n not in graph.inputs) for names in graph.passed_on(stages)]
    for name in (name for names in passed for name in names):
        if not isinstance(atoms.values[by_name[name]], torch.Tensor):
            raise ConfigError(f"the value of {name!r} is no tensor and cannot be passed on: keep it with its readers")
    specs = []
    for i, names in enumerate(stages):
        own = [by_name[name] for name in names]
        read = [one for node in own for one in atoms.reads(node)]
        if i == len(stages) - 1:  # it returns the outputs, some of which may be inputs or constants
            own += [one for one in atoms.captured.outputs if isinstance(one, fx.Node) and one not in atoms.dynamic]
        needed = dict.fromkeys(one for node in own for one in (*atoms.constants(node), node))
        specs.append(
            StageSpec(
                i,
                tuple(one for one in sorted(needed, key=atoms.order.__getitem__) if one.op != "placeholder"),
                passed[i - 1] if i else (),
                tuple(dict.fromkeys(one.name for one in (*read, *own) if one.op == "placeholder")),
                passed[i] if i < len(passed) else (),
            )
        )
    return specs


def build_module(atoms: Atoms, spec: StageSpec, last: bool) -> fx.GraphModule:
    """Return a stage's module. Its parameters and buffers are the model's own, under the model's names.

    The module is called with the values of ``spec.receives`` and then those of ``spec.inputs``. It returns a tuple: the
    values of ``spec.sends``, or the flat outputs if it is the last.
    """
    by_name = {node.name: node for node in atoms.order}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {by_name[name]: graph.placeholder(name) for name in (*spec.receives, *spec.inputs)}
    for node in spec.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    outputs = atoms.captured.outputs if last else [by_name[name] for name in spec.sends]
    graph.output(tuple(new[one] if isinstance(one, fx.Node) else one for one in outputs))
    attributes = {name: atoms.captured.attributes[name] for name in spec.attributes}
    module = fx.GraphModule(attributes, graph, class_name=f"Stage{spec.index}")
    module.train(atoms.captured.module.training)
    return module


def shape_key(flat: Sequence[object]) -> tuple[object, ...]:
    """Return a key of all that stages are built for: shapes and dtypes of tensors, other values, and the active
    autocast."""
    known = [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else repr(one) for one in flat]
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    gpu = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (*known, cast, gpu)


class BuiltStage:
    """The stage of this rank for micro-batches of certain shapes, of the model captured for its rows of one, and of the
    names of the nodes of each stage."""

    def __init__(
        self,
        micro_batch: CapturedBatch,
        nodes: Sequence[Sequence[str]],
        mesh: Mesh,
        recompute: bool,
        evaluates: bool = False,
    ):
        self.captured = micro_batch.captured
        self.output_axes = _output_axes(micro_batch) if evaluates else []
        """Dimension of rows of each flat output, None if it has no rows; known in evaluation only."""
        self.summed_outputs = sums_of_rows(micro_batch) if evaluates else []
        """For each flat output, True if it is a sum over rows; known in evaluation only."""
        specs = stage_specs(micro_batch.atoms, nodes)
        self.spec = specs[mesh.stage]
        is_last = self.spec is specs[-1]
        value_of = micro_batch.atoms.values_by_name
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
            recompute and not is_last,
        )

    def inputs(self, flat: Sequence[object]) -> list[object]:
        """Return the model's inputs that this rank's stage reads."""
        by_name = dict(zip(self.captured.inputs, flat, strict=True))
        return [by_name[name] for name in self.spec.inputs]

    def output(self, flat: Sequence[object]) -> object:
        """Return the model's output, made of the last stage's flat outputs."""
        return pytree.tree_unflatten(list(flat), self.captured.out_spec)


def evaluation_stages(
    graph: Graph, nodes: Sequence[Sequence[str]], owners: Mapping[str, Collection[int]]
) -> Sequence[Sequence[str]]:
    """Return the nodes of each stage in evaluation: as in training where nodes have the same names, else by their
    parameters. ``owners`` has the stages of each parameter and buffer. Refuse a node that fits into no stage."""
    stages = {name: i for i, names in enumerate(nodes) for name in names}
    with contextlib.suppress(ConfigError):  # torch.export numbers names: one may be another node in evaluation
        found = _assign_by_owners(graph, owners, len(nodes), stages)
        if all(found):  # a stage without nodes is refused
            return found
    return _assign_by_owners(graph, owners, len(nodes), {})


def _assign_by_owners(
    graph: Graph, owners: Mapping[str, Collection[int]], count: int, least: Mapping[str, int]
) -> list[list[str]]:
    """Assign the nodes of a graph to stages: each unit to the first one that has its parameters, comes after the nodes
    that it reads, and is not before the ``least`` of its nodes."""
    stage_of: dict[str, int] = {}
    stages: list[list[str]] = [[] for _ in range(count)]
    for names in units(graph):
        own = [graph.nodes[graph.index[name]] for name in names]
        read = [name for node in own for name in node.inputs]
        low = max([0, *(least.get(name, 0) for name in names), *(stage_of.get(name, 0) for name in read)])
        holders = [owners[name] for node in own for name in node.stored if name in owners]
        fits = [stage for stage in range(low, count) if all(stage in stages_of for stages_of in holders)]
        if not fits:
            raise ConfigError(
                f"in this mode (training or not) the model reads parameters in another order: {names[0]!r} "
                f"({own[0].line}) comes after stage {low}, and its parameters are in an earlier one"
            )
        stage_of.update(dict.fromkeys(names, fits[0]))
        stages[fits[0]] += names
    return stages


def _doubled_axis(value: object, double: object) -> int | None:
    """Return the only dimension that doubles if the batch has twice as many rows; None if there is no such one."""
    if not isinstance(value, torch.Tensor) or not isinstance(double, torch.Tensor):
        return None
    sizes = list(zip(value.shape, double.shape, strict=False))
    differ = [i for i, (a, b) in enumerate(sizes) if a != b]
    return differ[0] if len(differ) == 1 and sizes[differ[0]][1] == 2 * sizes[differ[0]][0] else None


def _row_axes(micro_batch: CapturedBatch, value_of: Mapping[str, object]) -> dict[str, int | None]:
    """Return the dimension of each value that has one element for each row of the batch."""
    double_value_of = micro_batch.doubled_values
    axes: dict[str, int | None] = {}
    for name, value in value_of.items():
        axis = _doubled_axis(value, double_value_of.get(name))
        # Of several elements for each row it is not known which ones are a row's.
        one_each = isinstance(value, torch.Tensor) and axis is not None and value.shape[axis] == micro_batch.rows
        axes[name] = axis if one_each else None
    return axes


def _output_axes(micro_batch: CapturedBatch) -> list[int | None]:
    """Return the dimension of rows of each flat output of the model; None if it has no rows."""
    value_of = micro_batch.atoms.values_by_name
    names = [one.name if isinstance(one, fx.Node) else "" for one in micro_batch.captured.outputs]
    shapes = [getattr(value_of.get(name), "shape", ()) for name in names]
    rows = micro_batch.rows
    if all(not shape or (shape[0] == rows and rows not in shape[1:]) for shape in shapes):
        return [0 if shape else None for shape in shapes]
    try:
        double_value_of = micro_batch.doubled_values
    except ConfigError:  # the model takes batches of this size only
        return [0 if shape else None for shape in shapes]
    return [_doubled_axis(value_of.get(name), double_value_of.get(name)) for name in names]


def sums_of_rows(micro_batch: CapturedBatch) -> list[bool]:
    """Return for each flat output of a model True if it is a sum over rows to which each row adds by itself: the sum of
    a batch is then the sum over its micro-batches."""
    outputs = micro_batch.captured.outputs
    sums = [_summing_node(one) if isinstance(one, fx.Node) else None for one in outputs]
    if not any(sums):
        return [False] * len(outputs)
    value_of = micro_batch.atoms.values_by_name
    try:
        double_value_of = micro_batch.doubled_values
    except ConfigError:  # the model takes batches of this size only
        return [False] * len(outputs)

    def has_row_axis(node: fx.Node) -> bool:
        """Return True if the node's value, or one of several, doubles with the batch in one dimension."""
        values, doubles = (pytree.tree_leaves(known.get(node.name)) for known in (value_of, double_value_of))
        return any(_doubled_axis(one, double) is not None for one, double in zip(values, doubles, strict=False))

    rows = {node.name: has_row_axis(node) for node in micro_batch.atoms.order}

    def loses_rows(node: fx.Node) -> bool:
        """Return True if the node makes one value of all rows."""
        return not rows.get(node.name, False) and any(rows.get(one.name, False) for one in node.all_input_nodes)

    # A value of all rows among those that a sum is made of, as the sum of weights, belongs to this micro-batch alone.
    return [node is not None and loses_rows(node) and not any(map(loses_rows, _ancestors(node))) for node in sums]


def _summing_node(node: fx.Node) -> fx.Node | None:
    """Return the node that sums what a node returns, before its dtype is changed; None if it is no sum."""
    while _operator(node) in SAME_VALUE:
        node = node.all_input_nodes[0]  # beside it there may be a tensor whose dtype it takes
    if _operator(node) in SUMS:
        return node
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "reduction" not in names:
        return None
    place = names.index("reduction")
    reduction = node.args[place] if place < len(node.args) else node.kwargs.get("reduction")
    return node if reduction == SUM_REDUCTION else None


def _operator(node: fx.Node) -> str:
    """Return the name of a node's operator of torch, without its overload; empty for other functions."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that a node's value is computed from."""
    found = set[fx.Node]()
    todo = list(node.all_input_nodes)
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += one.all_input_nodes
    return found


def _make_crossing(name: str, value: object, axes: Mapping[str, int | None], equal: bool) -> Crossing:
    """Return the description of a value that crosses between stages; refuse one without rows if replicas are
    unequal."""
    assert isinstance(value, torch.Tensor)  # stage_specs refuses others
    axis = axes.get(name)
    if axis is None and not equal:
        raise ConfigError(
            f"the value of {name!r} (shape {tuple(value.shape)}) has no dimension of its own for rows, so it cannot "
            "cross between stages with different numbers of replicas: cut elsewhere, or let all stages have as many"
        )
    # others than torch.empty_like keeps cannot be written to as a whole
    kept = torch.empty_like(value).stride() == value.stride()
    strides = value.stride() if kept else None
    return Crossing(name, tuple(value.shape), value.dtype, value.requires_grad, axis, strides)
