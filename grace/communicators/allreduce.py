"""Allreduce: the engine adds payloads up."""

from grace.core.communicator import Communicator
from grace.core.route import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Carries, EngineTraits, Leg, Route

FEWEST_RANKS, MOST_BYTES = 4, 1 << 18
"""A sum of a wire in two hops, on engines whose own go round a ring: beyond, bytes matter and not hops."""


class Allreduce(Communicator):
    """Sums payloads in the engine, in their own dtype; for summable payloads only.

    Small wires go in two hops: each rank adds up a part, in float32 and in the order of ranks, and hands it round.

    >>> Allreduce("fp16").describe()
    'allreduce, cast, none'
    """

    name = "allreduce"
    sums = True

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        if engine.by_ring and engine.on_cpu and engine.ranks >= FEWEST_RANKS and nbytes <= MOST_BYTES:
            return [Leg(ALL_TO_ALL, Carries.GRADIENTS, in_parts=True), Leg(ALL_GATHER, Carries.SUMS)]
        return [Leg(ALL_REDUCE, Carries.GRADIENTS)]
