"""Broadcast: each rank broadcasts its payload in turn."""

from grace.communicators.base import Communicator
from grace.core.backend import Handle
from grace.core.compressor import Tensor
from grace.kernels import kernels_of


class Broadcast(Communicator):
    """W broadcasts, one per rank; the result is that of Allgather, for engines where it is faster.

    >>> Broadcast("signsgd").describe()
    'broadcast, signsgd, none'
    """

    name = "broadcast"
    cost = "(W-1)p"

    def communicate(self, wire: Tensor) -> Handle:
        k = kernels_of(wire)
        handles = []
        for root in range(self.backend.size):
            buffer = wire if root == self.backend.rank else k.zeros(tuple(wire.shape), k.dtype(wire), wire)
            handles.append(self.backend.broadcast(buffer, root))
        return Handle.all(handles)
