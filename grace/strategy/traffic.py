"""What a strategy sends: bytes per part, and per rank and direction, counted from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grace.strategy.plan import Part, Strategy, bits_of
from grace.variable import Variable


@dataclass(frozen=True)
class PartTraffic:
    """One part's payload in bytes; an upper bound where the data decide."""

    nbytes: int
    exact: bool


def payload(part: Part, variable: Variable) -> PartTraffic:
    """The bytes of one rank's payload of a part.

    >>> payload(Part(compressor="fp16"), Variable("w", (10, 4)))
    PartTraffic(nbytes=80, exact=True)
    """
    bits = bits_of(part, variable)
    if variable.sparse:  # rows that come, and their numbers; all of them at most
        rows = 32 * variable.shape[0] if variable.shape else 0
        return PartTraffic(math.ceil((variable.numel * variable.bits + rows) / 8), False)
    return PartTraffic(math.ceil((variable.numel * variable.bits if bits is None else bits) / 8), bits is not None)


def sent_by(part: Part, variable: Variable, nbytes: int, world: int, rank: int) -> float:
    """Bytes that leave a rank in a step, headers not counted; as many reach it.

    allreduce, scatter_reduce: 2 (W-1)/W p; allgather, broadcast, and rows of sparse variables: (W-1) p;
    reduce_broadcast: p from every rank to the destination, which sends (W-1) p; none: an all-reduce now and then.

    >>> [sent_by(Part(), Variable("w", (25,)), 100, 4, rank) for rank in (0, 1)]
    [150.0, 150.0]
    """
    kind = part.sync.type
    if kind in ("allgather", "broadcast") or (variable.sparse and kind not in ("reduce_broadcast", "none")):
        return (world - 1) * nbytes
    if kind == "reduce_broadcast":
        own = rank == part.sync.destination
        return (world - 1) * nbytes if own else nbytes
    return 2 * (world - 1) / world * nbytes / part.sync.period


def totals(strategy: Strategy) -> list[float]:
    """Bytes that leave each rank in a step."""
    world = strategy.world_size
    sums = [0.0] * world
    for plan in strategy.plans:
        for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
            nbytes = payload(part, variable).nbytes
            for rank in range(world):
                sums[rank] += sent_by(part, variable, nbytes, world, rank)
    return sums
