"""What a strategy sends: bytes per part, and per rank and direction, counted from shapes."""

import math
from dataclasses import dataclass
from typing import Any

from grace.core.registry import known, make
from grace.core.variable import Variable
from grace.kernels.index_coding import index_bits
from grace.strategy.plan import COLLECTIVES, ShardPlan, Strategy, bits_of


@dataclass(frozen=True)
class PartTraffic:
    """One part's payload in bytes; an upper bound where the data decide."""

    nbytes: int
    exact: bool


def payload(part: ShardPlan, variable: Variable) -> PartTraffic:
    """The bytes of one rank's payload of a part.

    >>> payload(ShardPlan(compressor="fp16"), Variable("w", (10, 4)))
    PartTraffic(nbytes=80, exact=True)
    """
    if part.sync.type == "none":  # the variable itself, as it is
        return PartTraffic(variable.nbytes, True)
    if variable.sparse:  # rows that come, in float32 and whatever their number, and their numbers; all of them at most
        shape = (max(1, variable.shape[0]), *variable.shape[1:])
        return PartTraffic(math.ceil((most_bits(part, shape) + 32 * shape[0]) / 8), False)
    bits = bits_of(part, variable)
    exact = bits is not None
    return PartTraffic(math.ceil((most_bits(part, variable.shape) if bits is None else bits) / 8), exact)


def most_bits(part: ShardPlan, shape: tuple[int, ...]) -> float:
    """Wire bits of a tensor of this shape, compressed; where the data decide, the most that a built-in method sends:
    all values, and where they are.

    >>> most_bits(ShardPlan(compressor="threshold"), (10,))
    544.0
    """
    compressor, n = make("compressor", part.compressor), math.prod(shape)
    bits = 32.0 if compressor.traits.exact else compressor.wire_bits(shape)
    return 64.0 + (32 + index_bits(n)) * n if bits is None else math.ceil(round(bits * n, 3))


def like(kind: str) -> str:
    """The collective that a communicator of the user's is counted as: what it is derived from, or else an all-reduce if
    it sums, and an all-gather if not."""
    classes: Any = known("communicator")
    own = classes[kind]
    return next(
        (name for name in COLLECTIVES if issubclass(own, classes[name])), "allreduce" if own.sums else "allgather"
    )


def carried_by(part: ShardPlan, variable: Variable) -> str:
    """The type of synchronization that a part really gets: what its compressor would not shrink is summed, dense.

    >>> from grace.strategy.plan import Sync
    >>> carried_by(ShardPlan(Sync("allgather"), "topk"), Variable("scalar", ()))
    'allreduce'
    """
    kind = part.sync.type
    if kind in ("reduce_broadcast", "none"):
        return kind
    if variable.sparse:
        return "allgather"
    if kind not in COLLECTIVES:
        kind = like(kind)
    compressor = make("compressor", part.compressor)
    if compressor.traits.exact:
        return kind
    bits = compressor.wire_bits(variable.shape)
    return "allreduce" if not variable.numel or (bits is not None and bits >= variable.bits) else kind


def sent_by(part: ShardPlan, variable: Variable, nbytes: int, world: int, rank: int) -> float:
    """Bytes that leave a rank in a step, headers not counted; as many reach it.

    allreduce, scatter_reduce, scatter_merge, and dense parts that their compressor would not shrink: 2 (W-1)/W p;
    allgather, broadcast, and rows of sparse variables: (W-1) p; reduce_broadcast: p from every rank to the destination,
    which sends (W-1) p; none: an all-reduce now and then. Under scatter_reduce every shard has the scale that the
    method sends of a tensor (a norm, say), which p counts once; under scatter_merge positions take 32 bits, and an
    owner has room for a few entries more, which p does not count.

    >>> [sent_by(ShardPlan(), Variable("w", (25,)), 100, 4, rank) for rank in (0, 1)]
    [150.0, 150.0]
    """
    kind = carried_by(part, variable)
    if kind in ("allgather", "broadcast"):
        return (world - 1) * nbytes
    if kind == "reduce_broadcast":
        return (world - 1) * nbytes if rank == part.sync.destination else nbytes
    return 2 * (world - 1) / world * nbytes / (part.sync.period if kind == "none" else 1)


def links(strategy: Strategy) -> list[list[float]]:
    """Bytes that go from each rank (first index) to each other one in a step.

    Sums go round a ring, from each rank to the next; what is gathered goes from everyone to everyone, as shards do.

    >>> from grace.strategy.plan import Sync, VariablePlan
    >>> through_1 = ShardPlan(Sync("reduce_broadcast", destination=1))
    >>> links(Strategy((VariablePlan(Variable("w", (25,)), (through_1,)),), world_size=3))
    [[0.0, 100.0, 0.0], [100.0, 0.0, 100.0], [0.0, 100.0, 0.0]]
    """
    world = strategy.world_size
    sums = [[0.0] * world for _ in range(world)]
    for plan in strategy.plans:
        for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
            nbytes, kind = payload(part, variable).nbytes, carried_by(part, variable)
            for rank in range(world):
                others = [other for other in range(world) if other != rank]
                if kind in ("allreduce", "none"):
                    others = [(rank + 1) % world] if others else []
                elif kind == "reduce_broadcast" and rank != part.sync.destination:
                    others = [part.sync.destination]
                for other in others:
                    sums[rank][other] += sent_by(part, variable, nbytes, world, rank) / len(others)
    return sums


def kinds(strategy: Strategy) -> list[tuple[list[int], float]]:
    """Ranks that send as much in a step as each other, and how many bytes: each destination of a reduce_broadcast by
    itself, and last all others alike, as an empty list, if there are any. What a rank sends it also receives.

    >>> from grace.strategy.plan import VariablePlan, Sync
    >>> part = ShardPlan(Sync("reduce_broadcast", destination=7))
    >>> kinds(Strategy((VariablePlan(Variable("w", (25,)), (part,)),), world_size=10**9))
    [([7], 99999999900.0), ([], 100.0)]
    """
    world, usual, more = strategy.world_size, 0.0, dict[int, float]()
    for plan in strategy.plans:
        for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
            nbytes, to = payload(part, variable).nbytes, part.sync.destination
            other = sent_by(part, variable, nbytes, world, to + 1)
            usual += other
            if carried_by(part, variable) == "reduce_broadcast":
                more[to] = more.get(to, 0.0) + sent_by(part, variable, nbytes, world, to) - other
    found: list[tuple[list[int], float]] = [([rank], usual + extra) for rank, extra in sorted(more.items())]
    return found + [([], usual)] * (len(more) < world)
