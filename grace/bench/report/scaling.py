"""Steps predicted elsewhere: with other numbers of ranks, and over faster and slower links."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from grace.errors import ConfigError
from grace.planner.network import Links, links_of
from grace.planner.problem import Problem
from grace.planner.step import Prediction
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy.builder import OneNode
from grace.strategy.plan import Strategy

RANKS = tuple(2**i for i in range(1, 11))
"""2 to 1,024."""
RATES = tuple(10 ** (8 + i / 3) for i in range(10))
"""Bit/s: 100 Mbit/s to 100 Gbit/s."""
Line = list[tuple[float, Prediction]]
"""By ranks, or by bit/s."""


def over_ranks(
    problem: Problem,
    methods: Sequence[str],
    plans: Mapping[str, Strategy] | None = None,
    ranks: Sequence[int] = RANKS,
) -> dict[str, Line]:
    """Predict one method for all variables, and strategies as they are, for these numbers of ranks with equal links.
    Methods of unknown costs, and strategies of several nodes, are left out."""
    plans = {name: plan for name, plan in (plans or {}).items() if plan.nodes == 1}

    def predict(name: str, count: float) -> Prediction:
        n = int(count)
        there = dataclasses.replace(problem, cluster=OneNode(n))
        if name in plans:
            return there.predict(dataclasses.replace(plans[name], world_size=n))
        return there.predict(uniform_strategy(problem.variables, n, name))

    return _lines([*plans, *methods], ranks, predict)


def over_rates(
    problem: Problem,
    methods: Sequence[str],
    plans: Mapping[str, Strategy] | None = None,
    rates: Sequence[float] = RATES,
) -> dict[str, Line]:
    """Predict one method for all variables, and strategies, over links of these bandwidths (bit/s) with the same
    latency."""
    links, strategies = links_of(problem.costs.network), dict(plans or {})
    latency = links.latency if links else 0.0

    def predict(name: str, rate: float) -> Prediction:
        if name not in strategies:
            strategies[name] = uniform_strategy(problem.variables, problem.ranks, name, nodes=problem.nodes)
        costs = dataclasses.replace(problem.costs, network=Links(rate / 8, latency))
        return dataclasses.replace(problem, costs=costs).predict(strategies[name])

    return _lines([*strategies, *methods], rates, predict)


def _lines(
    names: Sequence[str], places: Sequence[float], predict: Callable[[str, float], Prediction]
) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for name in names:
        line: Line = []
        for place in places:
            try:
                line.append((place, predict(name, place)))
            except ConfigError:  # nobody measured what it takes so
                continue
        if line:
            lines[name] = line
    return lines
