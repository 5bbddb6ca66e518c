"""Allgather: every rank receives and decodes every payload."""

from grace.communicators.base import Communicator
from grace.core.backend import Handle
from grace.core.compressor import Tensor


class Allgather(Communicator):
    """Gathers all payloads on all ranks, which decode and accumulate them in float32.

    >>> Allgather("qsgd(levels=7)").describe()
    'allgather, qsgd(levels=7), none'
    """

    name = "allgather"
    gathers = True
    cost = "(W-1)p"

    def communicate(self, wire: Tensor) -> Handle:
        return self.backend.allgather(wire)
