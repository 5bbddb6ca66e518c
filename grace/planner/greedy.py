"""The choice of a method for each variable: greedy from the best uniform plans.

    1. every method for all variables that it shrinks within their bounds, in an optimizer's own buckets: uniform plans
    2. from the best of them, and from no compression: sets of variables (a bucket, variables that are alike, a large
       variable) are given the method that shortens the predicted step most, one set after the other, until none helps;
       each method that a plan has counts as a hundredth of its step
    3. what is compressed and gains nothing goes back to no compression, since it loses something

How much is tried depends on the problem and on no clock, so that the same problem gives the same plans.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from grace.errors import ConfigError
from grace.planner.error_budget import SLACK
from grace.planner.exchange_costs import costs_of_shards
from grace.planner.problem import Problem, short
from grace.planner.step_simulation import BucketCosts, Prediction, simulate_step
from grace.planner.uniform_plans import assigned_strategy, shards_of, uniform_strategy
from grace.session.sharding import Chooser
from grace.strategy.plan import Strategy

STARTS = 2
"""Uniform plans that are refined, no compression besides."""
SETS, LARGE = 16, 32
"""Buckets, and sets of variables that are alike, that are moved; and variables that are moved alone, largest first."""
EVALUATIONS = 80
"""Predictions for each start."""
GAIN = 0.01
"""The part of the step that a method more must save: it makes buckets more, and predictions are no better."""
ALIKE = 0.01
"""Plans that give most elements the same method, and whose steps differ by less, are one candidate: few are tried."""
Choice = tuple[int, ...]
"""The number of each variable's method."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be tried and taken.

    Attributes:
        name: its methods in a few words; no two candidates have the same.
        strategy, prediction: what it does, and its step.
        share: the largest part of its bound that a variable's error takes.
        measured: seconds of a step; None as long as nobody measured it.
        baseline: True of no compression, summed in an optimizer's own buckets.
        methods: the specs of its methods, most elements first.
    """

    name: str
    strategy: Strategy
    prediction: Prediction
    share: float = 0.0
    measured: float | None = None
    baseline: bool = False
    methods: tuple[str, ...] = ()


def find_candidates(problem: Problem) -> list[Candidate]:
    """Return plans, best first (:meth:`Greedy.score`): greedy ones, uniform ones within the bounds, and no compression.
    Raise ConfigError if ``methods`` names something unknown or excluded, or nobody knows what no compression takes."""
    return Greedy(problem).run()


class Greedy:
    """One problem's choices."""

    def __init__(self, problem: Problem):
        self.problem, self.methods, self.variables = problem, problem.candidates(), list(problem.variables)
        self.plain: Choice = (0,) * len(self.variables)
        choose = Chooser()
        choose.dense = self.methods[0].communicator  # type: ignore[assignment]
        self.shares = [[problem.share(method, variable) for variable in self.variables] for method in self.methods]
        """The part of its bound that each method loses of each variable; infinite where it may not be chosen."""
        self.shards = []
        """How each variable travels by each method."""
        for method, shares in zip(self.methods, self.shares, strict=True):
            wanted = [(method if share <= SLACK else self.methods[0]).communicator for share in shares]
            self.shards.append(shards_of(self.variables, wanted, choose))
        self.position = {variable.name: v for v, variable in enumerate(self.variables)}
        self.known: dict[Hashable, BucketCosts] = {}
        """Costs of each bucket, computed once, however many choices have it."""
        self.scores: dict[Choice, tuple[float, float, float]] = {}

    def run(self) -> list[Candidate]:
        """Return the candidates; see :func:`find_candidates`."""
        self.costs_of(self.plain)  # raises where nobody knows what it takes
        uniform = list(dict.fromkeys(self.uniform(number) for number in range(len(self.methods))))
        starts = sorted((choice for choice in uniform if choice != self.plain), key=self.score)[:STARTS]
        refined = [self.refined(start) for start in (*starts, self.plain)]
        found = sorted(dict.fromkeys([*refined, *uniform, self.plain]), key=self.score)
        return list(self._candidates([choice for choice in found if math.isfinite(self.score(choice)[0])]))

    def uniform(self, number: int) -> Choice:
        """Return the choice of one method for every variable that it may serve."""
        return self._moved(self.plain, range(len(self.variables)), number)

    def refined(self, choice: Choice) -> Choice:
        """Return a choice that is at least as good, after moves of sets of variables."""
        best, until, better = self.score(choice), len(self.scores) + EVALUATIONS, math.isfinite(self.score(choice)[0])
        while better and len(self.scores) < until:
            better = False
            for unit in self.units(choice):
                for number in range(len(self.methods)):
                    other = self._moved(choice, unit, number)
                    if len(self.scores) < until and self.score(other) < best:
                        choice, best, better = other, self.score(other), True
        return choice

    def units(self, choice: Choice) -> list[tuple[int, ...]]:
        """Return the sets of variables that move together: buckets, those that are alike, and the largest alone."""
        alike: dict[str, list[int]] = {}
        for v, variable in enumerate(self.variables):
            alike.setdefault(re.sub(r"\d+", "*", variable.name), []).append(v)  # the layers of a stack
        buckets = [tuple(self.position[name] for name in one.names) for one in self.costs_of(choice)]
        sets = sorted(map(tuple, alike.values()), key=lambda unit: -sum(self.variables[v].numel for v in unit))
        largest = sorted(self.position.values(), key=lambda v: -self.variables[v].numel)[:LARGE]
        return list(dict.fromkeys([*buckets[:SETS], *sets[:SETS], *((v,) for v in largest)]))

    def score(self, choice: Choice) -> tuple[float, float, float]:
        """Return the step, longer by :data:`GAIN` for each method, to the nanosecond; the errors; and seconds of
        computing and of the wire, hidden or not. All are infinite where the costs do not tell what a choice takes."""
        if choice not in self.scores:
            self.scores[choice] = self._score(choice)
        return self.scores[choice]

    def _score(self, choice: Choice) -> tuple[float, float, float]:
        try:
            buckets = self.costs_of(choice)
        except ConfigError:  # nobody measured it, or it cannot carry rows so
            return math.inf, math.inf, math.inf
        step = simulate_step(self.problem.timeline, buckets).step * (1 + GAIN * len(set(choice)))
        lost = sum(self.shares[number][v] for v, number in enumerate(choice))
        busy = sum(w.start + w.finish + sum(t.seconds for t in w.transfers) for w in buckets)
        return round(step, 9), round(lost, 9), round(busy, 12)  # rounding errors of sums must not decide

    def costs_of(self, choice: Choice) -> list[BucketCosts]:
        """Return the costs of the buckets of a choice, in the order in which they start."""
        shards = [self.shards[number][v] for v, number in enumerate(choice)]
        return costs_of_shards(shards, self.problem.ranks, self.problem.costs, self.known)

    def _moved(self, choice: Choice, unit: Sequence[int], number: int) -> Choice:
        """Return the choice with another method for a set of variables, where it may be chosen."""
        changed = list(choice)
        for v in unit:
            if self.shares[number][v] <= SLACK:
                changed[v] = number  # others keep their method, so that a set may move in part
        return tuple(changed)

    def _candidates(self, found: Sequence[Choice]) -> Iterator[Candidate]:
        """Yield choices as candidates, without those that hardly differ from a better one. A number stands behind a
        name that a better one has, or no compression."""
        names, steps = Counter(["none"]), dict[tuple[str, ...], list[float]]()
        for choice in found:
            one = self._candidate(choice)
            step, alike = one.prediction.step, steps.setdefault(one.methods[:1], [])
            if one.baseline:
                yield one
            elif not any(step <= other * (1 + ALIKE) for other in alike):
                alike.append(step)
                names[one.name] += 1
                yield one if names[one.name] == 1 else replace(one, name=f"{one.name} ({names[one.name]})")

    def _candidate(self, choice: Choice) -> Candidate:
        problem, elements = self.problem, Counter[str]()
        for variable, number in zip(self.variables, choice, strict=True):
            elements[self.methods[number].compressor] += variable.numel
        methods = tuple(sorted(elements, key=elements.__getitem__, reverse=True))
        if choice == self.plain:  # the strategy that planning starts from, by which training goes on if none is faster
            strategy = uniform_strategy(self.variables, problem.ranks, nodes=problem.nodes)
        else:
            wanted = [self.methods[number].communicator for number in choice]
            made = {"name": "auto", "params": {}, "seed": problem.seed}
            strategy = assigned_strategy(self.variables, wanted, problem.ranks, problem.nodes, builder=made)
        share = max((self.shares[number][v] for v, number in enumerate(choice)), default=0.0)
        return Candidate(
            named(methods), strategy, problem.predict(strategy), share, None, choice == self.plain, methods
        )


def named(methods: Sequence[str]) -> str:
    """Return the name of a plan with these methods: short names, the first three.

    >>> named(["topk(ratio=0.05)", "none"]), named(["none"]), named(["cast"])
    ('topk(ratio=0.05), rest none', 'none', 'fp16')
    """
    names = [short(spec) for spec in methods]
    if len(names) > 3:
        return f"{', '.join(names[:3])}, and others"
    if len(names) > 1:
        return f"{', '.join(names[:-1])}, rest {names[-1]}"
    return names[0] if names else "none"
