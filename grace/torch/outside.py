"""A distributed optimizer on a rank outside its process set, where every rank runs the same script."""

from typing import Any

from grace.exchange.bucket import Traffic
from grace.session.metrics import metrics


class OutsideMixin:
    """The methods that a distributed optimizer has beside the user's, of one that exchanges and remembers nothing."""

    strategy = None
    plan = None

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank: none."""
        return Traffic()

    def metrics(self) -> dict[str, float]:
        """Return the numbers for a logger: 0 in all that is counted."""
        return metrics(None, self.traffic)

    def full_state_dict(self, packed: bool = False) -> dict[str, Any]:
        """Return the user's optimizer's state; there are no memories here."""
        return self.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any], memory: str = "strict") -> None:
        """Restore the user's optimizer's state; memories are those of the ranks in the set."""
        own = {key: value for key, value in state_dict.items() if key != "grace"}
        super().load_state_dict(own)  # type: ignore[misc]

    def use_strategy(self, strategy: Any, resources: Any = None) -> None:
        """Do nothing: the ranks in the set go on by another strategy."""
