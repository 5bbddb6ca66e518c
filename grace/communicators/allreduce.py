"""Allreduce: the engine adds payloads up."""

from grace.core.communicator import Communicator
from grace.core.route import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Carries, EngineTraits, Leg, Route

FEWEST_RANKS, MOST_BYTES = 4, 1 << 18
"""Least number of ranks, and largest wire in bytes, for a sum in two hops on engines that sum around a ring. The sum of
a larger wire is bound by bytes, and not by the number of hops."""


class Allreduce(Communicator):
    """Communicator whose engine sums payloads in their own dtype; for summable payloads only.

    Small wires are summed in two hops: each rank adds up a part, in float32 and in rank order, and sends it to all.

    >>> Allreduce("fp16").describe()
    'allreduce, cast, none'
    """

    name = "allreduce"
    cost = "~2p"
    sums = True

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        # gloo's ring sends 2 (W-1) messages one after the other, each of which takes a latency
        # (docs/decisions/041-small-collectives-take-few-hops.md).
        if engine.by_ring and engine.on_cpu and engine.ranks >= FEWEST_RANKS and nbytes <= MOST_BYTES:
            return [Leg(ALL_TO_ALL, Carries.GRADIENTS, reduce_scatters=True), Leg(ALL_GATHER, Carries.SUMS)]
        return [Leg(ALL_REDUCE, Carries.GRADIENTS)]
