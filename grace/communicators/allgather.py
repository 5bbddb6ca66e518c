"""Allgather: every rank receives and decodes every payload."""

from grace.core.communicator import Communicator
from grace.core.route import ALL_GATHER, Carries, EngineTraits, Leg, Route


class Allgather(Communicator):
    """Communicator that gathers all payloads on all ranks, which decode and accumulate them in float32.

    >>> Allgather("qsgd(levels=7)").describe()
    'allgather, qsgd(levels=7), none'
    """

    name = "allgather"
    cost = "(W-1)p"

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        return [Leg(ALL_GATHER, Carries.GRADIENTS)]
