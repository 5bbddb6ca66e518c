"""The stages of this process for inputs of certain shapes: captured, cut, and ready for a schedule."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.capture import Captured, capture, line_of, values
from grace.torch.pipeline.places import Places
from grace.torch.pipeline.point_to_point import Crossing, PointToPointStage
from grace.torch.pipeline.rows import rows_of
from grace.torch.pipeline.stages import Piece, module_of, pieces


def shapes_of(flat: Sequence[Any]) -> tuple[Any, ...]:
    """What stages are built for: shapes and dtypes of tensors, other values, and the autocast that is on."""
    known = [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else repr(one) for one in flat]
    cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    gpu = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (*known, cast, gpu)


class Built:
    """Stages for micro-batches of certain shapes.

    Args:
        model: the user's, in the mode (training or not) that stages are built in.
        args, kwargs: a micro-batch, this rank's rows.
        nodes: of each stage in training, by name.
        trained: whether the model is in training mode.
        owners: the stages of each parameter and buffer.
        places: of this rank.
        device: of this rank's stages.
        recompute: see :class:`PointToPointStage`.
        whole: of the flat inputs, whether they have no rows.
        before_travel: see :class:`PointToPointStage`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: Any,
        kwargs: Any,
        nodes: Sequence[Sequence[str]],
        trained: bool,
        owners: Mapping[str, Collection[int]],
        places: Places,
        device: torch.device,
        recompute: bool,
        whole: Sequence[bool],
        before_travel: Callable[[], None] | None = None,
    ):
        self.captured = capture(model, args, kwargs)
        self.atoms = Atoms(self.captured)
        count = len(places.ranks)
        nodes = nodes if trained else _evaluated(self.atoms, nodes, owners)
        self.pieces = pieces(self.atoms, nodes)
        found = values(self.captured)  # under the autocast that is on
        known = {node.name: value for node, value in found.items()}
        flat = self.captured.flat(args, kwargs)
        rows = rows_of(flat, whole)
        axes = {} if places.equal else _axes(model, flat, self.captured, rows, whole)
        crossing = lambda name: _crossing(name, known[name], axes, places.equal)  # noqa: E731
        self.stages: list[PointToPointStage] = []
        for i in places.stages:
            piece, place = self.pieces[i], places.place(i)
            assert place is not None
            self.stages.append(
                PointToPointStage(
                    module_of(self.atoms, piece, i == count - 1),
                    i,
                    count,
                    places.position,
                    places.positions,
                    [crossing(name) for name in piece.receives],
                    [crossing(name) for name in piece.sends],
                    place,
                    places.place(i - 1),
                    places.place(i + 1),
                    rows,
                    places.group,
                    device,
                    recompute and i < count - 1,
                    before_travel,
                )
            )
        self.schedule: Any = None

    def inputs(self, flat: Sequence[Any]) -> dict[int, list[Any]]:
        """What each stage of this rank reads of the model's inputs."""
        by_name = dict(zip(self.captured.inputs, flat, strict=True))
        pieces: list[Piece] = [self.pieces[stage.stage_index] for stage in self.stages]
        return {piece.index: [by_name[name] for name in piece.inputs] for piece in pieces}

    def output(self, flat: Sequence[Any]) -> Any:
        """What the model returns, of the last stage's flat outputs."""
        return pytree.tree_unflatten(list(flat), self.captured.out_spec)


def _evaluated(
    atoms: Atoms, nodes: Sequence[Sequence[str]], owners: Mapping[str, Collection[int]]
) -> Sequence[Sequence[str]]:
    """The stages in evaluation: those of training as far as nodes have the same names, or else by their parameters."""
    stages = {name: i for i, names in enumerate(nodes) for name in names}
    with contextlib.suppress(ConfigError):
        found = by_owners(atoms, owners, len(nodes), stages)
        if all(found):
            return found
    return by_owners(atoms, owners, len(nodes), {})


def by_owners(
    atoms: Atoms, owners: Mapping[str, Collection[int]], count: int, least: Mapping[str, int]
) -> list[list[str]]:
    """The stages of a graph that was not planned (evaluation's): each node at the first stage that has its parameters
    and comes after what it reads.

    Args:
        atoms: of the graph.
        owners: the stages that have each parameter and buffer.
        count: of stages.
        least: the first stage that a node may be in, by name.

    Raises:
        ConfigError: there is no such stage for a node.
    """
    mates = {name: group for group in atoms.together for name in group}
    at = {node.name: least.get(node.name, 0) for node in atoms.dynamic}
    before: dict[str, int] = {}
    while before != at:
        before = dict(at)
        for node in atoms.dynamic:
            low = max(
                at[node.name],
                *(at.get(one.name, 0) for one in atoms.reads(node)),
                *(at[name] for name in mates.get(node.name, (node.name,))),
            )
            sets = [owners[str(one.target)] for one in atoms.constants(node) if str(one.target) in owners]
            fits = [stage for stage in range(low, count) if all(stage in own for own in sets)]
            if not fits:
                raise ConfigError(
                    f"in this mode (training or not) the model reads parameters in another order: {node.name!r} "
                    f"({line_of(node)}) comes after stage {low}, and its parameters are in an earlier one"
                )
            at[node.name] = fits[0]
    found: list[list[str]] = [[] for _ in range(count)]
    for name, stage in at.items():
        found[stage].append(name)
    return found


def _axes(
    model: torch.nn.Module, flat: Sequence[Any], captured: Captured, rows: int, whole: Sequence[bool]
) -> dict[str, int | None]:
    """Where the rows of each value are: the dimension that is twice as large for twice as many rows."""
    double = [
        torch.cat([one, one]) if isinstance(one, torch.Tensor) and one.shape[:1] == (rows,) and not alone else one
        for one, alone in zip(flat, whole, strict=True)
    ]
    twice = values(capture(model, *pytree.tree_unflatten(double, captured.in_spec)))
    other = {node.name: value for node, value in twice.items()}
    axes: dict[str, int | None] = {}
    for node, value in values(captured).items():
        if isinstance(value, torch.Tensor) and node.name in other:
            sizes = list(zip(value.shape, other[node.name].shape, strict=False))
            differ = [i for i, (a, b) in enumerate(sizes) if a != b]
            axes[node.name] = differ[0] if len(differ) == 1 and sizes[differ[0]] == (rows, 2 * rows) else None
    return axes


def _crossing(name: str, value: Any, axes: Mapping[str, int | None], equal: bool) -> Crossing:
    axis = axes.get(name)
    if axis is None and not equal:
        raise ConfigError(
            f"the value of {name!r} (shape {tuple(value.shape)}) has no dimension of its own for rows, so it cannot "
            "cross between stages with different numbers of replicas: cut elsewhere, or let all stages have as many"
        )
    return Crossing(name, tuple(value.shape), value.dtype, value.requires_grad, axis)
