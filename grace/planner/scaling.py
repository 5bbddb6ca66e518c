"""Steps predicted elsewhere: with other numbers of ranks, and over faster and slower links."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from grace.errors import ConfigError
from grace.planner.network import Links, links_of
from grace.planner.problem import Problem
from grace.planner.step_simulation import Prediction
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy.builder import OneNode
from grace.strategy.plan import Strategy

RANKS = tuple(2**i for i in range(1, 11))
"""2 to 1,024."""
RATES = tuple(10 ** (8 + i / 3) for i in range(10))
"""Bit/s: 100 Mbit/s to 100 Gbit/s."""
Line = list[tuple[float, Prediction]]
"""Predictions by ranks, or by bit/s."""


def over_ranks(
    problem: Problem, methods: Sequence[str], plans: Mapping[str, Strategy], ranks: Sequence[int] = RANKS
) -> dict[str, Line]:
    """Predict one method for all variables, and strategies as they are, for these numbers of ranks with equal links.
    Methods of unknown costs, and strategies of several nodes, are left out."""
    places = {float(count): replace(problem, cluster=OneNode(count)) for count in ranks}
    return _lines(places, methods, {name: plan for name, plan in plans.items() if plan.nodes == 1})


def over_rates(problem: Problem, methods: Sequence[str], plans: Mapping[str, Strategy]) -> dict[str, Line]:
    """Predict one method for all variables, and strategies, over links of bandwidths (bit/s) with the same latency."""
    links = links_of(problem.costs.network)
    latency = links.latency if links else 0.0
    costs = {rate: replace(problem.costs, network=Links(rate / 8, latency)) for rate in RATES}
    return _lines({rate: replace(problem, costs=there) for rate, there in costs.items()}, methods, plans)


def _lines(places: Mapping[float, Problem], methods: Sequence[str], plans: Mapping[str, Strategy]) -> dict[str, Line]:
    lines = dict[str, Line]()
    for name in [*plans, *methods]:
        for place, there in places.items():
            try:
                if name in plans:
                    strategy = replace(plans[name], world_size=there.ranks)
                else:
                    strategy = uniform_strategy(there.variables, there.ranks, name, nodes=there.nodes)
                lines.setdefault(name, []).append((place, there.predict(strategy)))
            except ConfigError:  # nobody measured what it takes so
                continue
    return lines
