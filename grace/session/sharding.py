"""Pieces: what the exchange sees of each variable, how each travels, and which of them travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from grace.communicators import Allreduce
from grace.communicators.base import Communicator
from grace.communicators.sparse import row_communicator
from grace.core.variable import Variable
from grace.exchange.bucket import Group
from grace.exchange.sparse_rows import Slices
from grace.kernels.index_coding import check_positions

FIRST_GROUP_BYTES = 1 << 20
"""Where there are several groups, the one that is ready first is small, so that the engine starts early."""


@dataclass(frozen=True)
class Piece:
    """A variable, or a part of one, as it is exchanged.

    Attributes:
        variable: the piece: the variable itself, or ``name/part_i``.
        whole: the variable.
        communicator: what carries it; that of the averages now and then, if ``period`` is set.
        travels: pieces may share a collective if this is equal.
        limit: bytes of gradient that may share one; None for no limit.
        priority: pieces of a lower one start first.
        period: not exchanged; the variable itself is averaged every so many steps.
        axis, start, stop: where the piece lies in the variable; axis None if it is all of it.
    """

    variable: Variable
    whole: Variable
    communicator: Communicator
    travels: Hashable = None
    limit: int | None = None
    priority: int = 0
    period: int = 0
    axis: int | None = None
    start: int = 0
    stop: int = 0

    def of(self, tensor: Any) -> Any:
        """This piece of a tensor of the whole variable: a view where the framework has views; of :class:`Slices`,
        those whose rows lie in it.

        >>> import numpy as np
        >>> part, whole = Variable("w/part_1", (2, 1)), Variable("w", (2, 3))
        >>> Piece(part, whole, Allreduce(), axis=1, start=2, stop=3).of(np.arange(6).reshape(2, 3)).tolist()
        [[2], [5]]
        """
        if self.axis is None:
            return tensor
        if isinstance(tensor, Slices):
            return tensor.between(self.start, self.stop)
        return tensor[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def back(self, slices: Slices) -> Slices:
        """Rows of this piece, numbered as those of the whole variable."""
        return slices if self.axis is None else Slices(slices.values, slices.rows + self.start)


def uniform(
    variables: Sequence[Variable],
    communicator: Communicator,
    group_bytes: int | None = None,
    together: Sequence[Sequence[str]] | None = None,
) -> list[Piece]:
    """One communicator for all variables that its compressor shrinks; the others ride dense, together.

    Args:
        variables: in declaration order.
        communicator: the user's.
        group_bytes: bytes of gradient per group.
        together: names of variables that may share a group; all may, if left out.
    """
    place = {name: i for i, names in enumerate(together or []) for name in names}
    choose = Chooser()
    pieces = []
    for variable in variables:
        chosen = choose(variable, communicator)
        limit = None if variable.sparse else group_bytes  # its rows are few, whatever the variable's size
        pieces.append(Piece(variable, variable, chosen, place.get(variable.name), limit))
    return pieces


class Chooser:
    """What carries a variable, given what the user wants: that, if it makes the gradient smaller, else one dense
    communicator for all such variables; an exchange of rows where the gradient is sparse."""

    def __init__(self) -> None:
        self.dense = Allreduce("none")
        self.rows: dict[int, Communicator] = {}

    def __call__(self, variable: Variable, wanted: Communicator) -> Communicator:
        """The communicator for one variable.

        Raises:
            ConfigError: it has too many elements, or rows, for 32-bit positions.
        """
        if variable.sparse:
            check_positions(
                variable.shape[0], f"the sparse variable {variable.name!r}", "the exchange of its rows", "rows"
            )
            if id(wanted) not in self.rows:
                self.rows[id(wanted)] = row_communicator(wanted, variable.name)
            rows: Any = self.rows[id(wanted)]
            rows.compressor.shapes[variable.name] = variable.shape
            return rows
        traits = wanted.compressor.traits
        if traits.exact:
            return wanted
        bits = wanted.compressor.wire_bits(variable.shape)
        if variable.numel == 0 or (bits is not None and bits >= variable.bits):
            return wanted.dense(self.dense)
        if wanted.compressor.by_position:
            check_positions(variable.numel, f"variable {variable.name!r}", wanted.compressor.spec)
        return wanted


def grouped(pieces: Sequence[Piece]) -> list[Group]:
    """The groups, in the order in which all ranks start them, whatever becomes ready first.

    Pieces are taken in reverse order of declaration, as backward produces gradients. Groups with the lowest priority
    come first; among equals those with the earliest complete gradients.
    """
    position = {piece.variable.name: i for i, piece in enumerate(pieces)}
    kinds: dict[Hashable, list[list[Piece]]] = {}
    total = sum(piece.variable.nbytes for piece in pieces)
    for piece in reversed(pieces):
        variable, communicator = piece.variable, piece.communicator
        exact = communicator.compressor.traits.exact and not communicator.memory.stateful
        dtype = variable.dtype if exact else "float32"
        groups = kinds.setdefault((id(communicator), dtype, variable.device, piece.travels, piece.priority), [])
        limit = piece.limit
        if limit is not None and len(groups) == 1 and total > limit:
            limit = min(limit, FIRST_GROUP_BYTES)
        full = limit is not None and groups and _nbytes(groups[-1]) + variable.nbytes > limit
        if not groups or full:
            groups.append([])
        groups[-1].append(piece)
    ordered = sorted(
        (members[::-1] for groups in kinds.values() for members in groups),
        key=lambda members: (members[0].priority, -position[members[0].variable.name]),
    )
    return [Group(i, members[0].communicator, [p.variable for p in members]) for i, members in enumerate(ordered)]


def _nbytes(members: Sequence[Piece]) -> int:
    return sum(piece.variable.nbytes for piece in members)
