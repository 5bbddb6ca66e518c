"""The request for a strategy that chooses itself, and the strategy that it starts from."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from grace.core.registry import make
from grace.core.variable import Variable
from grace.planner.builders.auto import Auto
from grace.planner.uniform import uniform_strategy
from grace.strategy.builder import Builder, Cluster
from grace.strategy.choices import STRATEGY, Choices
from grace.strategy.plan import Strategy


class AutoRequest(NamedTuple):
    """The user's request.

    Attributes:
        options: the builder with its parameters.
        resources: the cluster, if a file describes it.
    """

    options: Auto
    resources: Any

    def starting_choices(self, choices: Choices) -> Choices:
        """Return the same choices with the strategy that planning starts from."""
        return choices._replace(strategy=Baseline())


class Baseline(Builder):
    """Sums everything uncompressed, as an optimizer without any choice does; planning starts from it."""

    name = "uniform"

    def build(self, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        return uniform_strategy(variables, resources.world_size, nodes=len(set(resources.ranks)))


def auto_request(choices: Choices) -> AutoRequest | None:
    """Return the request, if the user chose ``strategy="auto"``; None if the choice is something else.

    Raises:
        ConfigError: it has a parameter that is none, or one of a wrong value.

    >>> auto_request(Choices(strategy="auto(replan=500)")).options.replan
    500
    >>> auto_request(Choices(strategy="parallax")) is None
    True
    """
    if not choices.asks_for_auto:
        return None
    strategy: Any = os.environ[STRATEGY] if choices.strategy is None else choices.strategy
    made: Any = make("builder", strategy)
    return AutoRequest(made, choices.resources)
