"""The user's choices, one method for all variables or a strategy, as an exchange plan."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grace.errors import ConfigError
from grace.session.bucketing import Limits
from grace.session.plan import ExchangePlan, UniformPlan
from grace.strategy.builder import Builder
from grace.strategy.execution import StrategyPlan

STRATEGY = "GRACE_STRATEGY"
"""Environment variable by which ``grace launch --strategy`` names the file."""


class Choices(NamedTuple):
    """Arguments of the user: specs, objects, or None where none was given."""

    compressor: Any = None
    memory: Any = None
    communicator: Any = None
    strategy: Any = None
    resources: Any = None

    @property
    def asks_for_auto(self) -> bool:
        """True if the planner is to choose: ``strategy="auto"``, as a spec, dict or builder, or in the environment."""
        strategy = os.environ.get(STRATEGY) if self.strategy is None else self.strategy
        if isinstance(strategy, str):
            return strategy.partition("(")[0].strip() == "auto"
        if isinstance(strategy, dict):
            return strategy.get("name") == "auto"
        return isinstance(strategy, Builder) and strategy.name == "auto"

    def plan(
        self,
        limits: Limits | None = None,
        together: Callable[[], Sequence[Sequence[str]] | None] = lambda: None,
        sparse_known: bool = True,
    ) -> ExchangePlan:
        """Return the exchange plan of these choices.

        Args:
            limits: bounds of the bytes in one collective, where no strategy says them.
            together: returns names of variables that may share a collective, where no strategy says them.
            sparse_known: True if the variables tell which gradients are sparse; else a strategy does.

        Raises:
            ConfigError: a strategy, and one method for all as well; or resources, and no strategy to build for them.
        """
        strategy = self.strategy
        given = [key for key in ("compressor", "memory", "communicator") if getattr(self, key) is not None]
        source = "strategy="
        if strategy is None and os.environ.get(STRATEGY):
            strategy = os.environ[STRATEGY]
            source = f"the strategy of {STRATEGY} ({strategy})"
        if strategy is None and self.resources is not None:
            raise ConfigError("resources= is what a strategy's builder builds for: give strategy= too")
        if strategy is None:
            return UniformPlan(self.compressor, self.memory, self.communicator, limits, together)
        if given:
            raise ConfigError(
                f"{source} says how each variable is exchanged, and {given[0]}= for all of them: leave one of them out"
            )
        return StrategyPlan(strategy, sparse_known, self.resources)
