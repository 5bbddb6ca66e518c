"""Costs of each bucket of a plan in a step: the bytes of its route's legs (:mod:`grace.exchange.route_bytes`), and
seconds as they were measured."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.core.communicator import Communicator
from grace.core.component import StateForm
from grace.core.route import EngineTraits
from grace.errors import ConfigError, warn
from grace.exchange.bucket import Bucket
from grace.exchange.route_bytes import LegBytes, predict_bytes, rows_of
from grace.exchange.sparse_codec import RowCompressor
from grace.planner.costs import CodecCost
from grace.planner.network import KINDS, Network
from grace.planner.step_simulation import BucketCosts, Transfer
from grace.session.bucketing import make_buckets
from grace.session.sharding import Shard
from grace.strategy.execution import make_shards
from grace.strategy.plan import Strategy

DENSE = "allreduce, none, none"
"""The codec of uncompressed sums."""


@dataclass(frozen=True)
class Costs:
    """Measurements of a cluster and of the methods on it.

    Attributes:
        network: between the ranks that exchange.
        codecs: computing of methods, by :func:`codec_key`.
        inside: the network within a node, for pipelines; ``network`` if left out.
        by_ring, concatenates: as backends have them.
        rows: rows of a step's gradients, of sparse variables by name; all of them where it does not say.
    """

    network: Network
    codecs: Mapping[str, CodecCost]
    inside: Network | None = None
    by_ring: bool = False
    concatenates: bool = False
    rows: Mapping[str, float] = field(default_factory=dict)


def codec_key(communicator: Communicator) -> str:
    """Return the key of a codec, as "allgather, topk, residual": communicator, compressor and memory, without the
    communicator's own parameters, which say who computes and when."""
    return f"{communicator.name}, {communicator.compressor.spec}, {communicator.memory.spec}"


def costs_of_strategy(strategy: Strategy, costs: Costs) -> list[BucketCosts]:
    """Return the costs of a strategy's buckets, in the order in which ranks start them. A warning names variables that
    are predicted as exchanged by all ranks in every step, and are not. Raise ConfigError if there is no codec for what
    it uses, which the message names.

    >>> from grace.core.variable import Variable
    >>> from grace.planner.network import Links
    >>> from grace.strategy.plan import ShardPlan, VariablePlan
    >>> plans = tuple(VariablePlan(Variable(name, (1000,)), (ShardPlan(),)) for name in "ab")
    >>> (work,) = costs_of_strategy(Strategy(plans, world_size=2), Costs(Links(1e9), {DENSE: CodecCost()}))
    >>> work.names, work.transfers[0].nbytes
    (('a', 'b'), 8048.0)
    """
    shards = make_shards(strategy, strategy.variables)
    others = [(shard.whole.name, way) for shard in shards if (way := _other_way(shard))]
    if others:
        name, way = others[0]
        said = "and predicted as if all ranks exchanged it in every step"
        warn(f"{name!r} is {way}, {said}")
    return costs_of_shards(shards, strategy.world_size, costs)


def _other_way(shard: Shard) -> str:
    """Return how a shard travels, in words, if not all ranks exchange it in every step and wait for it."""
    if shard.hierarchical:
        return "reduced in each node first"
    if shard.outer is not None:
        return f"exchanged once in {shard.period} steps"
    return "applied in a later step" if shard.communicator.delayed else ""


def costs_of_shards(
    shards: Sequence[Shard], ranks: int, costs: Costs, known: dict[Hashable, BucketCosts] | None = None
) -> list[BucketCosts]:
    """Return the costs of the shards' buckets. Communicators need not be in a run. Costs of buckets that are alike
    are kept in ``known``, for shards with the same communicators.

    All ranks exchange with each other, in every step, and wait: sums over nodes first, rounds of ranks that train
    alone, and means that are applied later are not modelled. Raise ConfigError as :func:`costs_of_strategy` does.
    """
    whole = {shard.variable.name: shard.whole.name for shard in shards}
    found, carried, known = [], set[bool](), {} if known is None else known
    for bucket in make_buckets(shards):
        # one bucket of a step carries the header, and one beside training
        bucket.carries_stamps = bucket.communicator.delayed not in carried
        carried.add(bucket.communicator.delayed)
        key = id(bucket.communicator), bucket.carries_stamps, tuple(bucket.names)
        if key not in known:  # a search asks for the same bucket many times
            names = tuple(dict.fromkeys(whole[name] for name in bucket.names))
            known[key] = _costs_of_bucket(bucket, names, ranks, costs)
        found.append(known[key])
    return found


def _costs_of_bucket(bucket: Bucket, names: tuple[str, ...], ranks: int, costs: Costs) -> BucketCosts:
    """Return the costs of a bucket, which belongs to the variables of these names. Raise ConfigError if nobody
    measured its method, or the bits of its elements."""
    communicator = bucket.communicator
    codec = costs.codecs.get(codec_key(communicator))
    if codec is None:
        raise ConfigError(
            f"{names[0]!r} is carried by {codec_key(communicator)}, and nobody measured what that takes. Measured: "
            f"{', '.join(map(repr, costs.codecs)) or 'nothing'}"
        )
    compressor = communicator.compressor
    inner = compressor.inner if isinstance(compressor, RowCompressor) else compressor
    if codec.bits is None and any(inner.wire_bits(variable.shape) is None for variable in bucket.variables):
        raise ConfigError(
            f"{bucket.names[0]!r} is carried by {communicator.describe()}, whose bytes the data decide: its codec must "
            "say the bits that an element takes (CodecCost.bits), as it was measured"
        )
    on_cpu = bucket.variables[0].device.startswith("cpu")
    legs = predict_bytes(bucket, EngineTraits(ranks, costs.by_ring, costs.concatenates, on_cpu), codec.bits, costs.rows)
    gaps = len(legs) - 1
    computed = gaps - sum(leg.reduce_scatters for leg, _, _ in legs[:-1])  # behind a part of a sum comes its other half
    elements = 0.0
    for v in bucket.variables:  # of a sparse one the elements of the rows that have gradients
        elements += rows_of(v, costs.rows) * math.prod(v.shape[1:]) if v.sparse else v.numel
    size = len(bucket.variables), elements, ranks
    return BucketCosts(
        names=names,
        start=codec.start.seconds(*size),
        transfers=transfers_of(legs, ranks, costs.network),
        middle=codec.middle.seconds(*size) * computed / gaps if gaps else 0.0,
        finish=codec.finish.seconds(*size),
        memory=_memory(bucket, ranks, elements, legs),
    )


def transfers_of(legs: Sequence[LegBytes], ranks: int, network: Network) -> tuple[Transfer, ...]:
    """Return the collectives of a route on so many ranks; none of one rank. One of the user's, which no network was
    measured for, is taken for an all-to-all that sends as much as it sends from the rank that sends most."""
    found = []
    for leg, nbytes, dtype in legs if ranks > 1 else ():
        kind, root = leg.collective.name, -1 if leg.root is None else leg.root
        sent = leg.sent(nbytes, ranks, 0 if leg.root is None else root + 1)
        if kind not in KINDS:
            kind, root, sent = "alltoall", -1, max(leg.sent(nbytes, ranks, rank) for rank in range(ranks))
            nbytes = sent * ranks / (ranks - 1)  # of which an all-to-all sends (W-1)/W
        timed = "allreduce16" if kind == "allreduce" and dtype in ("float16", "bfloat16") else kind
        seconds, contention = network.seconds(timed, nbytes, ranks), network.contention.get(timed, 0.0)
        if kind == "broadcast" and root < 0:  # each rank in its turn
            seconds *= ranks
        root_sends = leg.sent(nbytes, ranks, root) if root >= 0 else 0.0
        found.append(Transfer(kind, seconds, sent, root, root_sends, contention))
    return tuple(found)


def _memory(bucket: Bucket, ranks: int, elements: float, legs: Sequence[LegBytes]) -> float:
    """Return the bytes that a bucket's exchange keeps on the rank that keeps most: the state of its method and
    memories twice (as it is kept, and as this step makes it); its buffers; and what comes from other ranks."""
    communicator: Any = bucket.communicator
    kept = wires = 0.0
    for kind, part in communicator.stateful_parts.items():
        share = ranks if kind == "shard_memory" else 1
        for variable in bucket.variables if part.stateful else ():
            shape = (-(-variable.numel // share),) if share > 1 else variable.shape
            kept += 8.0 * _numbers(part.keeps(shape), variable.numel / share)  # of float32: kept, and staged
    for leg, nbytes, _ in legs:
        kind = leg.collective.name
        gathers = kind in ("allgather", "gather") or (kind == "broadcast" and leg.root is None)
        came = ranks * nbytes if gathers else 0.0 if kind == "allreduce" else nbytes
        wires = max(wires, nbytes + came)
    if communicator.delayed:
        under_way = communicator.staleness if communicator.sync else communicator.ahead
        wires = wires * max(1, under_way) + 4.0 * elements * under_way
    return kept + wires


def _numbers(keeps: StateForm, default: float) -> float:
    """Return how many numbers a part keeps; the default where it does not say."""
    if keeps is None:
        return default
    if isinstance(keeps, type):  # float
        return 1.0
    if isinstance(keeps, Mapping):
        return sum(_numbers(one, default) for one in keeps.values())
    return float(math.prod(keeps))
