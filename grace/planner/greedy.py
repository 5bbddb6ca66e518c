"""The choice of a method for each variable: greedy from the best uniform plans.

    1. every method for all variables that it shrinks within their bounds, in an optimizer's own buckets: uniform plans
    2. from the best of them, and from no compression: sets of variables (a bucket, variables that are alike, a large
       variable) are given the method that shortens the predicted step most, one set after the other, until none helps;
       each method that a plan has counts as a hundredth of its step
    3. what is compressed and gains nothing goes back to no compression, since it loses something

How much is tried depends on the problem and on no clock, so that the same problem gives the same plans.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grace.errors import ConfigError
from grace.planner.error_budget import SLACK
from grace.planner.problem import ExchangeMethod, Problem, short
from grace.planner.step import Prediction, Work
from grace.planner.uniform import assigned_strategy, shards_of, uniform_strategy
from grace.session.sharding import Chooser
from grace.strategy.plan import Strategy, VariablePlan

STARTS = 2
"""Uniform plans that are refined, no compression besides."""
FEW, LARGE = 32, 16
"""Variables up to which each is a set of its own; of more, the largest ones are."""
EVALUATIONS = 80
"""Predictions for each start."""
GAIN = 0.01
"""The part of the step that a method more must save: it makes buckets more, and predictions are no better."""
ALIKE = 0.01
"""Plans with the same methods whose predicted steps differ by less are one candidate."""
Progress = Callable[[str, float], None]
Choice = tuple[int, ...]
"""The number of each variable's method."""
Names = dict[tuple[VariablePlan, ...], str]
"""Names of plans, by what they do with each variable."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be tried and taken.

    Attributes:
        name: its methods in a few words; no two candidates have the same.
        strategy: it.
        prediction: the predicted step.
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


def find_candidates(
    problem: Problem, progress: Progress = lambda what, done: None, names: Names | None = None
) -> list[Candidate]:
    """Return plans, best first (:meth:`Greedy.score`): greedy ones, uniform ones within the bounds, and no compression.

    Args:
        problem: what is planned.
        progress: told what is done, and how much of all of it (0 to 1).
        names: of plans that were found before, which keep them; those of new plans are added.

    Raises:
        ConfigError: ``methods`` names something unknown or excluded, or nobody knows what no compression takes.
    """
    return Greedy(problem, problem.candidates(), {} if names is None else names).run(progress)


class Greedy:
    """One problem's choices.

    Args:
        problem: what is planned.
        methods: what may be chosen, no compression first.
        names: of plans that were found before.
    """

    def __init__(self, problem: Problem, methods: Sequence[ExchangeMethod], names: Names):
        self.problem, self.methods, self.variables = problem, list(methods), list(problem.variables)
        self.names = names
        choose = Chooser()
        choose.dense = self.methods[0].communicator  # type: ignore[assignment]
        self.shares = [[problem.share(method, variable) for variable in self.variables] for method in self.methods]
        """The part of its bound that each method loses of each variable; infinite where it may not be chosen."""
        self.shards = [
            shards_of(
                self.variables,
                [(method if share <= SLACK else self.methods[0]).communicator for share in shares],
                choose,
            )
            for method, shares in zip(self.methods, self.shares, strict=True)
        ]
        """How each variable travels by each method."""
        self.position = {variable.name: v for v, variable in enumerate(self.variables)}
        self.groups: dict[tuple[int, ...], list[tuple[int, Work]]] = {}
        """What the buckets of variables that share a communicator do, by its id and theirs."""
        self.scores: dict[Choice, tuple[float, float, float]] = {}
        self.evaluations = 0

    def run(self, progress: Progress) -> list[Candidate]:
        """Return the candidates; see :func:`find_candidates`."""
        plain = (0,) * len(self.variables)
        self.score(plain)  # raises where nobody knows what it takes
        uniform = list(dict.fromkeys(self.uniform(number) for number in range(len(self.methods))))
        uniform = [choice for choice in uniform if self.known(choice)]
        starts = [*sorted((c for c in uniform if c != plain), key=self.score)[:STARTS], plain]
        refined = []
        for i, start in enumerate(starts):
            progress("greedy", i / len(starts))
            refined.append(self.refined(start))
        progress("done", 1.0)
        found = sorted(dict.fromkeys([*refined, *uniform, plain]), key=self.score)
        return self._candidates(found, plain)

    def uniform(self, number: int) -> Choice:
        """Return the choice of one method for every variable that it may serve."""
        return tuple(number if self.shares[number][v] <= SLACK else 0 for v in range(len(self.variables)))

    def refined(self, choice: Choice) -> Choice:
        """Return a choice that is at least as good, after moves of sets of variables."""
        best, until, better = self.score(choice), self.evaluations + EVALUATIONS, True
        while better and self.evaluations < until:
            better = False
            for unit in self.units(choice):
                for number in range(len(self.methods)):
                    other = self._moved(choice, unit, number)
                    if other == choice or self.evaluations >= until or not self.known(other):
                        continue
                    if self.score(other) < best:
                        choice, best, better = other, self.score(other), True
        return choice

    def units(self, choice: Choice) -> list[tuple[int, ...]]:
        """Return the sets of variables that are moved together: of a small model each variable, and the buckets of a
        choice; of a large one besides those that are alike, and the largest alone."""
        every = range(len(self.variables))
        found = [tuple(self.position[name] for name in work.names) for work in self.works(choice)]
        if len(self.variables) <= FEW:
            return list(dict.fromkeys([*found, *((v,) for v in every)]))
        alike: dict[str, list[int]] = {}
        for v in every:
            alike.setdefault(re.sub(r"\d+", "*", self.variables[v].name), []).append(v)
        largest = sorted(every, key=lambda v: -self.variables[v].numel)[:LARGE]
        sets = sorted(map(tuple, alike.values()), key=lambda unit: -sum(self.variables[v].numel for v in unit))
        return list(dict.fromkeys([*found[:LARGE], *sets[:LARGE], *((v,) for v in largest)]))

    def score(self, choice: Choice) -> tuple[float, float, float]:
        """Return the step, longer by :data:`GAIN` for each method, to the nanosecond; the errors; and seconds of
        computing and of the wire, hidden or not."""
        found = self.scores.get(choice)
        if found is None:
            self.evaluations += 1
            works = self.works(choice)
            prediction = self.problem.simulate(works)
            lost = sum(self.shares[number][v] for v, number in enumerate(choice))
            busy = sum(w.start + w.finish + sum(t.seconds for t in w.transfers) for w in works)
            step = prediction.step * (1 + GAIN * len(set(choice)))
            found = self.scores[choice] = round(step, 9), round(lost, 9), round(busy, 12)
        return found

    def works(self, choice: Choice) -> list[Work]:
        """Return what the buckets of a choice do, in the order in which they start; each set of variables that share a
        communicator is worked out once, however many choices have it."""
        members: dict[int, list[int]] = {}
        for v, number in enumerate(choice):
            members.setdefault(id(self.shards[number][v].communicator), []).append(v)
        found: list[tuple[int, Work]] = []
        for communicator, sharing in members.items():
            key = (communicator, *sharing)
            if key not in self.groups:
                works = self.problem.works_of([self.shards[choice[v]][v] for v in sharing])
                self.groups[key] = [(self.position[work.names[0]], work) for work in works]
            found += self.groups[key]
        return [work for _, work in sorted(found, key=lambda placed: -placed[0])]

    def known(self, choice: Choice) -> bool:
        """Return True if the costs tell what a choice takes."""
        try:
            self.score(choice)
        except ConfigError:  # nobody measured it, or it cannot carry rows so
            return False
        return True

    def _moved(self, choice: Choice, unit: Sequence[int], number: int) -> Choice:
        """Return the choice with another method for a set of variables, where it may be chosen."""
        changed = list(choice)
        for v in unit:
            if self.shares[number][v] <= SLACK:
                changed[v] = number
        return tuple(changed)

    def _candidates(self, found: Sequence[Choice], plain: Choice) -> list[Candidate]:
        """Return choices as candidates, without those that hardly differ from a better one."""
        baseline = self._candidate(plain, True)
        distinct_name(baseline, self.names)  # it gets its name first
        made: list[Candidate] = []
        for choice in found:
            one = baseline if choice == plain else self._candidate(choice, False)
            alike = [other for other in made if not other.baseline and set(other.methods) == set(one.methods)]
            step = one.prediction.step
            if one.baseline or not any(step <= other.prediction.step * (1 + ALIKE) for other in alike):
                made.append(one)
        return [replace(one, name=distinct_name(one, self.names)) for one in made]

    def _candidate(self, choice: Choice, baseline: bool) -> Candidate:
        problem, elements = self.problem, dict[str, int]()
        for variable, number in zip(self.variables, choice, strict=True):
            spec = self.methods[number].compressor
            elements[spec] = elements.get(spec, 0) + variable.numel
        methods = tuple(sorted(elements, key=elements.__getitem__, reverse=True))
        if baseline:  # the strategy that planning starts from, which training goes on by if nothing is faster
            strategy = uniform_strategy(self.variables, problem.ranks, nodes=problem.nodes)
        else:
            wanted = [self.methods[number].communicator for number in choice]
            made = {"name": "auto", "params": {}, "seed": problem.seed}
            strategy = assigned_strategy(self.variables, wanted, problem.ranks, problem.nodes, builder=made)
        share = max((self.shares[number][v] for v, number in enumerate(choice)), default=0.0)
        return Candidate(named(methods), strategy, problem.predict(strategy), share, None, baseline, methods)


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


def distinct_name(one: Candidate, names: Names) -> str:
    """Return the name that a plan has in ``names``, or else add a new one. A number stands behind a name that another
    plan has.

    >>> from grace.core.variable import Variable
    >>> from grace.planner.uniform import DENSE
    >>> some = Candidate("fp16", Strategy((VariablePlan(Variable("w", (1,)), (DENSE,)),)), None)
    >>> none, names = replace(some, strategy=Strategy(())), {}
    >>> [distinct_name(one, names) for one in (some, none, some)]
    ['fp16', 'fp16 (2)', 'fp16']
    """
    plans, taken = one.strategy.plans, set(names.values())
    if plans not in names:
        numbered = (one.name if number == 1 else f"{one.name} ({number})" for number in range(1, len(taken) + 2))
        names[plans] = next(name for name in numbered if name not in taken)
    return names[plans]
