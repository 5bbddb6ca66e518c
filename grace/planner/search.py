"""The search: builders' layouts with every method, refined variable by variable and by local moves.

    1. every layout of the built-in builders with every method is predicted, but for methods than which another takes
       less and loses less; where the budget is broken, variables stay uncompressed that cost most error for their size
       Of small models with few methods, all ways to give variables methods are predicted
    2. the best few are refined: in the order in which gradients become ready each variable gets the way that lowers
       the predicted step, within the budget; then local moves, until none helps: method, synchronization, destination,
       groups merged or split, parts, the hierarchy of nodes, and two variables at once
    3. the best is shaken and refined again, some times, with draws from the seed
    4. what is compressed and gains nothing goes back to no compression

Large models are refined by sets of neighbouring variables of one kind. How much is tried depends on the problem and
the seed, and on no clock, so that the same seed gives the same plans.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grace.core.registry import aliases, make
from grace.planner.candidates import DENSE, Layout, collective, layouts, ways
from grace.planner.drafts import Choice, Draft, Score, Scorer, changed
from grace.planner.moves import Moves, replaced, units
from grace.planner.problem import Problem
from grace.planner.step import Prediction
from grace.strategy.plan import Strategy

SECONDS = 8e-3
"""Of search for each variable, on the machine that predictions were timed on."""
LEAST, MOST = 0.3, 16.0
"""Bounds of these, for the whole model."""
MOST_DRAFTS = 1000
"""That are all tried, of small models with few methods."""
FEW_METHODS = 8
"""Up to which none is left out for being worse than another."""
STARTS = 3
"""Drafts that are refined."""
SHAKES = 6
"""Times that the best one is shaken."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Candidate:
    """A plan that may be measured and taken.

    Attributes:
        name: what it is, in a few words.
        strategy: it.
        prediction: what a step is expected to take.
        error: sum of ``|x - C(x)|^2``.
        measured: seconds of a step; None as long as nobody measured it.
        method: the specs of its methods, most elements first.
    """

    name: str
    strategy: Strategy
    prediction: Prediction
    error: float = 0.0
    measured: float | None = None
    baseline: bool = False
    methods: tuple[str, ...] = field(default=())


def search(problem: Problem, keep: int = 5, progress: Progress | None = None) -> list[Candidate]:
    """The best plans that are found, best first; among them always plain all-reduce, and fp16 where the quality has it.

    Args:
        problem: what is planned.
        keep: how many, the two not counted.
        progress: told what is being done, and how much of all of it is done (0 to 1).

    Raises:
        ConfigError: ``methods`` names something unknown or excluded, or the costs do not tell what plain all-reduce
            takes.
    """
    return _Search(problem, progress or (lambda what, done: None)).run(keep)


class _Search:
    """One search."""

    def __init__(self, problem: Problem, progress: Progress):
        self.problem, self.progress = problem, progress
        self.scorer = Scorer(problem, ways(problem))
        self.draws = random.Random(problem.seed)
        self.ready = sorted(
            range(len(problem.variables)), key=lambda v: (problem.timeline.ready[problem.variables[v].name], -v)
        )
        self.units = units(problem, self.ready)
        self.limit = 1e6 * min(MOST, max(LEAST, SECONDS * len(problem.variables)))
        self.known: dict[Draft, Score] = {}

    def run(self, keep: int) -> list[Candidate]:
        """All of it."""
        self.progress("builders", 0.0)
        found = layouts(self.problem)
        started = self._start(found)
        self._enumerate()
        self.scorer.spent = 0.0
        for i, draft in enumerate(started):
            self.progress("refine", 0.2 + 0.4 * i / max(1, len(started)))
            self._refine(draft, self.limit * 0.6 * (i + 1) / max(1, len(started)))
        for i in range(SHAKES):
            self.progress("restarts", 0.6 + 0.35 * i / SHAKES)
            if self.scorer.spent > self.limit:
                break
            self._refine(self._shaken(self._best()), self.limit * (0.6 + 0.4 * (i + 1) / SHAKES))
        self._relax(self._best())
        self.progress("done", 1.0)
        return self._candidates(keep)

    def _try(self, draft: Draft) -> Score | None:
        """Its score, if it is within the budget."""
        if draft in self.known:
            return self.known[draft]
        if not self.scorer.fits(self.scorer.error(draft)):
            return None
        score = self.known[draft] = self.scorer.score(draft)
        return score

    def _tried(self, draft: Draft) -> Score:
        """The score of one that is within the budget."""
        score = self._try(draft)
        assert score is not None
        return score

    def _best(self) -> Draft:
        return min(self.known, key=lambda draft: self.known[draft].rank)

    # -- 1: builders and methods -----------------------------------------------------------------------

    def _start(self, found: Sequence[Layout]) -> list[Draft]:
        """The best few drafts of builders; and the ways that are worth more trials."""
        scorer = self.scorer
        self.plain = tuple(Choice(((0, 0),)) for _ in self.problem.variables)
        self._try(self.plain)
        best: dict[tuple[str, str], tuple[Score, Draft]] = {}
        for method in self._worthwhile(found[0]):
            for layout in found:
                whole = scorer.drafted(layout, method)
                for draft in [] if whole is None else scorer.repaired(whole):
                    score = self._try(draft)
                    if score is not None and (method not in best or score.rank < best[method][0].rank):
                        best[method] = score, draft
        ranked = sorted(best, key=lambda method: best[method][0].rank)
        count = len(self.problem.variables)
        most = 40 if count <= 8 else 12 if count <= 40 else 8
        taken = [DENSE.method, *[method for method in ranked if method != DENSE.method][:most]]
        short = [i for i, way in enumerate(scorer.ways) if way.method in taken]
        self.moves = Moves(scorer, self.units, short, self.draws)
        return list(dict.fromkeys([best[method][1] for method in ranked[:STARTS]] + [self.plain]))

    def _worthwhile(self, layout: Layout) -> list[tuple[str, str]]:
        """The methods, but for those than which another takes less and loses less with the same layout, whichever
        collective carries them."""
        methods = list(dict.fromkeys(way.method for way in self.scorer.ways))
        if len(methods) <= FEW_METHODS:  # of single variables another may be the better one
            return methods
        facts = {method: self._facts(layout, method) for method in methods}
        known = [fact for found in facts.values() for fact in found]

        def beaten(mine: tuple[float, ...]) -> bool:
            return all(mine) and any(a != mine and all(x <= y for x, y in zip(a, mine, strict=True)) for a in known)

        return [method for method, found in facts.items() if not all(map(beaten, found))]

    def _facts(self, layout: Layout, method: tuple[str, str]) -> list[tuple[float, ...]]:
        """What a method takes and loses with each of its collectives; zeros if that is not known."""
        scorer, draft = self.scorer, self.scorer.drafted(layout, method)
        if draft is None:
            return [(0.0, 0.0, 0.0)]
        own = [i for i, way in enumerate(scorer.ways) if way.method == method and not way.reduced]
        own = [i for i in own if not scorer.ways[i].sync.hierarchical]
        drafts = dict.fromkeys([draft, *(replaced(scorer, draft, {one: i for one in own}) for i in own)])
        return [(score.step, score.busy, score.error) for score in map(scorer.score, drafts)]

    def _enumerate(self) -> None:
        """Of models so small, every draft with one group of each way; or of those ways that builders take."""
        scorer, world = self.scorer, self.problem.cluster.world_size
        collected = {
            method: DENSE.sync.from_spec(collective(method, world)) for method in {way.method for way in scorer.ways}
        }
        short = self.moves.short
        gathered = [i for i in short if not scorer.ways[i].reduced]
        usual = [i for i in short if scorer.ways[i].sync == collected[scorer.ways[i].method]]
        for some in (short, gathered, usual):
            fitting = [[way for way in some if scorer.serves(way)[v]] for v in range(len(scorer.variables))]
            if math.prod(map(len, fitting)) <= MOST_DRAFTS:
                for chosen in itertools.product(*fitting):
                    self._try(tuple(Choice(((way, 0),)) for way in chosen))
                break

    # -- 2: refinement ---------------------------------------------------------------------------------

    def _refine(self, draft: Draft, limit: float) -> Draft:
        """The draft after moves that make it better, until none does or the limit is reached."""
        score = self.known[draft]
        better = True
        while better and self.scorer.spent < limit:
            better = False
            for moves in self.moves.rounds:
                for options in moves(draft):
                    if self.scorer.spent > limit:
                        break
                    tried = [(other, self._try(other)) for other in options(draft)]
                    legal = [(one.rank, i) for i, (_, one) in enumerate(tried) if one is not None]
                    if legal and min(legal)[0] < score.rank:
                        draft, found = tried[min(legal)[1]]
                        assert found is not None
                        score, better = found, True
        return draft

    # -- 3 and 4 ---------------------------------------------------------------------------------------

    def _shaken(self, draft: Draft) -> Draft:
        """The draft with a third of the sets of variables, at least two, given anything that fits."""
        for unit in self.draws.sample(self.units, min(len(self.units), max(2, len(self.units) // 3))):
            seat = self.draws.choice(self.moves.seats(draft, unit))
            draft = changed(draft, {v: Choice((self.scorer.own(v, seat),)) for v in unit})
        return min(self.scorer.repaired(draft), key=lambda one: self._tried(one).rank)

    def _relax(self, draft: Draft) -> None:
        """Leave uncompressed what gains nothing by compression."""
        score = self.known[draft]
        order = sorted(self.units, key=lambda unit: -sum(self.scorer.error_of(v, draft[v]) for v in unit))
        for unit in order:
            if not any(self.scorer.error_of(v, draft[v]) for v in unit):
                break
            other = changed(draft, {v: self.scorer.dense(draft[v]) for v in unit})
            found = self._try(other)
            if found is not None and round(found.step, 9) <= round(score.step, 9):
                draft = other
        self.relaxed = draft

    # -- what comes out --------------------------------------------------------------------------------

    def _candidates(self, keep: int) -> list[Candidate]:
        """The best distinct ones: those whose methods, or steps, differ."""
        taken: dict[Draft, None] = {self.relaxed: None}
        seen = {self._likeness(self.relaxed)}
        for draft in sorted(self.known, key=lambda draft: self.known[draft].rank):
            if len(taken) >= keep:
                break
            if self._likeness(draft) not in seen and draft != self.plain:
                seen.add(self._likeness(draft))
                taken[draft] = None
        made = [self._candidate(draft) for draft in taken]
        for spec in ("none", "cast"):
            made += self._baseline(spec)
        unique = {one.strategy.id: one for one in made}
        return sorted(unique.values(), key=lambda one: (round(one.prediction.step, 9), one.error, not one.baseline))

    def _likeness(self, draft: Draft) -> tuple[object, ...]:
        """What two drafts must not share to be measured both: the ways of their elements, roughly."""
        share: dict[tuple[str, str], int] = {}
        for variable, choice in zip(self.scorer.variables, draft, strict=True):
            way = self.scorer.ways[choice.seats[0][0]]
            share[way.compressor, way.sync.type] = share.get((way.compressor, way.sync.type), 0) + variable.numel
        whole = sum(share.values()) or 1
        return tuple(sorted((key, round(4 * n / whole)) for key, n in share.items() if n > whole / 20))

    def _baseline(self, name: str) -> list[Candidate]:
        """Plain all-reduce, or the same of 16-bit floats, in buckets like those of a run without a strategy."""
        found = [i for i, way in enumerate(self.scorer.ways) if way.compressor == name and way.sync == DENSE.sync]
        drafts = [tuple(Choice((self.scorer.own(v, (way, group)),)) for v, group in self._buckets()) for way in found]
        return [self._candidate(draft, True) for draft in drafts if self._try(draft) is not None]

    def _buckets(self) -> list[tuple[int, int]]:
        """Variables, and the groups of 25 MB, in the order of gradients, in which they would travel."""
        place, held, first, found = 0, 0, True, []
        for v in reversed(range(len(self.scorer.variables))):
            nbytes = self.scorer.variables[v].nbytes
            if held and held + nbytes > (1 << 20 if first else 25 << 20):
                place, held, first = place + 1, 0, False
            held += nbytes
            found.append((v, place))
        return found[::-1]

    def _candidate(self, draft: Draft, baseline: bool = False) -> Candidate:
        strategy = self.scorer.strategy(draft, {"name": "auto", "params": {}, "seed": self.problem.seed})
        elements: dict[str, int] = {}
        for plan in strategy.plans:
            for part, variable in zip(plan.parts, plan.part_variables(), strict=True):
                elements[part.compressor] = elements.get(part.compressor, 0) + variable.numel
        methods = tuple(sorted(elements, key=lambda spec: -elements[spec]))
        error = self.scorer.error(draft)
        return Candidate(named(methods), strategy, self.problem.predict(strategy), error, None, baseline, methods)


def named(methods: Sequence[str]) -> str:
    """What a plan with these methods is called: short names, the first three.

    >>> named(["topk(ratio=0.05)", "none"]), named(["none"]), named(["cast"])
    ('topk(ratio=0.05), rest none', 'none', 'fp16')
    """
    names = [short(spec) for spec in methods]
    if len(names) > 3:
        return f"{', '.join(names[:3])}, and others"
    return ", rest ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0] if names else "none"


def short(spec: str) -> str:
    """A method's short name, if it has one.

    >>> short("cast(dtype='bf16')")
    'bf16'
    """
    return _short_names().get(spec, spec)


@functools.cache
def _short_names() -> dict[str, str]:
    return {make("compressor", name).spec: name for name in aliases("compressor")}
