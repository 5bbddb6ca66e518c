"""Costs of each bucket of a plan in a step: bytes as its exchange packs them, and seconds as they were measured.

    allreduce                       allreduce, or alltoall and allgather of small ones where the engine's sums go round
                                    a ring (grace.exchange.two_hops); again for each of the method's rounds
    allgather                       (sizes,) allgather, or one of both where the engine takes unequal lengths
    broadcast                       (sizes,) a broadcast from each rank
    scatter_reduce, scatter_merge   alltoall, allgather
    reduce_broadcast                (sizes,) gather, (sizes,) broadcast; again for each of the method's rounds

Sizes go ahead where the data decide them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grace.core.route import EngineTraits
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import LegBytes, bytes_of, rows_of
from grace.exchange.sparse_codec import RowCompressor
from grace.planner.costs import Codec
from grace.planner.network import KINDS, Network
from grace.planner.step import Transfer, Work
from grace.session.sharding import Shard, make_buckets
from grace.strategy.execution import compiled
from grace.strategy.plan import Strategy

DENSE = "allreduce, none, none"
"""The codec of averages now and then."""
MOST_KNOWN = 100_000
"""Buckets that are remembered."""


@dataclass(frozen=True)
class Costs:
    """The measurements of a cluster and of the methods on it.

    Attributes:
        network: between the ranks that exchange.
        codecs: what computing takes, by :func:`codec_key`.
        inside: within a node, for pipelines; the network itself if left out.
        contention: the part by which computing takes longer while a collective is under way.
        by_ring: whether the engine's sums go round a ring (:attr:`grace.core.backend.Backend.by_ring`).
        concatenates: whether it gathers payloads of unequal sizes itself
            (:attr:`grace.core.backend.Backend.concatenates`).
        rows: rows that a step's gradients have, of sparse variables by name; all of them where it does not say.
    """

    network: Network
    codecs: Mapping[str, Codec]
    inside: Network | None = None
    contention: float = 0.0
    by_ring: bool = False
    concatenates: bool = False
    rows: Mapping[str, float] = field(default_factory=dict)
    known: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Buckets that were worked out before."""


def codec_key(communicator: Any) -> str:
    """The key of a codec: communicator, compressor and memory, without the communicator's own parameters, which
    say who computes and when.

    >>> from grace.communicators import ReduceBroadcast
    >>> codec_key(ReduceBroadcast("topk", destination=1))
    'reduce_broadcast, topk, residual'
    """
    return f"{communicator.name}, {communicator.compressor.spec}, {communicator.memory.spec}"


def works(strategy: Strategy, costs: Costs) -> list[Work]:
    """Return what the buckets of a strategy do, in the order in which ranks start them; averages come last.

    Args:
        strategy: whose world size counts.
        costs: of what it does.

    Raises:
        ConfigError: there is no codec for what it uses, which the message names; or it is hierarchical, which is not
            predicted.

    >>> from grace.core.variable import Variable
    >>> from grace.planner.network import Links
    >>> from grace.strategy.plan import ShardPlan, VariablePlan
    >>> plans = tuple(VariablePlan(Variable(name, (1000,)), (ShardPlan(),)) for name in "ab")
    >>> (work,) = works(Strategy(plans, world_size=2), Costs(Links(1e9), {DENSE: Codec()}))
    >>> work.names, work.transfers[0].nbytes
    (('a', 'b'), 8048.0)
    """
    return works_of(compiled(strategy, strategy.variables), strategy.world_size, costs)


def works_of(shards: Sequence[Shard], ranks: int, costs: Costs) -> list[Work]:
    """Return the same for shards, whose communicators need not be in a run.

    Raises:
        ConfigError: as :func:`works`.
    """
    by_name = {shard.variable.name: shard for shard in shards}
    described = {id(shard.communicator): shard.communicator.describe() for shard in shards}
    found, carried = [], set[bool]()
    for averaged in (False, True):
        for bucket in make_buckets([shard for shard in shards if bool(shard.period) == averaged]):
            if not averaged:  # one bucket of a step carries the header, and one beside training
                bucket.carries = bucket.communicator.delayed not in carried
                carried.add(bucket.communicator.delayed)
            own = [by_name[name] for name in bucket.names]
            names = tuple(dict.fromkeys([shard.whole.name for shard in own]))
            key = described[id(bucket.communicator)], tuple(bucket.variables), names, bucket.carries, averaged, ranks
            if key not in costs.known:
                if len(costs.known) >= MOST_KNOWN:
                    costs.known.clear()
                costs.known[key] = _Exchange(bucket, names, own[0], ranks, costs).work()
            found.append(costs.known[key])
    return found


class Payloads(NamedTuple):
    """One collective of an exchange.

    Attributes:
        kind: see :data:`grace.planner.network.KINDS`.
        nbytes: of a rank's buffer.
        rooted: True if it begins or ends at one rank.
        hop: True if it is but the second half of a sum.
        half: True if 16-bit floats are added up.
    """

    kind: str
    nbytes: float
    rooted: bool = False
    hop: bool = False
    half: bool = False


class _Exchange:
    """The exchange of one bucket, which belongs to variables of these names, among so many ranks."""

    def __init__(self, bucket: Bucket, names: tuple[str, ...], shard: Shard, ranks: int, costs: Costs):
        self.bucket, self.names, self.shard, self.ranks, self.costs = bucket, names, shard, ranks, costs
        self.communicator: Any = bucket.communicator
        self.key = DENSE if shard.period else codec_key(self.communicator)
        codec = costs.codecs.get(self.key)
        if codec is None:
            raise ConfigError(
                f"{names[0]!r} is carried by {self.key}, and nobody measured what that takes. Measured: "
                f"{', '.join(map(repr, costs.codecs)) or 'nothing'}"
            )
        if shard.hierarchical:
            raise ConfigError(f"{names[0]!r} is exchanged by nodes (hierarchical), which is not predicted")
        self.codec = codec
        sparse = bucket.variables[0].sparse and not shard.period  # averages now and then are dense
        self.elements = elements_of(bucket.variables, costs.rows, sparse)
        check_bits(bucket, codec.bits)

    def work(self) -> Work:
        """Return all that the bucket does in a step."""
        on_cpu = self.bucket.variables[0].device.startswith("cpu")
        engine = EngineTraits(self.ranks, self.costs.by_ring, self.costs.concatenates, on_cpu)
        payloads = payloads_of(bytes_of(self.bucket, engine, self.codec.bits, self.costs.rows), self.ranks)
        gaps, usual = len(payloads) - 1, sum(not payload.hop for payload in payloads) - 1
        size = len(self.bucket.variables), self.elements, self.ranks
        stateful = [(kind, part) for kind, part in self.communicator.stateful_parts.items() if part.stateful]
        return Work(
            names=self.names,
            start=self.codec.start.seconds(*size),
            transfers=tuple(map(self._transfer, payloads)) if self.ranks > 1 else (),
            middle=self.codec.middle.seconds(*size) * usual / gaps if gaps else 0.0,
            finish=self.codec.finish.seconds(*size),
            delayed=self.communicator.delayed and not self.shard.period,
            memory=kept_bytes(self.bucket, self.ranks, self.elements, payloads, () if self.shard.period else stateful),
            period=self.shard.period,
        )

    def _transfer(self, payload: Payloads) -> Transfer:
        """Return a collective, as the wire sees it."""
        kind, nbytes, ranks, network, others = (
            payload.kind,
            payload.nbytes,
            self.ranks,
            self.costs.network,
            self.ranks - 1,
        )
        each = network.seconds("allreduce16" if payload.half else kind, nbytes, ranks)
        if payload.rooted:
            root, sending = self.communicator.destination, network.seconds(kind, nbytes, 2)
            if kind == "gather":
                return Transfer(kind, each, nbytes, root, sending)
            return Transfer(kind, each, 0.0, root, sending, others * nbytes)
        occupies = max(0.0, each - network.seconds("allreduce16" if payload.half else kind, 0.0, ranks))
        if kind == "broadcast":  # from each rank in its turn
            return Transfer(kind, ranks * each, others * nbytes, occupies=ranks * occupies)
        share = {"allreduce": 2 * others / ranks, "allgather": others, "alltoall": others / ranks}[kind]
        return Transfer(kind, each, share * nbytes, occupies=occupies)


# -- what travels, and what is kept --------------------------------------------------------------------


def payloads_of(legs: Sequence[LegBytes], ranks: int) -> list[Payloads]:
    """The collectives of a route on so many ranks. One of the user's, which no network was measured for, is taken for
    an all-to-all that sends as much as it sends from the rank that sends most."""
    found, in_parts = list[Payloads](), False
    for leg, nbytes, dtype in legs:
        kind, rooted = leg.collective.name, leg.root is not None
        if kind not in KINDS:
            most = max(leg.sent(nbytes, ranks, rank) for rank in range(ranks))
            kind, nbytes, rooted = "alltoall", most * ranks / max(1, ranks - 1), False
        half = kind == "allreduce" and dtype in ("float16", "bfloat16")
        found.append(Payloads(kind, nbytes, rooted, in_parts, half))
        in_parts = leg.in_parts
    return found


def check_bits(bucket: Bucket, bits: float | None) -> None:
    """Refuse to guess how many bits an element takes.

    Raises:
        ConfigError: the data decide, and nobody says.
    """
    communicator: Any = bucket.communicator
    compressor = communicator.compressor
    inner = compressor.inner if isinstance(compressor, RowCompressor) else compressor
    if bits is None and any(inner.wire_bits(variable.shape) is None for variable in bucket.variables):
        raise ConfigError(
            f"{bucket.names[0]!r} is carried by {communicator.describe()}, whose bytes the data decide: its codec must "
            "say the bits that an element takes (Codec.bits), as it was measured"
        )


def elements_of(variables: Sequence[Variable], rows: Mapping[str, float], sparse: bool) -> float:
    """Return the number of elements that are compressed; with ``sparse`` those of the rows that come."""
    if not sparse:
        return sum(variable.numel for variable in variables)
    return sum(rows_of(variable, rows) * math.prod(variable.shape[1:]) for variable in variables)


def of_all_ranks(communicator: Any) -> tuple[bool, bool, bool]:
    """Whether what is computed before, between and behind a communicator's collectives is done with whole payloads of
    every rank, and so grows with the ranks.

    >>> from grace.communicators import ReduceBroadcast, ScatterReduce
    >>> of_all_ranks(ReduceBroadcast("topk")), of_all_ranks(ScatterReduce("qsgd"))
    ((False, True, False), (False, False, False))
    """
    rooted = communicator.rooted
    return False, rooted, not (rooted or communicator.sums or communicator.cuts)  # pieces get shorter


def kept_bytes(
    bucket: Bucket, ranks: int, elements: float, payloads: Sequence[Payloads], keepers: Sequence[tuple[str, Any]]
) -> float:
    """Bytes that a bucket's exchange keeps on the rank that keeps most: what method and memories remember, twice (what
    is kept, and what this step makes of it); its buffers; and what comes from other ranks.

    Args:
        elements: how many are compressed.
        keepers: the parts that remember something, by what they are.
    """
    communicator: Any = bucket.communicator
    kept = wires = 0.0
    for kind, part in keepers:
        share = ranks if kind == "shard_memory" else 1
        for variable in bucket.variables:
            shape = (-(-variable.numel // share),) if share > 1 else variable.shape
            kept += 8.0 * _numbers(part.keeps(shape), variable.numel / share)
    for payload in payloads:
        gathers = payload.kind in ("allgather", "gather") or (payload.kind == "broadcast" and not payload.rooted)
        came = ranks * payload.nbytes if gathers else 0.0 if payload.kind == "allreduce" else payload.nbytes
        wires = max(wires, payload.nbytes + came)
    if communicator.delayed:
        under_way = communicator.staleness if communicator.sync else communicator.ahead
        wires = wires * max(1, under_way) + 4.0 * elements * under_way
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
