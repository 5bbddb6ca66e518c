"""The stages of this process for inputs of certain shapes: captured, cut, and ready for a schedule."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.capture import Captured, capture, fake_values, source_line
from grace.torch.pipeline.places import Mesh
from grace.torch.pipeline.point_to_point import Crossing, PointToPointStage
from grace.torch.pipeline.rows import count_rows
from grace.torch.pipeline.stages import StageSpec, build_module, stage_specs


def shape_key(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of all that stages are built for: shapes and dtypes of tensors, other values, and the active
    autocast."""
    known = [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else repr(one) for one in flat]
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    gpu = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (*known, cast, gpu)


class BuiltStages:
    """Stages of this rank for micro-batches of certain shapes.

    Args:
        model: the user's model, in the mode (training or not) that stages are built in.
        args, kwargs: this rank's rows of a micro-batch.
        nodes: names of the nodes of each stage in training.
        trained: True if the model is in training mode.
        owners: the stages of each parameter and buffer.
        mesh: the pipeline's ranks.
        device: device of this rank's stages.
        recompute: see :class:`PointToPointStage`.
        whole: for each flat input, True if it has no rows.
        before_communication: see :class:`PointToPointStage`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Any,
        kwargs: Any,
        nodes: Sequence[Sequence[str]],
        trained: bool,
        owners: Mapping[str, Collection[int]],
        mesh: Mesh,
        device: torch.device,
        recompute: bool,
        whole: Sequence[bool],
        before_communication: Callable[[], None] | None = None,
    ):
        self.captured = capture(model, args, kwargs)
        self.atoms = Atoms(self.captured)
        count = len(mesh.ranks)
        nodes = nodes if trained else _evaluation_stages(self.atoms, nodes, owners)
        self.specs = stage_specs(self.atoms, nodes)
        # computed under the active autocast, which decides the dtypes that cross
        value_of = {node.name: value for node, value in fake_values(self.captured).items()}
        flat = self.captured.flat(args, kwargs)
        rows = count_rows(flat, whole)
        axes = {} if mesh.equal_replicas else _row_axes(model, flat, self.captured, rows, whole)
        crossing = lambda name: _make_crossing(name, value_of[name], axes, mesh.equal_replicas)  # noqa: E731
        self.stages: list[PointToPointStage] = []
        for i in mesh.stages:
            spec = self.specs[i]
            placement = mesh.placement(i)
            assert placement is not None
            self.stages.append(
                PointToPointStage(
                    build_module(self.atoms, spec, i == count - 1),
                    i,
                    count,
                    mesh.position,
                    mesh.positions,
                    [crossing(name) for name in spec.receives],
                    [crossing(name) for name in spec.sends],
                    placement,
                    mesh.placement(i - 1),
                    mesh.placement(i + 1),
                    rows,
                    mesh.group,
                    device,
                    recompute and i < count - 1,
                    before_communication,
                )
            )
        self.schedule: Any = None

    def inputs(self, flat: Sequence[Any]) -> dict[int, list[Any]]:
        """Return the model's inputs that each stage of this rank reads, by the stage's number."""
        by_name = dict(zip(self.captured.inputs, flat, strict=True))
        specs: list[StageSpec] = [self.specs[stage.stage_index] for stage in self.stages]
        return {spec.index: [by_name[name] for name in spec.inputs] for spec in specs}

    def output(self, flat: Sequence[Any]) -> Any:
        """Return the model's output, made of the last stage's flat outputs."""
        return pytree.tree_unflatten(list(flat), self.captured.out_spec)


def _evaluation_stages(
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


def _row_axes(
    model: torch.nn.Module, flat: Sequence[Any], captured: Captured, rows: int, whole: Sequence[bool]
) -> dict[str, int | None]:
    """Return the dimension of rows of each value: the only one that doubles if the batch has twice as many rows."""
    double = [
        torch.cat([one, one]) if isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) and not alone else one
        for one, alone in zip(flat, whole, strict=True)
    ]
    twice = fake_values(capture(model, *pytree.tree_unflatten(double, captured.in_spec)))
    other = {node.name: value for node, value in twice.items()}
    axes: dict[str, int | None] = {}
    for node, value in fake_values(captured).items():
        if isinstance(value, torch.Tensor) and node.name in other:
            sizes = list(zip(value.shape, other[node.name].shape, strict=False))
            differ = [i for i, (a, b) in enumerate(sizes) if a != b]
            axes[node.name] = differ[0] if len(differ) == 1 and sizes[differ[0]] == (rows, 2 * rows) else None
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
