"""Whether the user asked for a strategy that chooses itself, and what it starts from."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from grace.core import specs
from grace.core.registry import make
from grace.core.variable import Variable
from grace.planner.builders.auto import Auto
from grace.planner.grouped import grouped
from grace.strategy.builder import Builder, Cluster
from grace.strategy.choices import STRATEGY, Choices
from grace.strategy.plan import Strategy


class Asked(NamedTuple):
    """What the user said.

    Attributes:
        options: the builder with its parameters.
        resources: the cluster, if a file describes it.
    """

    options: Auto
    resources: Any


class Baseline(Builder):
    """Everything summed uncompressed, as an optimizer without any choice does it: what planning starts from."""

    name = "uniform"

    def build(self, variables: Sequence[Variable], resources: Cluster) -> Strategy:
        return grouped(variables, resources.world_size, nodes=len(set(resources.ranks)))


def asked(choices: Choices) -> Asked | None:
    """What was asked for, if it was ``strategy="auto"``; None if it is something else.

    Raises:
        ConfigError: it has a parameter that is none, or one of a wrong value.

    >>> asked(Choices(strategy="auto(replan=500)")).options.replan
    500
    >>> asked(Choices(strategy="parallax")) is None
    True
    """
    strategy = choices.strategy
    if strategy is None:
        strategy = os.environ.get(STRATEGY)
    named = isinstance(strategy, dict) and strategy.get("name") == "auto"
    if isinstance(strategy, str) and strategy.partition("(")[0].strip() == "auto":
        named = specs.parse(strategy)[0] == "auto"
    made = make("builder", strategy) if named else strategy
    return Asked(made, choices.resources) if isinstance(made, Auto) else None


def started(choices: Choices) -> Choices:
    """The same choices with the strategy that planning starts from."""
    return choices._replace(strategy=Baseline())
