"""What a bucket's exchange puts on the wire and keeps in memory: bytes, counted as :mod:`grace.exchange` packs them."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.communicators.broadcast import Broadcast
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.communicators.scatter_merge import ScatterMerge
from grace.communicators.scatter_reduce import ScatterReduce
from grace.compressors.cast import Cast
from grace.compressors.powersgd import PowerSGD
from grace.core.compressor import Compressor
from grace.core.kept import is_ours
from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.bucket import Bucket
from grace.exchange.owners import owners_of
from grace.exchange.places import NUMBERS
from grace.exchange.sparse_codec import RowCompressor
from grace.exchange.two_hops import FEWEST_RANKS, MOST_BYTES


class Payloads(NamedTuple):
    """One collective of an exchange.

    Attributes:
        kind: see :data:`grace.planner.network.KINDS`.
        nbytes: of a rank's buffer; of its payload alone, where all payloads are gathered.
        rooted: whether it begins or ends at one rank.
        hop: whether it is but the second half of a sum.
        half: whether 16-bit floats are added up.
    """

    kind: str
    nbytes: float
    rooted: bool = False
    hop: bool = False
    half: bool = False


class Layout:
    """How the exchange of a bucket is packed.

    Args:
        bucket: what travels, and what carries it.
        ranks: how many exchange with each other.
        bits: that an element takes, where the data decide; of sparse variables, an element of a row.
        rows: rows that come, of sparse variables by name.
        by_ring: whether the engine's sums go round a ring.
        concatenates: whether the engine gathers payloads of unequal sizes itself.
        averaging: it is averaged now and then, as it is.

    Raises:
        ConfigError: nobody says how many bits an element takes.
    """

    def __init__(
        self,
        bucket: Bucket,
        ranks: int,
        bits: float | None = None,
        rows: Mapping[str, float] | None = None,
        by_ring: bool = False,
        concatenates: bool = False,
        averaging: bool = False,
    ):
        self.bucket, self.ranks, self.bits, self.rows = bucket, ranks, bits, rows or {}
        self.communicator: Any = bucket.communicator
        self.compressor: Compressor = self.communicator.compressor
        self.traits = self.compressor.traits
        self.by_ring, self.concatenates, self.averaging = by_ring, concatenates, averaging
        self.sparse = bucket.variables[0].sparse and not averaging
        self.exact = averaging or (self.traits.exact and not self.communicator.memory.stateful and not self.sparse)
        self.sums = averaging or self.communicator.sums
        through_one = isinstance(self.communicator, ReduceBroadcast) and not averaging
        self.room = (NUMBERS * (ranks if self.sums or through_one else 1)) if bucket.carries else 0
        self.varies = self.traits.varies and not averaging

    @functools.cached_property
    def elements(self) -> float:
        """How many are compressed."""
        if not self.sparse:
            return sum(variable.numel for variable in self.bucket.variables)
        return sum(self._rows_of(v) * math.prod(v.shape[1:]) for v in self.bucket.variables)

    @functools.cached_property
    def payload(self) -> float:
        """Bytes of all variables' payloads."""
        return sum(self._payload_of(variable) for variable in self.bucket.variables)

    def payloads(self) -> list[Payloads]:
        """Its collectives, in their order."""
        if self.averaging:
            return self._sums([self.payload])
        if isinstance(self.communicator, ScatterMerge):
            return self._merged()
        if isinstance(self.communicator, ScatterReduce):
            return self._scattered()
        if isinstance(self.communicator, ReduceBroadcast):
            return self._through_one()
        if self.sums:
            return self._sums(self._by_round())
        kind = "broadcast" if isinstance(self.communicator, Broadcast) else "allgather"
        nbytes = self._padded(self.payload)
        if not self.varies:
            return [Payloads(kind, nbytes)]
        if self.concatenates and self.communicator.gathers:
            return [Payloads(kind, self._sizes() + nbytes)]
        return [Payloads("allgather", self._sizes()), Payloads(kind, nbytes)]

    def within(self, largest: int) -> tuple[list[Payloads], list[float]]:
        """What the ranks of a node send each other before and behind the exchange of their leaders: collectives, and
        the buffers that are broadcast."""
        variables, room = self.bucket.variables, NUMBERS if self.bucket.carries else 0
        marks = 4.0 * len(variables)
        if self.sparse:
            own = [self._rows_of(v) * (4 + 4 * math.prod(v.shape[1:])) for v in variables]
            body = sum(own) + len(variables) + room
            sizes = Payloads("allgather", 16.0 * len(variables))
            shares = [nbytes for v in variables for nbytes in (8.0, 4 * self._rows_of(v))]
            shares += [4 * self._rows_of(v) * math.prod(v.shape[1:]) for v in variables]
            return [sizes, Payloads("allgather", body + -body % 8)], [marks, *shares]
        items = [v.bits // 8 if self.exact else 4 for v in variables]
        shares = [float(item * v.numel) for item, v in zip(items, variables, strict=True)]
        header = items[0] * (len(variables) + room * largest)
        return [Payloads("allreduce", sum(shares) + header)], [marks, *shares]

    # -- by communicator -------------------------------------------------------------------------------

    def _sums(self, rounds: Sequence[float]) -> list[Payloads]:
        header, found = self._item * (len(self.bucket.variables) + self.room), list[Payloads]()
        for payload in rounds:
            nbytes = payload + header
            if not self._two_hops(nbytes):
                found.append(Payloads("allreduce", nbytes, half=self._item == 2))
                continue
            nbytes += -nbytes % (self.ranks * self._item)
            found += [Payloads("alltoall", nbytes), Payloads("allgather", nbytes / self.ranks, hop=True)]
        return found

    def _two_hops(self, nbytes: float) -> bool:
        """Whether a sum is made in two; see :class:`grace.exchange.two_hops.TwoHopExchange`."""
        if not self.by_ring or self.ranks < FEWEST_RANKS or not self.bucket.variables[0].device.startswith("cpu"):
            return False
        small = sum(v.nbytes for v in self.bucket.variables) <= MOST_BYTES or not (self.traits.exact or self.averaging)
        return small and nbytes <= MOST_BYTES

    def _through_one(self) -> list[Payloads]:
        found = [Payloads("allgather", self._sizes())] if self.varies else []
        for payload in self._by_round():
            if self.sums:
                nbytes = payload + self._item * (len(self.bucket.variables) + self.room)
            else:
                nbytes = self._padded(payload)
            found.append(Payloads("gather", nbytes, rooted=True))
            if self.varies:
                found.append(Payloads("broadcast", self._sizes(), rooted=True))
            found.append(Payloads("broadcast", nbytes, rooted=True))
        return found

    def _scattered(self) -> list[Payloads]:
        """The first rank's pieces are the longest."""
        first = [-(-v.numel // self.ranks) for v in self.bucket.variables]
        longest = self._padded(sum(round(self._bits((n,)) * n / 8) for n in first))
        return [Payloads("alltoall", self.ranks * longest), Payloads("allgather", longest)]

    def _merged(self) -> list[Payloads]:
        sizes = tuple(v.numel for v in self.bucket.variables)
        counts = tuple(self.compressor.count(v.shape) or 0 for v in self.bucket.variables)
        owners = owners_of(sizes, counts, self.ranks)
        share, answer = self._padded(8 * owners.room), self._padded(8 * owners.answer)
        return [Payloads("alltoall", self.ranks * share), Payloads("allgather", answer)]

    # -- bytes -----------------------------------------------------------------------------------------

    def _padded(self, payload: float) -> float:
        """With statuses and places, in bytes."""
        nbytes = payload + len(self.bucket.variables) + self.room
        return nbytes + -nbytes % 8

    def _sizes(self) -> float:
        """What says how large all payload tensors are."""
        return 8.0 * len(self.bucket.variables) * tensors_of(self.compressor)

    def _by_round(self) -> list[float]:
        """Bytes of payload in each of the method's rounds."""
        rounds = self.traits.rounds
        if rounds == 1:
            return [self.payload]
        compressor = self.compressor
        if isinstance(compressor, PowerSGD):
            sizes = [compressor.sizes(v.shape) for v in self.bucket.variables]
            return [4.0 * sum(rows * rank for rows, _, rank in sizes), 4.0 * sum(c * rank for _, c, rank in sizes)]
        return [self.payload / rounds] * rounds

    @functools.cached_property
    def _item(self) -> int:
        """Bytes of a number that the engine adds up."""
        if self.exact:
            return self.bucket.variables[0].bits // 8
        values = getattr(self.compressor, "values", self.compressor)
        return round((values.wire_bits((1,)) or 32) / 8) if isinstance(values, Cast) else 4

    def _payload_of(self, variable: Variable) -> float:
        if self.exact:
            return float(variable.nbytes)
        if self.sparse:
            rows = self._rows_of(variable)
            shape = (max(1, round(rows)), *variable.shape[1:])
            return rows * (4 + math.prod(shape[1:]) * self._bits(shape) / 8)
        bits = self._bits(variable.shape)
        return float(round(bits * variable.numel / 8))

    def _rows_of(self, variable: Variable) -> float:
        return min(self.rows.get(variable.name, math.inf), variable.shape[0])

    def _bits(self, shape: tuple[int, ...]) -> float:
        """Of an element."""
        compressor = self.compressor.inner if isinstance(self.compressor, RowCompressor) else self.compressor
        bits = 32.0 if compressor.traits.exact else compressor.wire_bits(shape)
        bits = self.bits if bits is None else bits
        if bits is None:
            raise ConfigError(
                f"{self.bucket.names[0]!r} is carried by {self.communicator.describe()}, whose bytes the data decide: "
                "its codec must say the bits that an element takes (Codec.bits), as it was measured"
            )
        return bits


def of_all_ranks(communicator: Any) -> tuple[bool, bool, bool]:
    """Whether what is computed before, between and behind a communicator's collectives is done with whole payloads of
    every rank, and so grows with the ranks.

    >>> of_all_ranks(ReduceBroadcast("topk")), of_all_ranks(ScatterReduce("qsgd"))
    ((False, True, False), (False, False, False))
    """
    if isinstance(communicator, ReduceBroadcast):
        return False, True, False
    of_pieces = isinstance(communicator, (ScatterReduce, ScatterMerge))  # which get shorter
    return False, False, not (communicator.sums or of_pieces)


@functools.lru_cache(maxsize=1024)
def _tensors_of(spec: str) -> int:
    try:
        payload, _ = make("compressor", spec).compress(np.ones(64, np.float32), "w")
    except TypeError:  # NumPy has no bfloat16
        return 1
    return len(payload)


def tensors_of(compressor: Compressor) -> int:
    """How many tensors a payload has, of a method whose payloads vary in size; two (values and positions) of others
    than Grace's own.

    >>> from grace.core.registry import make
    >>> tensors_of(make("compressor", "threshold")), tensors_of(make("compressor", "inceptionn"))
    (2, 4)
    """
    if isinstance(compressor, RowCompressor):
        inner = compressor.inner
        return 1 + (1 if inner.traits.exact else tensors_of(inner))
    if not all(is_ours(type(part)) for part in compressor.whole().values()):
        return 2
    return _tensors_of(compressor.spec)


def kept_bytes(
    bucket: Bucket, layout: Layout, payloads: Sequence[Payloads], keepers: Sequence[tuple[str, Any]]
) -> float:
    """Bytes that a bucket's exchange keeps on the rank that keeps most: what method and memories remember, twice (what
    is kept, and what this step makes of it); its buffers; and what comes from other ranks.

    Args:
        keepers: the parts that remember something, by what they are.
    """
    communicator: Any = bucket.communicator
    ranks, kept = layout.ranks, 0.0
    for kind, part in keepers:
        share = ranks if kind == "shard_memory" else 1
        for variable in bucket.variables:
            shape = (-(-variable.numel // share),) if share > 1 else variable.shape
            kept += 8.0 * _numbers(part.keeps(shape), variable.numel / share)
    wires = 0.0
    for payload in payloads:
        gathers = payload.kind in ("allgather", "gather") or (payload.kind == "broadcast" and not payload.rooted)
        came = ranks * payload.nbytes if gathers else 0.0 if payload.kind == "allreduce" else payload.nbytes
        wires = max(wires, payload.nbytes + came)
    if communicator.delayed and not layout.averaging:
        under_way = communicator.staleness if communicator.sync else communicator.ahead
        wires = wires * max(1, under_way) + 4.0 * layout.elements * under_way
    return kept + wires


def _numbers(keeps: Any, usual: float) -> float:
    """How many numbers there are in what a part keeps; as many as the variable has where it does not say."""
    if keeps is None:
        return usual
    if keeps is float:
        return 1.0
    if isinstance(keeps, dict):
        return sum(_numbers(one, usual) for one in keeps.values())
    return float(math.prod(keeps))
