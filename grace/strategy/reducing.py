"""What builders that send variables to destinations have in common."""

from dataclasses import dataclass, replace
from typing import Any

from grace.communicators.reduce_broadcast import AHEAD, ReduceBroadcast
from grace.core.variable import Variable
from grace.strategy.builder import Builder
from grace.strategy.plan import ShardPlan


@dataclass
class Reducing(Builder):
    """A builder that sends variables, or some, to destinations.

    Args:
        sync: False to apply means as they come.
        staleness: how many steps a rank may run ahead.
        local_replication: send the answer once to each node, where one rank hands it to the others.
        ahead: how many steps' means may be under way with ``sync=False``.

    >>> Reducing(staleness=2).reduced(Variable("w", (4,)), destination=1).sync.staleness
    2
    """

    sync: bool = True
    staleness: int = 0
    local_replication: bool = False
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        ReduceBroadcast(**self._said())  # refuses what cannot be

    def reduced(self, variable: Variable, destination: int) -> ShardPlan:
        """A part that one rank reduces, as the builder's parameters say."""
        part = super().reduced(variable, destination)
        return replace(part, sync=replace(part.sync, **self._said()))

    def _said(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("sync", "staleness", "local_replication", "ahead")}
