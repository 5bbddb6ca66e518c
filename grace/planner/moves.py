"""Moves: what may be changed of a draft at a time."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from grace.planner.drafts import Choice, Draft, Scorer, Seat, changed
from grace.planner.problem import Problem
from grace.strategy.builder import bandwidths

MOST_UNITS = 48
"""Sets of variables that are moved together."""
SHARDS = (2, 4, 8)
"""Into how many parts a variable is cut."""
NEAR, LEAST_LOADED = 3, 4
"""Groups, and destinations, that are tried for each way."""
PAIRS = 28
"""Pairs of sets of variables that are tried in a round."""
Options = Callable[[Draft], Iterable[Draft]]
"""Drafts that one might become: the best of them is taken, if it is better."""


class Moves:
    """The moves of one search.

    Args:
        scorer: of its drafts.
        units: sets of variables, in the order in which gradients become ready.
        short: the numbers of the ways that are tried.
        draws: for what there is too much of.
    """

    def __init__(self, scorer: Scorer, units: Sequence[Sequence[int]], short: Sequence[int], draws: random.Random):
        self.scorer, self.units, self.short, self.draws = scorer, units, short, draws
        self.speed = bandwidths(scorer.problem.cluster) or [1.0] * scorer.world

    @property
    def rounds(self) -> list[Callable[[Draft], Iterator[Options]]]:
        """All moves, by kind: of one set of variables, of groups, of everything, of two sets."""
        return [self._by_unit, self._by_group, self._at_once, self._pairs]

    def _by_unit(self, draft: Draft) -> Iterator[Options]:
        for unit in self.units:
            yield lambda now, unit=unit: self._options(now, unit)  # type: ignore[misc]

    def _options(self, draft: Draft, unit: Sequence[int]) -> Iterator[Draft]:
        """Other ways, groups and destinations of a set of variables; other cuts of one."""
        for seat in self.seats(draft, unit):
            yield changed(draft, {v: Choice((self.scorer.own(v, seat),)) for v in unit})
        if len(unit) == 1:
            yield from self._cuts(draft, unit[0])

    def seats(self, draft: Draft, unit: Sequence[int]) -> list[Seat]:
        """Those that a set of variables could have instead."""
        used: dict[int, set[int]] = {}
        for choice in draft:
            for way, place in choice.seats:
                used.setdefault(way, set()).add(place)
        mine, found = draft[unit[0]].seats[0][1], list[Seat]()
        for way in self.short:
            if not any(self.scorer.serves(way)[v] for v in unit):
                continue
            if self.scorer.ways[way].reduced:
                places = self._destinations(draft)
            else:
                near = sorted(used.get(way, ()), key=lambda place: (abs(place - mine), place))[:NEAR]
                places = [*near, max(used.get(way, {-1})) + 1]
            found += [(way, place) for place in places]
        return found

    def _destinations(self, draft: Draft) -> list[int]:
        """Ranks that little goes through so far, for the links that they have."""
        loads = [0] * self.scorer.world
        for v, choice in enumerate(draft):
            for way, place in choice.seats:
                if self.scorer.ways[way].reduced:
                    loads[place] += self.scorer.variables[v].nbytes // len(choice.seats)
        return sorted(range(len(loads)), key=lambda rank: ((loads[rank] + 1) / self.speed[rank], rank))[:LEAST_LOADED]

    def _cuts(self, draft: Draft, v: int) -> Iterator[Draft]:
        variable, choice = self.scorer.variables[v], draft[v]
        way, place = choice.seats[0]
        if not variable.shape or self.scorer.ways[way].memory not in ("none", "residual", "efsignsgd"):
            return
        for count in SHARDS:
            if count > variable.shape[0] or variable.nbytes < count * 1024:
                continue
            if self.scorer.ways[way].reduced:
                places = list(itertools.islice(itertools.cycle(self._destinations(draft)), count))
            else:
                last = max((at for c in draft for w, at in c.seats if w == way), default=0)
                places = [place, *range(last + 1, last + count)]
            yield changed(draft, {v: self.scorer.cut(v, count, [(way, at) for at in places])})

    def _by_group(self, draft: Draft) -> Iterator[Options]:
        """Groups split where gradients become ready, or merged with the next one of their way."""
        for i in range(1, len(self.units)):
            yield lambda now, i=i: self._splits(now, i)  # type: ignore[misc]
        seats = sorted({seat for choice in draft for seat in choice.seats if not self.scorer.ways[seat[0]].reduced})
        for one, other in itertools.pairwise(seats):
            if one[0] == other[0]:
                yield lambda now, one=one, other=other: [_renamed(now, {other: one})]  # type: ignore[misc]

    def _splits(self, draft: Draft, i: int) -> Iterator[Draft]:
        later = {v for unit in self.units[i:] for v in unit}
        seats = {seat for v in self.units[i] for seat in draft[v].seats if not self.scorer.ways[seat[0]].reduced}
        for way, place in sorted(seats):
            new = max(at for choice in draft for w, at in choice.seats if w == way) + 1
            moved = {
                v: draft[v]._replace(
                    seats=tuple((way, new) if seat == (way, place) else seat for seat in draft[v].seats)
                )
                for v in later
                if (way, place) in draft[v].seats
            }
            yield changed(draft, moved)

    def _at_once(self, draft: Draft) -> Iterator[Options]:
        """All of a way another way; all by way of the nodes, or none."""
        yield lambda now: self._exchanged(now)
        yield lambda now: self._led(now)

    def _exchanged(self, draft: Draft) -> Iterator[Draft]:
        used = sorted({way for choice in draft for way, _ in choice.seats})
        for one in used:
            for other in self.short:
                if self.scorer.ways[one].reduced == self.scorer.ways[other].reduced and one != other:
                    yield replaced(self.scorer, draft, {one: other})

    def _led(self, draft: Draft) -> Iterator[Draft]:
        for wanted in (True, False):
            to = {}
            for i, way in enumerate(self.scorer.ways):
                sync = dataclasses.replace(way.sync, hierarchical=wanted)
                other = self.scorer.number.get(dataclasses.replace(way, sync=sync))
                if other is not None and other != i:
                    to[i] = other
            if to:
                yield replaced(self.scorer, draft, to)

    def _pairs(self, draft: Draft) -> Iterator[Options]:
        """Two sets of variables at once: one gets what the other has to give up of the budget."""
        pairs = list(itertools.combinations(range(len(self.units)), 2))
        if len(pairs) > PAIRS:
            pairs = self.draws.sample(pairs, PAIRS)
        for a, b in pairs:
            yield lambda now, a=a, b=b: self._both(now, self.units[a], self.units[b])  # type: ignore[misc]

    def _both(self, draft: Draft, one: Sequence[int], other: Sequence[int]) -> Iterator[Draft]:
        if len(one) == len(other):
            swapped = [*zip(one, other, strict=True), *zip(other, one, strict=True)]
            yield changed(draft, {v: Choice((self.scorer.own(v, draft[w].seats[0]),)) for v, w in swapped})
        few = 10 if len(self.units) <= 8 else 4
        first, second = (self._few(draft, unit, few) for unit in (one, other))
        for a, b in itertools.product(first, second):
            seats = {v: Choice((self.scorer.own(v, a),)) for v in one} | {
                v: Choice((self.scorer.own(v, b),)) for v in other
            }
            yield changed(draft, seats)

    def _few(self, draft: Draft, unit: Sequence[int], count: int) -> list[Seat]:
        seats = self.seats(draft, unit)
        return seats if len(seats) <= count else self.draws.sample(seats, count)


def units(problem: Problem, ready: Sequence[int], most: int = MOST_UNITS) -> list[tuple[int, ...]]:
    """Sets of variables that are refined together, in the order in which their gradients become ready: each alone in
    small models, else neighbours of one kind (sparse, vectors, others; type; device), to about equal elements.

    Args:
        problem: whose variables.
        ready: their numbers, in that order.
        most: sets, roughly.
    """
    if len(ready) <= most:
        return [(v,) for v in ready]
    variables = problem.variables
    share = 2 * sum(v.numel for v in variables) / most
    fewest = -(-2 * len(ready) // most)
    open_: dict[object, list[int]] = {}
    found: list[tuple[int, ...]] = []
    for v in ready:
        variable = variables[v]
        kind = (variable.sparse, len(variable.shape) > 1, variable.dtype, variable.device)
        members = open_.setdefault(kind, [])
        members.append(v)
        if sum(variables[m].numel for m in members) >= share or len(members) >= fewest:
            found.append(tuple(open_.pop(kind)))
    found += [tuple(members) for members in open_.values()]
    order = {v: i for i, v in enumerate(ready)}
    return sorted(found, key=lambda unit: order[unit[0]])


def replaced(scorer: Scorer, draft: Draft, to: dict[int, int]) -> Draft:
    """A draft with ways in the place of others, where they serve."""
    return tuple(
        choice._replace(
            seats=tuple(
                (to[way], at) if way in to and scorer.serves(to[way])[v] else (way, at) for way, at in choice.seats
            )
        )
        for v, choice in enumerate(draft)
    )


def _renamed(draft: Draft, to: dict[tuple[int, int], tuple[int, int]]) -> Draft:
    return tuple(choice._replace(seats=tuple(to.get(seat, seat) for seat in choice.seats)) for choice in draft)
