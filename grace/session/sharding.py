"""Shards: the parts of variables that are exchanged, and their communicators."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from grace.communicators import Allreduce
from grace.communicators.sparse import row_communicator
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.outer import Outer
from grace.core.variable import Variable
from grace.exchange.sparse_codec import RowCompressor
from grace.exchange.sparse_rows import SparseRows
from grace.kernels.index_coding import check_positions
from grace.session.bucket_limits import Limits


@dataclass(frozen=True)
class Shard:
    """Variable, or part of one, that is exchanged.

    Attributes:
        variable: the shard: the variable itself, or ``name/part_i``.
        whole: the whole variable.
        communicator: the communicator of its gradients; that of its drifts, if ``outer`` is set.
        fusion_key: shards with equal keys may share a bucket.
        limits: limits of a bucket; None for none.
        priority: shards of a lower priority start first.
        outer: None if gradients are exchanged in every step; else the settings of the rounds in which ranks that train
            alone exchange their drifts.
        hierarchical: True if the ranks of a node reduce first; equal for all shards of a communicator.
        axis, start, stop: the range of the shard in the variable; axis is None if the shard is the whole variable.
    """

    variable: Variable
    whole: Variable
    communicator: Communicator
    fusion_key: Hashable = None
    limits: Limits | None = None
    priority: int = 0
    outer: Outer | None = None
    axis: int | None = None
    start: int = 0
    stop: int = 0
    hierarchical: bool = False

    @property
    def period(self) -> int:
        """Number of iterations between two rounds; 0 if gradients are exchanged."""
        return 0 if self.outer is None else self.outer.period

    @property
    def wire_bytes(self) -> float:
        """Bytes that a rank sends of this shard; the bytes of its gradient if the payload's size is unknown."""
        compressor = self.communicator.compressor
        bits = None if compressor.traits.exact else compressor.wire_bits(self.variable.shape)
        return float(self.variable.nbytes) if bits is None else bits * self.variable.numel / 8

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor of the whole variable, a view if the framework has views; of
        :class:`SparseRows`, the rows inside the shard.

        >>> import numpy as np
        >>> part, whole = Variable("w/part_1", (2, 1)), Variable("w", (2, 3))
        >>> Shard(part, whole, Allreduce(), axis=1, start=2, stop=3).slice_of(np.arange(6).reshape(2, 3)).tolist()
        [[2], [5]]
        """
        if self.axis is None:
            return tensor
        if isinstance(tensor, SparseRows):
            return tensor.slice_rows(self.start, self.stop)
        return tensor[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def to_whole(self, slices: SparseRows) -> SparseRows:
        """Return rows of this shard with the row numbers of the whole variable."""
        return slices if self.axis is None else SparseRows(slices.values, slices.rows + self.start)


def hierarchical_shards(shards: Sequence[Shard]) -> bool | list[str]:
    """Return True if the ranks of a node reduce all shards first, False if none; the names of the shards if only some.

    >>> flat, led = (Shard(Variable(n, (1,)), Variable(n, (1,)), Allreduce(), hierarchical=n == "b") for n in "ab")
    >>> hierarchical_shards([flat]), hierarchical_shards([led]), hierarchical_shards([flat, led])
    (False, True, ['b'])
    """
    led = [shard.variable.name for shard in shards if shard.hierarchical]
    return led if 0 < len(led) < len(shards) else bool(led)


def uniform(
    variables: Sequence[Variable],
    communicator: Communicator,
    limits: Limits | None = None,
    together: Sequence[Sequence[str]] | None = None,
    outer: Outer | None = None,
) -> list[Shard]:
    """Return shards of whole variables: with one communicator for all variables that its compressor makes smaller, and
    dense for the others, together.

    Args:
        variables: the variables in declaration order.
        communicator: the user's communicator.
        limits: limits of a bucket; None for one bucket.
        together: sets of names of variables that may share a bucket; all variables may, if left out.
        outer: the settings of rounds, if ranks train alone.
    """
    place = {name: i for i, names in enumerate(together or []) for name in names}
    choose = Chooser()
    shards = []
    for variable in variables:
        exchanged = variable if outer is None else replace(variable, sparse=False)  # drifts are dense
        chosen = choose(exchanged, communicator)
        own = None if exchanged.sparse else limits  # a sparse gradient has few rows, whatever the variable's size
        shards.append(Shard(exchanged, variable, chosen, place.get(variable.name), own, outer=outer))
    return shards


class Chooser:
    """Choice of the communicator of each variable: the user's, if it makes the gradient smaller, else one dense
    communicator for all such variables; a communicator of rows for sparse gradients."""

    def __init__(self) -> None:
        self.dense = Allreduce("none")
        self.rows: dict[int, Communicator] = {}

    def __call__(self, variable: Variable, wanted: Communicator) -> Communicator:
        """Return the communicator for one variable.

        Raises:
            ConfigError: the variable has too many elements, or rows, for 32-bit positions.
        """
        if variable.sparse:
            check_positions(
                variable.shape[0], f"the sparse variable {variable.name!r}", "the exchange of its rows", "rows"
            )
            if id(wanted) not in self.rows:
                self.rows[id(wanted)] = row_communicator(wanted, variable.name)
            return self.rows[id(wanted)]
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
    """Return the communicator that exchanges a communicator's variables uncompressed: a plain all-reduce, or plain
    payloads to and from the rank that reduces; for sparse variables one of rows.

    >>> from grace.communicators import Allgather
    >>> uncompressed(Allgather("topk")).describe()
    'allreduce, none, none'
    """
    plain = communicator.dense_communicator(Allreduce("none"))
    return row_communicator(plain, "") if isinstance(communicator.compressor, RowCompressor) else plain
