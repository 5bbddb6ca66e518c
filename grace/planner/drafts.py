"""Drafts of plans, which a search changes piece by piece, and what they would take.

A draft has a choice for each variable: how it is cut, and for each part a seat: a way to be exchanged, and the group or
the destination. What a group takes is worked out once, however many drafts have it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grace.core.variable import equal_sizes
from grace.planner.candidates import DENSE, REDUCED, Layout, Way, collective
from grace.planner.problem import Problem
from grace.planner.quality import SLACK, times
from grace.planner.simulate import simulate
from grace.planner.step import Prediction, Work
from grace.planner.works import works_of
from grace.session.bucketing import Limits
from grace.session.sharding import Chooser, Shard
from grace.strategy.plan import Strategy, VariablePlan, communicator_of

Seat = tuple[int, int]
"""The number of a way, and the group or destination."""


class Choice(NamedTuple):
    """How one variable is exchanged: whole, or cut along an axis."""

    seats: tuple[Seat, ...]
    axis: int | None = None
    sizes: tuple[int, ...] = ()


Draft = tuple[Choice, ...]
Atom = tuple[int, int]
"""The numbers of a variable, and of a part of it."""
Placed = tuple[Atom, Work]
"""What a bucket does, and its first part in the order of declaration."""


@dataclass(frozen=True)
class Score:
    """What a draft would take.

    Attributes:
        step: seconds of a step.
        busy: seconds of computing and of the wire in it, hidden or not, by which drafts of equal steps are told apart.
        error: that it loses.
        prediction: all that was predicted.
    """

    step: float
    busy: float
    error: float
    prediction: Prediction

    @property
    def rank(self) -> tuple[float, float, float]:
        """By which the better of two is known: the step, to the nanosecond; then what is busy; then the error."""
        return round(self.step, 9), self.busy, self.error


class Scorer:
    """Predicts drafts.

    Args:
        problem: what they are for.
        found: the ways that their seats number; no compression by all-reduce first.
    """

    def __init__(self, problem: Problem, found: Sequence[Way]):
        self.problem, self.ways, self.variables = problem, list(found), list(problem.variables)
        self.number = {way: i for i, way in enumerate(self.ways)}
        self.world, self.nodes = problem.cluster.world_size, problem.cluster.ranks
        self.costs = dataclasses.replace(problem.costs)  # which knows no buckets yet
        self.spent = 0.0
        """Microseconds that its predictions are expected to have taken, the same on every machine."""
        self._index = {variable.name: i for i, variable in enumerate(self.variables)}
        self._carriers: dict[Any, Any] = {}
        self._choosers = {False: Chooser(), True: Chooser()}
        self._groups: dict[Any, list[Placed]] = {}
        self._scores: dict[Draft, Score] = {}
        self._serves: dict[int, list[bool]] = {}
        self._errors: dict[int, list[float]] = {}

    # -- what ways do to variables ---------------------------------------------------------------------

    def serves(self, way: int) -> list[bool]:
        """Which variables a way can carry, and shrinks."""
        if way not in self._serves:
            self._serves[way] = [self.ways[way].serves(variable) for variable in self.variables]
        return self._serves[way]

    def errors(self, way: int) -> list[float]:
        """What a way loses of each variable."""
        if way not in self._errors:
            chosen, losses = self.ways[way], self.problem.losses
            often = times(chosen.sync.type, chosen.memory)
            served = zip(self.serves(way), self.variables, strict=True)
            lossy = chosen.compressor != DENSE.compressor
            self._errors[way] = [
                often * losses.of_method(chosen.compressor, v) if lossy and fits else 0.0 for fits, v in served
            ]
        return self._errors[way]

    def error(self, draft: Draft) -> float:
        """What a draft loses; of a variable in parts each part's share by its length."""
        errors = {way: self.errors(way) for way in {seat[0] for choice in draft for seat in choice.seats}}
        return sum(
            errors[choice.seats[0][0]][v] if choice.axis is None else self.error_of(v, choice)
            for v, choice in enumerate(draft)
        )

    def fits(self, error: float) -> bool:
        """Whether an error is within the budget."""
        return error <= self.problem.budget * SLACK

    # -- predictions -----------------------------------------------------------------------------------

    def score(self, draft: Draft) -> Score:
        """What a step takes."""
        known = self._scores.get(draft)
        if known is not None:
            return known
        ordered = [work for _, work in sorted(self._works(draft), key=lambda one: (-one[0][0], -one[0][1]))]
        prediction = simulate(self.problem.timeline, ordered, self.costs.contention, self.costs.step)
        busy = sum(w.start + w.finish + w.before + w.after + sum(t.seconds for t in w.transfers) for w in ordered)
        found = Score(prediction.step, round(busy, 12), self.error(draft), prediction)
        self._scores[draft] = found
        self.spent += 60 + 2 * len(draft) + 15 * len(ordered)
        return found

    def _works(self, draft: Draft) -> Iterator[Placed]:
        groups: dict[Seat, list[Atom]] = {}
        for v, (seats, axis, _) in enumerate(draft):
            if axis is None:
                groups.setdefault(seats[0], []).append((v, 0))
            else:
                for part, seat in enumerate(seats):
                    groups.setdefault(seat, []).append((v, part))
        cuts = {v: choice[1:] for v, choice in enumerate(draft) if choice.axis is not None}
        for (way, place), atoms in groups.items():
            at = place if self.ways[way].reduced else 0
            key = way, at, tuple(atoms), tuple(cuts.get(v) for v, _ in atoms) if cuts else ()
            known = self._groups.get(key)
            if known is None:
                known = self._groups[key] = self._group(way, at, atoms, draft)
            yield from known

    def _group(self, way: int, place: int, atoms: Sequence[Atom], draft: Draft) -> list[Placed]:
        """What parts do that travel together, each with where its first one stands in the model."""
        self.spent += 40 + 20 * len(atoms)
        part = self.ways[way].part(place)
        if (way, place) not in self._carriers:
            self._carriers[way, place] = communicator_of(part)
        carrier, choose = self._carriers[way, place], self._choosers[part.sync.hierarchical]
        reduced, shards = self.ways[way].reduced, []
        for v, i in atoms:
            variable, (_, axis, sizes) = self.variables[v], draft[v]
            own = variable if axis is None else VariablePlan(variable, (), axis, sizes).part_variables()[i]
            limits = Limits() if reduced and not own.sparse else None
            chosen = choose(own, carrier)
            shards.append(Shard(own, variable, chosen, 0, limits, axis=axis, hierarchical=part.sync.hierarchical))
        found = works_of(shards, self.world, self.costs, self.nodes)
        if len(found) == 1:
            return [(atoms[0], found[0])]
        return [((self._index[work.names[0]], 0), work) for work in found]

    # -- from layouts, and to strategies ---------------------------------------------------------------

    def drafted(self, layout: Layout, method: tuple[str, str]) -> Draft | None:
        """A builder's layout with a method where the builder compresses, and nothing else; None where one of its ways
        is none that may be chosen."""
        quality = next((way.quality for way in self.ways if way.method == method), None)
        reduced = DENSE.sync.from_spec(REDUCED)
        dense = [self.number.get(way) for way in (DENSE, Way(sync=reduced))]
        summed = DENSE.sync.from_spec(collective(method, self.world))
        chosen = [self.number.get(Way(*method, sync, quality)) for sync in (summed, reduced)]
        choices = []
        for v, plan in enumerate(layout.plans):
            seats = []
            for part in plan.parts:
                through = part.sync.type == REDUCED
                number = (chosen if part.compressor != "none" else dense)[through]
                if number is not None and not self.serves(number)[v]:
                    number = dense[through]
                if number is None:
                    return None
                seats.append((number, part.sync.destination if through else part.sync.group))
            choices.append(Choice(tuple(seats), plan.axis, plan.sizes))
        return tuple(choices)

    def repaired(self, draft: Draft) -> list[Draft]:
        """The same within the budget, in two ways: the variables stay uncompressed whose compression costs most error
        for each element; or the smallest ones do."""
        if self.fits(self.error(draft)):
            return [draft]
        errors = [self.error_of(v, choice) for v, choice in enumerate(draft)]
        sizes = [max(1, variable.numel) for variable in self.variables]
        found = []
        for order in (
            sorted(range(len(draft)), key=lambda v: (errors[v] / sizes[v], v)),
            sorted(range(len(draft)), key=lambda v: (-sizes[v], v)),
        ):
            left, kept = self.problem.budget, list(draft)
            for v in order:
                if errors[v] and errors[v] > left:
                    kept[v] = self.dense(draft[v])
                else:
                    left -= errors[v]
            found.append(tuple(kept))
        return found

    def error_of(self, v: int, choice: Choice) -> float:
        """What a choice loses of its variable."""
        if choice.axis is None:
            return self.errors(choice.seats[0][0])[v]
        lost = (self.errors(way)[v] * size for (way, _), size in zip(choice.seats, choice.sizes, strict=True))
        return sum(lost) / sum(choice.sizes)

    def dense(self, choice: Choice) -> Choice:
        """The same seats, uncompressed."""
        seats = []
        for way, place in choice.seats:
            plain = Way(sync=self.ways[way].sync if self.ways[way].reduced else DENSE.sync)
            number = self.number.get(plain, 0)
            seats.append((number, place))
        return choice._replace(seats=tuple(seats))

    def own(self, v: int, seat: Seat) -> Seat:
        """The seat, if its way serves the variable; else that without compression."""
        return seat if self.serves(seat[0])[v] else self.dense(Choice((seat,))).seats[0]

    def cut(self, v: int, count: int, seats: Sequence[Seat]) -> Choice:
        """A variable cut along its first axis into so many parts, with these seats."""
        return Choice(tuple(seats), 0, equal_sizes(self.variables[v].shape[0], count))

    def strategy(self, draft: Draft, made: dict[str, Any]) -> Strategy:
        """The draft as a strategy; groups are numbered anew, so that none is of two ways.

        Args:
            draft: the draft.
            made: name, parameters and seed of what built it.
        """
        numbers: dict[Seat, int] = {}
        plans = []
        for variable, choice in zip(self.variables, draft, strict=True):
            parts = []
            for way, place in choice.seats:
                collected = not self.ways[way].reduced
                at = numbers.setdefault((way, place), len(numbers)) if collected else place
                parts.append(self.ways[way].part(at))
            plans.append(VariablePlan(variable, tuple(parts), choice.axis, choice.sizes))
        return Strategy(tuple(plans), self.world, len(set(self.nodes)), made)


def changed(draft: Draft, to: Mapping[int, Choice]) -> Draft:
    """The draft with other choices for some variables.

    >>> changed((Choice(((0, 0),)), Choice(((0, 0),))), {1: Choice(((1, 0),))})[1].seats
    ((1, 0),)
    """
    return tuple(to.get(v, choice) for v, choice in enumerate(draft)) if to else draft
