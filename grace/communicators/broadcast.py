"""Broadcast: each rank broadcasts its payload in turn."""

from grace.core.communicator import Communicator
from grace.core.route import EACH_BROADCASTS, Carries, EngineTraits, Leg, Route


class Broadcast(Communicator):
    """Communicator of W broadcasts, one per rank. The result is that of Allgather; on some engines it is faster.

    >>> Broadcast("signsgd").describe()
    'broadcast, signsgd, none'
    """

    name = "broadcast"
    cost = "(W-1)p"

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        return [Leg(EACH_BROADCASTS, Carries.GRADIENTS)]
