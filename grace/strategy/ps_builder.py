"""Base of builders that send variables to destinations, the ranks that AutoDist calls parameter servers (PS)."""

from dataclasses import dataclass
from typing import Any

from grace.communicators.reduce_broadcast import AHEAD, ReduceBroadcast
from grace.core.variable import Variable
from grace.strategy.builder import Builder
from grace.strategy.plan import ShardPlan


@dataclass
class PSBuilder(Builder):
    """Builder that sends variables, or some, to destinations.

    Args:
        sync: False to apply means as they come.
        staleness: number of steps that a rank may run ahead.
        local_replication: True to send the answer once to each node, where one rank sends it to the others.
        ahead: number of steps whose means may be under way with ``sync=False``.

    >>> PSBuilder(staleness=2).reduced(Variable("w", (4,)), destination=1).sync.options["staleness"]
    2
    """

    sync: bool = True
    staleness: int = 0
    local_replication: bool = False
    ahead: int = AHEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        ReduceBroadcast(**self._sync_fields())  # raises if they do not go together

    def reduced(self, variable: Variable, destination: int, **options: Any) -> ShardPlan:
        """Return the plan of a part that one rank reduces, with the builder's parameters."""
        return super().reduced(variable, destination, **self._sync_fields(), **options)

    def _sync_fields(self) -> dict[str, Any]:
        """Return the fields of ``sync``, but for the destination."""
        return {key: getattr(self, key) for key in ReduceBroadcast.parameters() if key != "destination"}
