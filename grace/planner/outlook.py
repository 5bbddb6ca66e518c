"""What a step would take elsewhere: with other numbers of ranks, and over faster and slower links."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grace.communicators.choice import break_even
from grace.core.registry import legal_communicators, make
from grace.errors import ConfigError
from grace.planner.grouped import grouped
from grace.planner.network import Links, links_of
from grace.planner.problem import Problem
from grace.planner.step import Prediction
from grace.strategy.builder import OneNode
from grace.strategy.plan import Strategy

RANKS = tuple(2**i for i in range(1, 11))
"""2 to 1,024."""
RATES = tuple(10 ** (8 + i / 3) for i in range(10))
"""Bit/s: 100 Mbit/s to 100 Gbit/s."""
SHOWN = ("none", "fp16", "topk(ratio=0.01)", "qsgd", "efsignsgd", "powersgd(rank=4)")
"""Methods of figures."""
Line = list[tuple[float, Prediction]]
"""By ranks, or by bit/s."""


class Form(NamedTuple):
    """One method for all variables, in an optimizer's own buckets.

    Attributes:
        name: what it is called.
        method: the compressor's spec.
        communicator: its spec; None for the method's default for the number of ranks.
    """

    name: str
    method: str
    communicator: str | None = None

    def strategy(self, problem: Problem, ranks: int | None = None) -> Strategy:
        """It, for the problem's variables.

        Args:
            problem: whose variables.
            ranks: another number than the problem's, all on one node.
        """
        cluster = problem.cluster if ranks is None else OneNode(ranks)
        nodes = len(set(cluster.ranks))
        return grouped(problem.variables, cluster.world_size, self.method, None, self.communicator, nodes)


def forms(methods: Sequence[str] = SHOWN) -> list[Form]:
    """Methods with their default communicators; and by all-gather, those that change to scatter_reduce; and by
    scatter_merge, those that can.

    >>> [form.name for form in forms(["fp16", "qsgd", "topk"])]
    ['fp16', 'qsgd', 'qsgd, allgather', 'topk', 'topk, scatter_merge']
    """
    found = []
    for method in methods:
        made = make("compressor", method)
        found.append(Form(method, method))
        if break_even(made) is not None:
            found.append(Form(f"{method}, allgather", method, "allgather"))
        if "scatter_merge" in legal_communicators(made):
            found.append(Form(f"{method}, scatter_merge", method, "scatter_merge"))
    return found


def over_ranks(
    problem: Problem,
    found: Sequence[Form],
    plans: Mapping[str, Strategy] | None = None,
    ranks: Sequence[int] = RANKS,
) -> dict[str, Line]:
    """What each form, and each of some strategies as it is, takes for these numbers of ranks, all with equal links.

    Args:
        problem: whose model, links and codecs count.
        found: forms; one without codecs is left out.
        plans: strategies by their names; left out where they need other ranks, or nodes.
        ranks: numbers of ranks.

    >>> from grace.core.variable import Variable
    >>> from grace.planner.builders.auto import Auto
    >>> problem = Auto(bandwidth="1gbit").problem([Variable("w", (1000, 1000))], OneNode(2))
    >>> lines = over_ranks(problem, forms(["qsgd"]), ranks=[2, 64])
    >>> [lines[name][1][1].step < 0.1 for name in ("qsgd", "qsgd, allgather")]
    [True, False]
    """
    costs = dataclasses.replace(problem.costs)  # which forgets buckets of other numbers of ranks in the end
    fixed = {
        name: strategy
        for name, strategy in (plans or {}).items()
        if not any(part.sync.hierarchical for plan in strategy.plans for part in plan.parts)
    }

    def predict(form: Form, place: float) -> Prediction:
        n = int(place)
        there = dataclasses.replace(problem, cluster=OneNode(n), costs=costs)
        if form.name in fixed:
            return there.predict(dataclasses.replace(fixed[form.name], world_size=n, nodes=1))
        return there.predict(form.strategy(problem, n))

    return _lines([*(Form(name, "none") for name in fixed), *found], ranks, predict)


def over_rates(
    problem: Problem,
    found: Sequence[Form],
    plans: Mapping[str, Strategy] | None = None,
    rates: Sequence[float] = RATES,
) -> dict[str, Line]:
    """What each form, and each of some strategies, takes over links of these bandwidths, with the latency that there
    is.

    Args:
        problem: whose model, ranks and codecs count.
        found: forms; one without codecs is left out.
        plans: strategies by their names.
        rates: bit/s.
    """
    latency, known, fixed = latency_of(problem), dict[str, Strategy](), plans or {}

    def predict(form: Form, rate: float) -> Prediction:
        if form.name not in known:
            known[form.name] = fixed.get(form.name) or form.strategy(problem)
        costs = dataclasses.replace(problem.costs, network=Links(rate / 8, latency), between=None)
        return dataclasses.replace(problem, costs=costs).predict(known[form.name])

    return _lines([*(Form(name, "none") for name in fixed), *found], rates, predict)


def latency_of(problem: Problem) -> float:
    """Seconds of a message over the problem's links: as given, or as fitted to what was measured."""
    links = links_of(problem.costs.network)
    return links.latency if links else 0.0


def _lines(
    found: Sequence[Form], places: Sequence[float], predict: Callable[[Form, float], Prediction]
) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for form in found:
        line: Line = []
        for place in places:
            try:
                line.append((place, predict(form, place)))
            except ConfigError:  # nobody measured what it takes so
                continue
        if line:
            lines[form.name] = line
    return lines
