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
    """Measurements of a cluster and of the methods on it.

    Attributes:
        network: between the ranks that exchange.
        codecs: computing of methods, by :func:`codec_key`.
        inside: the network within a node, for pipelines; ``network`` if left out.
        contention: the part by which computing takes longer while a collective is under way.
        by_ring, concatenates: as :class:`grace.core.backend.Backend` has them.
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
    """Return the key of a codec: communicator, compressor and memory, without the communicator's own parameters, which
    say who computes and when.

    >>> from grace.communicators import ReduceBroadcast
    >>> codec_key(ReduceBroadcast("topk", destination=1))
    'reduce_broadcast, topk, residual'
    """
    return f"{communicator.name}, {communicator.compressor.spec}, {communicator.memory.spec}"


def works(strategy: Strategy, costs: Costs) -> list[Work]:
    """Return what the buckets of a strategy do, in the order in which ranks start them; averages come last.

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
    """Return what the buckets of shards do, whose communicators need not be in a run.

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
                if own[0].hierarchical:
                    raise ConfigError(f"{names[0]!r} is exchanged by nodes (hierarchical), which is not predicted")
                costs.known[key] = _work(bucket, names, own[0].period, ranks, costs)
            found.append(costs.known[key])
    return found


class Payloads(NamedTuple):
    """Collective of an exchange.

    Attributes:
        kind: one of :data:`grace.planner.network.KINDS`.
        nbytes: bytes of a rank's buffer.
        rooted: True if it begins or ends at one rank.
        hop: True if it is but the second half of a sum.
        half: True if 16-bit floats are added up.
        root: the rank that a rooted one begins or ends at.
    """

    kind: str
    nbytes: float
    rooted: bool = False
    hop: bool = False
    half: bool = False
    root: int = 0


def _work(bucket: Bucket, names: tuple[str, ...], period: int, ranks: int, costs: Costs) -> Work:
    """Return what a bucket does in a step.

    Args:
        names: of the variables that it belongs to.
        period: steps between two averages; 0 if it is exchanged in every step.

    Raises:
        ConfigError: nobody measured its method, or the bits of its elements.
    """
    communicator: Any = bucket.communicator
    key = DENSE if period else codec_key(communicator)
    codec = costs.codecs.get(key)
    if codec is None:
        raise ConfigError(
            f"{names[0]!r} is carried by {key}, and nobody measured what that takes. Measured: "
            f"{', '.join(map(repr, costs.codecs)) or 'nothing'}"
        )
    sparse = bucket.variables[0].sparse and not period  # averages now and then are dense
    elements: float = sum(variable.numel for variable in bucket.variables)
    if sparse:
        elements = sum(rows_of(v, costs.rows) * math.prod(v.shape[1:]) for v in bucket.variables)
    compressor = communicator.compressor
    inner = compressor.inner if isinstance(compressor, RowCompressor) else compressor
    if codec.bits is None and any(inner.wire_bits(variable.shape) is None for variable in bucket.variables):
        raise ConfigError(
            f"{bucket.names[0]!r} is carried by {communicator.describe()}, whose bytes the data decide: its codec must "
            "say the bits that an element takes (Codec.bits), as it was measured"
        )
    on_cpu = bucket.variables[0].device.startswith("cpu")
    engine = EngineTraits(ranks, costs.by_ring, costs.concatenates, on_cpu)
    payloads = payloads_of(bytes_of(bucket, engine, codec.bits, costs.rows), ranks)
    gaps, usual = len(payloads) - 1, sum(not payload.hop for payload in payloads) - 1
    size = len(bucket.variables), elements, ranks
    return Work(
        names=names,
        start=codec.start.seconds(*size),
        transfers=tuple(_transfer(payload, ranks, costs.network) for payload in payloads if ranks > 1),
        middle=codec.middle.seconds(*size) * usual / gaps if gaps else 0.0,
        finish=codec.finish.seconds(*size),
        delayed=communicator.delayed and not period,
        memory=_memory(bucket, ranks, elements, payloads, averaged=period > 0),
        period=period,
    )


def payloads_of(legs: Sequence[LegBytes], ranks: int) -> list[Payloads]:
    """Return the collectives of a route on so many ranks. One of the user's, which no network was measured for, is
    taken for an all-to-all that sends as much as it sends from the rank that sends most."""
    found, in_parts = list[Payloads](), False
    for leg, nbytes, dtype in legs:
        kind, rooted = leg.collective.name, leg.root is not None
        if kind not in KINDS:
            most = max(leg.sent(nbytes, ranks, rank) for rank in range(ranks))
            kind, nbytes, rooted = "alltoall", most * ranks / max(1, ranks - 1), False
        half = kind == "allreduce" and dtype in ("float16", "bfloat16")
        found.append(Payloads(kind, nbytes, rooted, in_parts, half, leg.root or 0))
        in_parts = leg.in_parts
    return found


def _transfer(payload: Payloads, ranks: int, network: Network) -> Transfer:
    """Return a collective, as the wire sees it."""
    kind, nbytes, others = payload.kind, payload.nbytes, ranks - 1
    measured = "allreduce16" if payload.half else kind
    each = network.seconds(measured, nbytes, ranks)
    if payload.rooted:
        root, sending = payload.root, network.seconds(kind, nbytes, 2)
        if kind == "gather":
            return Transfer(kind, each, nbytes, root, sending)
        return Transfer(kind, each, 0.0, root, sending, others * nbytes)
    occupies = max(0.0, each - network.seconds(measured, 0.0, ranks))
    if kind == "broadcast":  # from each rank in its turn
        return Transfer(kind, ranks * each, others * nbytes, occupies=ranks * occupies)
    share = {"allreduce": 2 * others / ranks, "allgather": others, "alltoall": others / ranks}[kind]
    return Transfer(kind, each, share * nbytes, occupies=occupies)


def _memory(bucket: Bucket, ranks: int, elements: float, payloads: Sequence[Payloads], averaged: bool) -> float:
    """Return the bytes that a bucket's exchange keeps on the rank that keeps most: the state of its method and
    memories twice (as it is kept, and as this step makes it); its buffers; and what comes from other ranks."""
    communicator: Any = bucket.communicator
    kept = wires = 0.0
    for kind, part in () if averaged else communicator.stateful_parts.items():
        share = ranks if kind == "shard_memory" else 1
        for variable in bucket.variables if part.stateful else ():
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


def _numbers(keeps: Any, default: float) -> float:
    """Return how many numbers a part keeps; the default where it does not say."""
    if keeps is None:
        return default
    if keeps is float:
        return 1.0
    if isinstance(keeps, dict):
        return sum(_numbers(one, default) for one in keeps.values())
    return float(math.prod(keeps))
