"""Shards: what the exchange sees of each variable, how each travels, and which of them travel together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from grace.communicators import Allreduce
from grace.communicators.sparse import row_communicator
from grace.core.communicator import Communicator
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.exchange.sparse_codec import RowCompressor
from grace.exchange.sparse_rows import SparseRows
from grace.kernels.index_coding import check_positions
from grace.session.bucketing import Limits


@dataclass(frozen=True)
class Shard:
    """A variable, or a part of one, as it is exchanged.

    Attributes:
        variable: the shard: the variable itself, or ``name/part_i``.
        whole: the variable.
        communicator: what carries it; that of the averages now and then, if ``period`` is set.
        travels: shards may share a collective if this is equal.
        limits: how much may share one; None for all.
        priority: shards of a lower one start first.
        period: not exchanged; the variable itself is averaged every so many steps.
        hierarchical: the ranks of a node reduce it among themselves first; all shards of a communicator, or none.
        axis, start, stop: where the shard lies in the variable; axis None if it is all of it.
    """

    variable: Variable
    whole: Variable
    communicator: Communicator
    travels: Hashable = None
    limits: Limits | None = None
    priority: int = 0
    period: int = 0
    axis: int | None = None
    start: int = 0
    stop: int = 0
    hierarchical: bool = False

    @property
    def wire_bytes(self) -> float:
        """What a rank sends of it; as much as its gradient has, where that is not known."""
        compressor = self.communicator.compressor
        bits = None if compressor.traits.exact else compressor.wire_bits(self.variable.shape)
        return float(self.variable.nbytes) if bits is None else bits * self.variable.numel / 8

    def of(self, tensor: Any) -> Any:
        """This shard of a tensor of the whole variable: a view where the framework has views; of :class:`SparseRows`,
        those whose rows lie in it.

        >>> import numpy as np
        >>> part, whole = Variable("w/part_1", (2, 1)), Variable("w", (2, 3))
        >>> Shard(part, whole, Allreduce(), axis=1, start=2, stop=3).of(np.arange(6).reshape(2, 3)).tolist()
        [[2], [5]]
        """
        if self.axis is None:
            return tensor
        if isinstance(tensor, SparseRows):
            return tensor.between(self.start, self.stop)
        return tensor[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def back(self, slices: SparseRows) -> SparseRows:
        """Rows of this shard, numbered as those of the whole variable."""
        return slices if self.axis is None else SparseRows(slices.values, slices.rows + self.start)


def hierarchical(shards: Sequence[Shard]) -> bool | list[str]:
    """Whether the ranks of a node reduce shards among themselves first; which, if only some.

    >>> flat, led = (Shard(Variable(n, (1,)), Variable(n, (1,)), Allreduce(), hierarchical=n == "b") for n in "ab")
    >>> hierarchical([flat]), hierarchical([led]), hierarchical([flat, led])
    (False, True, ['b'])
    """
    led = [shard.variable.name for shard in shards if shard.hierarchical]
    return led if 0 < len(led) < len(shards) else bool(led)


def uniform(
    variables: Sequence[Variable],
    communicator: Communicator,
    limits: Limits | None = None,
    together: Sequence[Sequence[str]] | None = None,
) -> list[Shard]:
    """One communicator for all variables that its compressor shrinks; the others ride dense, together.

    Args:
        variables: in declaration order.
        communicator: the user's.
        limits: of a bucket; None for all variables in one.
        together: names of variables that may share a bucket; all may, if left out.
    """
    place = {name: i for i, names in enumerate(together or []) for name in names}
    choose = Chooser()
    shards = []
    for variable in variables:
        chosen = choose(variable, communicator)
        own = None if variable.sparse else limits  # its rows are few, whatever the variable's size
        shards.append(Shard(variable, variable, chosen, place.get(variable.name), own))
    return shards


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
            return wanted.dense_communicator(self.dense)
        if wanted.compressor.by_position:
            check_positions(variable.numel, f"variable {variable.name!r}", wanted.compressor.spec)
        return wanted


def uncompressed(communicator: Communicator) -> Communicator:
    """Return what carries a communicator's variables while it does not compress them: a plain all-reduce, or plain
    payloads to and from the rank that reduces; of sparse variables, their rows.

    >>> from grace.communicators import Allgather
    >>> uncompressed(Allgather("topk")).describe()
    'allreduce, none, none'
    """
    plain = communicator.dense_communicator(Allreduce("none"))
    if not isinstance(communicator.compressor, RowCompressor):
        return plain
    rows: Any = row_communicator(plain, "")
    rows.compressor.shapes.update(communicator.compressor.shapes)
    return rows  # type: ignore[no-any-return]


def bucketed(shards: Sequence[Shard]) -> list[Bucket]:
    """The buckets, in the order in which all ranks start them, whatever becomes ready first.

    Shards are taken in reverse order of declaration, as backward produces gradients. Buckets with the lowest priority
    come first; among equals those with the earliest complete gradients.
    """
    position = {shard.variable.name: i for i, shard in enumerate(shards)}
    kinds: dict[Hashable, list[Shard]] = {}
    for shard in reversed(shards):
        variable, communicator = shard.variable, shard.communicator
        exact = communicator.compressor.traits.exact and not communicator.memory.stateful
        dtype = variable.dtype if exact or communicator.compress_after else "float32"  # one is summed as it is
        kind = (id(communicator), dtype, variable.device, shard.travels, shard.priority, shard.limits)
        kinds.setdefault(kind, []).append(shard)
    ordered = sorted(
        (members[::-1] for alike in kinds.values() for members in cut(alike, alike[0].limits)),
        key=lambda members: (members[0].priority, -position[members[0].variable.name]),
    )
    return [Bucket(i, members[0].communicator, [p.variable for p in members]) for i, members in enumerate(ordered)]


def cut(shards: Sequence[Shard], limits: Limits | None, first: bool = True) -> list[Sequence[Shard]]:
    """Shards that may travel together, in the order in which they become ready, in buckets.

    Args:
        shards: of one communicator.
        limits: of a bucket; None for all in one.
        first: whether a smaller one goes first.
    """
    if limits is None:
        return [shards]
    lengths = limits.lengths([(shard.variable.nbytes, shard.wire_bytes) for shard in shards], first)
    return [shards[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
