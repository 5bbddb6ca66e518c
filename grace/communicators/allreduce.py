"""Allreduce: the engine adds payloads up."""

from grace.communicators.base import Communicator
from grace.core.backend import Handle
from grace.core.compressor import Tensor


class Allreduce(Communicator):
    """Sums payloads in the engine, in their own dtype; for summable payloads only.

    >>> Allreduce("fp16").describe()
    'allreduce, cast, none'
    """

    name = "allreduce"
    sums = True
    cost = "~2p"

    def communicate(self, wire: Tensor) -> Handle:
        return self.backend.allreduce(wire).map(lambda total: [total])
