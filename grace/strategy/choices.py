"""The user's choices, one method for all variables or a strategy, as an exchange plan."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.outer import Outer, OuterArg
from grace.core.registry import make
from grace.errors import ConfigError
from grace.session.bucket_limits import Limits
from grace.session.exchange_plan import ExchangePlan, UniformPlan
from grace.strategy.builder import Builder
from grace.strategy.execution import StrategyArg, StrategyPlan
from grace.strategy.resources import ResourcesArg

STRATEGY = "GRACE_STRATEGY"
"""Environment variable by which ``grace launch --strategy`` names the file."""


class AutoRequest(NamedTuple):
    """The user's request that the planner chooses.

    Attributes:
        options: the builder ``auto`` (:class:`grace.planner.builders.auto.Auto`), with its parameters.
        resources: the cluster, if a file describes it.
    """

    options: Any
    resources: ResourcesArg | None

    def starting_choices(self, choices: "Choices") -> "Choices":
        """Return the same choices with the strategy that planning starts from."""
        return choices._replace(strategy=self.options.baseline)


class Choices(NamedTuple):
    """Arguments of the user: specs, objects, or None where none was given."""

    compressor: CompressorArg | None = None
    memory: MemoryArg | None = None
    communicator: CommunicatorArg | None = None
    strategy: StrategyArg | None = None
    resources: ResourcesArg | None = None
    outer: OuterArg | None = None
    period: int | None = None

    def rounds(self) -> Outer | None:
        """Return the settings of rounds; None if gradients are exchanged in every step.

        Raises:
            ConfigError: a setting cannot work.

        >>> Choices(outer="nesterov(lr=0.7)", period=20).rounds().describe()
        'outer nesterov(period=20)'
        """
        if self.outer is None and self.period is None:
            return None
        if self.outer is None or self.period is None:
            raise ConfigError(
                "outer= and period= go together: the outer optimizer ('none' averages, 'nesterov'), and the number of "
                "iterations between two rounds"
            )
        outer = Outer(self.outer, period=self.period)
        outer.check()
        return outer

    def auto_request(self) -> AutoRequest | None:
        """Return the request for ``strategy="auto"``, as a spec, dict or builder, or in the environment; None if the
        user chose something else.

        Raises:
            ConfigError: it has an unknown parameter, or one of a wrong value.

        >>> Choices(strategy="auto(replan=500)").auto_request().options.replan
        500
        >>> Choices(strategy="parallax").auto_request() is None
        True
        """
        strategy = os.environ.get(STRATEGY) if self.strategy is None else self.strategy
        name = strategy.name if isinstance(strategy, Builder) else None
        if isinstance(strategy, str):
            name = strategy.partition("(")[0].strip()
        elif isinstance(strategy, dict):
            name = strategy.get("name")
        if name != "auto" or not isinstance(strategy, (str, dict, Builder)):
            return None
        return AutoRequest(make("builder", strategy), self.resources)

    def plan_for_hook(self, what: str) -> ExchangePlan:
        """Return the exchange plan of these choices for the hook ``what``, which exchanges as its framework's buckets
        come.

        Raises:
            ConfigError: the planner is asked to choose.
        """
        if self.auto_request():
            raise ConfigError(f"strategy='auto' plans while training runs, which {what} cannot: give a strategy's file")
        return self.plan()

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
        named = ("compressor", "memory", "communicator", "outer", "period")
        given = [key for key in named if getattr(self, key) is not None]
        source = "strategy="
        if strategy is None and os.environ.get(STRATEGY):
            strategy = os.environ[STRATEGY]
            source = f"the strategy of {STRATEGY} ({strategy})"
        if strategy is None and self.resources is not None:
            raise ConfigError("resources= is for a strategy's builder: give strategy= too")
        if strategy is None:
            return UniformPlan(self.compressor, self.memory, self.communicator, limits, together, self.rounds())
        if given:
            raise ConfigError(
                f"{source} says how each variable is exchanged, and {given[0]}= for all of them: leave one of them out"
            )
        return StrategyPlan(strategy, sparse_known, self.resources)
