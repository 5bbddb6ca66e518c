"""Stand-in for a distributed optimizer on a rank outside its process set, where every rank runs the same script."""

from typing import Any

from grace.exchange.bucket import Traffic
from grace.session.metrics import metrics
from grace.session.state_schema import SavedState
from grace.strategy.execution import StrategyArg
from grace.strategy.resources import ResourcesArg


class NonMemberMixin:
    """Methods of a distributed optimizer on a rank that exchanges nothing and keeps no state."""

    strategy = None
    plan = None

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank: none."""
        return Traffic()

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger, all of whose counts are 0."""
        return metrics(None, self.traffic)

    def full_state_dict(self, packed: bool = False) -> SavedState:
        """Return the user's optimizer's state. This rank has no memories."""
        return self.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore the user's optimizer's state. Memories belong to the ranks in the set."""
        own = {key: value for key, value in state_dict.items() if key != "grace"}
        super().load_state_dict(own)  # type: ignore[misc]

    def use_strategy(self, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
        """Do nothing: only the ranks in the set switch to the strategy."""
