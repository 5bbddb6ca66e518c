"""Allreduce: the engine adds payloads up."""

from grace.communicators.base import Communicator
from grace.core.backend import Handle
from grace.core.compressor import Tensor
from grace.exchange.base import Exchange
from grace.exchange.bucket import Contribution
from grace.exchange.two_hops import TwoHopExchange


class Allreduce(Communicator):
    """Sums payloads in the engine, in their own dtype; for summable payloads only.

    >>> Allreduce("fp16").describe()
    'allreduce, cast, none'
    """

    name = "allreduce"
    sums = True
    cost = "~2p"

    def begin(self, contribution: Contribution) -> Exchange:
        return (TwoHopExchange if TwoHopExchange.suits(contribution) else Exchange)(contribution)

    def communicate(self, wire: Tensor) -> Handle:
        return self.backend.allreduce(wire).map(lambda total: [total])
