"""The gradients' exchange of a stage over its replicas, behind the schedule: seconds, and bytes that Grace keeps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from grace.communicators.choice import build_communicator
from grace.core.variable import Variable
from grace.planner.network import Network
from grace.planner.simulate import simulate
from grace.planner.step import Timeline, Work
from grace.planner.works import Costs, works_of
from grace.session.bucketing import Limits
from grace.session.sharding import uniform

LEAST = Variable("", (1,))
"""What an exchange of almost nothing has."""


class Exchanges:
    """Predicts exchanges of one method.

    Args:
        costs: of the cluster; its networks are not used.
        compressor, memory, communicator: specs, or None for their defaults.

    Raises:
        ConfigError: they are unknown, or do not go together.

    >>> from grace.planner.network import Links
    >>> from grace.planner.usual import UsualCodecs
    >>> slow = Links(1e8)
    >>> found = [Exchanges(Costs(slow, UsualCodecs()), spec) for spec in ("none", "topk(ratio=0.01)")]
    >>> plain, sparse = (one.seconds([Variable("w", (1000, 1000))], 2, slow) for one in found)
    >>> plain > 5 * sparse
    True
    """

    def __init__(self, costs: Costs, compressor: Any = None, memory: Any = None, communicator: Any = None):
        self.costs, self.choices = costs, (compressor, memory, communicator)
        build_communicator(*self.choices)
        self._made: dict[int, Any] = {}
        self._costs: dict[int, Costs] = {}  # which hold the networks

    def seconds(self, variables: Sequence[Variable], replicas: int, network: Network) -> float:
        """What the exchange takes when all gradients are there and nothing else is computed."""
        if replicas == 1 or not variables:
            return 0.0
        found = self._works(variables, replicas, network)
        return simulate(Timeline({}), found, self.costs.contention, self.costs.step).step

    def beside(self, variables: Sequence[Variable], replicas: int, network: Network, timeline: Timeline) -> float:
        """Seconds of a step of data parallelism alone, whose exchange goes on beside backward."""
        found = [] if replicas == 1 or not variables else self._works(variables, replicas, network)
        return simulate(timeline, found, self.costs.contention, self.costs.step if found else 0.0).step

    def kept(self, variables: Sequence[Variable], replicas: int) -> float:
        """Bytes of memories and buffers on a rank."""
        if replicas == 1 or not variables:
            return 0.0
        return sum(work.memory for work in self._works(variables, replicas, self.costs.network))

    def _works(self, variables: Sequence[Variable], replicas: int, network: Network) -> list[Work]:
        if replicas not in self._made:
            self._made[replicas] = build_communicator(*self.choices, replicas)
        if id(network) not in self._costs:
            self._costs[id(network)] = dataclasses.replace(self.costs, network=network, inside=None)
        shards = uniform(variables, self._made[replicas], Limits())
        return works_of(shards, replicas, self._costs[id(network)])
