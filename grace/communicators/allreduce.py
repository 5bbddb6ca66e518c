"""Allreduce: the engine adds payloads up."""

from __future__ import annotations

from grace.communicators.base import Communicator


class Allreduce(Communicator):
    """Sums payloads in the engine, in their own dtype; for summable payloads only.

    >>> Allreduce("fp16").describe()
    'allreduce, cast, none'
    """

    name = "allreduce"
    sums = True
    cost = "~2p"

    def communicate(self, wire):
        return self.backend.allreduce(wire).map(lambda total: [total])
