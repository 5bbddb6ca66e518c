"""Plans explained: which candidates there were, which one was taken and why, and what it does with each variable."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.problem import Problem
from grace.planner.quality import SLACK, shrinks, times
from grace.planner.search import Candidate, short
from grace.planner.step import Prediction
from grace.strategy.plan import FIELDS, ShardPlan, Strategy, Sync, VariablePlan

MARGIN = 0.03
"""By how much a plan must be faster than plain all-reduce."""
LEAST_SAVED = 5e-7
"""Seconds that are told."""
MOST_ROWS = 24
"""Kinds of variables that are told apart."""


@dataclass(frozen=True)
class Row:
    """What a plan does with variables that are alike.

    Attributes:
        variables: their name, with * for numbers that differ.
        count, elements: how many they are, and have.
        method: compressor and memory.
        sync: the synchronization, and into how many parts each is cut.
        places: groups, or destinations.
        saved: seconds by which the step would be longer if they were not compressed.
        error: their part of the error of the plan, 0 to 1.
        why: what they are treated so for, in words.
    """

    variables: str
    count: int
    elements: int
    method: str
    sync: str
    places: str
    saved: float
    error: float
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """What was planned. It prints as a table.

    Attributes:
        candidates: what there was to choose from; the best by prediction first.
        number: which one is taken.
        quality, reference, budget: what could be lost: the class, and the error of the reference.
        rows: what it does with variables.
        margin: by which part of a step it had to be faster than no compression.
    """

    candidates: tuple[Candidate, ...]
    number: int
    quality: str
    reference: str
    budget: float
    rows: tuple[Row, ...] = ()
    margin: float = MARGIN

    @property
    def chosen(self) -> Candidate:
        """The candidate that is taken; plain all-reduce where compression does not pay."""
        return self.candidates[self.number]

    @property
    def plain(self) -> Candidate:
        """No compression, by all-reduce."""
        return _plain(self.candidates)

    @property
    def compresses(self) -> bool:
        """Whether it is anything else than that."""
        return self.chosen is not self.plain

    @property
    def why(self) -> str:
        """One sentence."""
        one, plain = self.chosen, self.plain
        how, mine, other = _seconds(one, plain)
        if one is plain:
            return f"do not compress: nothing is {100 * self.margin:g} % faster than {_ms(other)}"
        lost = (
            "it loses nothing" if not one.error else f"within the error budget ({self._share(one)} of {self.reference})"
        )
        return f"{one.name}: {_ms(mine)} {how} against {_ms(other)} uncompressed, {other / mine:.1f}x; {lost}"

    def __str__(self) -> str:
        head = ("", "plan", "expected", "measured", "sent", "error", "memory")
        lines = [
            (
                "*" if one is self.chosen else "",
                one.name,
                _ms(one.prediction.step),
                "" if one.measured is None else _ms(one.measured),
                _bytes(one.prediction.sent),
                self._share(one),
                _bytes(one.prediction.memory),
            )
            for one in self.candidates
        ]
        found = [self.why, "", *_table([head, *lines])]
        if self.rows:
            titles = ("variables", "", "elements", "method", "sync", "group, rank", "saves", "of the error")
            rows = [
                (
                    r.variables,
                    f"x{r.count}",
                    f"{r.elements:,}",
                    r.method,
                    r.sync,
                    r.places,
                    _ms(r.saved),
                    f"{r.error:.0%}",
                )
                for r in self.rows
            ]
            found += ["", *_table([titles, *rows])]
        return "\n".join([*found, "", f"error: of that of {self.reference}; quality: {self.quality}"])

    def _share(self, one: Candidate) -> str:
        """A candidate's error as part of the budget."""
        return "0" if not one.error else f"{one.error / self.budget:.2g}" if self.budget else "inf"

    def to_dict(self) -> dict[str, Any]:
        """All of it, but for the predictions' events, as what JSON holds; :meth:`from_dict` is the way back."""
        return {
            "candidates": [_candidate_document(one) for one in self.candidates],
            "number": self.number,
            "quality": self.quality,
            "reference": self.reference,
            "budget": self.budget,
            "margin": self.margin,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Plan":
        """A plan from its document.

        Raises:
            ConfigError: something is missing, or is no such thing.
        """
        try:
            candidates = tuple(_candidate_of(one) for one in document["candidates"])
            rows = tuple(Row(**row) for row in document["rows"])
            candidates[document["number"]]
            return cls(candidates, **{k: v for k, v in document.items() if k not in ("candidates", "rows")}, rows=rows)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ConfigError(f"no document of a plan: {error}; make the plan again") from error


def plan_of(problem: Problem, candidates: Sequence[Candidate], margin: float = MARGIN) -> Plan:
    """The plan: which candidate to take, and why.

    The fastest is taken, by measured seconds where it and plain all-reduce were measured, if it is faster than that by
    the margin; else plain all-reduce, as a strategy like any other, so that "do not compress" runs, is saved and is
    measured as all are. Once candidates were measured, call it again with them.

    Args:
        problem: what they were searched for.
        candidates: what :func:`~grace.planner.search.search` found, with ``measured`` filled in where it is known.
        margin: the part of a step that must be gained.
    """
    plain = _plain(candidates)
    known = [one for one in candidates if (one.measured is None) == (plain.measured is None)]
    best = min(known, key=lambda one: _seconds(one, plain)[1])
    _, mine, other = _seconds(best, plain)
    taken = best if mine < other * (1 - margin) else plain
    number = next(i for i, one in enumerate(candidates) if one is taken)
    rows = tuple(_rows(problem, taken))
    return Plan(tuple(candidates), number, problem.quality, problem.reference, problem.budget, rows, margin)


def _plain(candidates: Sequence[Candidate]) -> Candidate:
    return next(one for one in candidates if one.baseline and one.methods in (("none",), ()))


def _seconds(one: Candidate, plain: Candidate) -> tuple[str, float, float]:
    """Seconds of both, measured if both were."""
    if one.measured is None or plain.measured is None:
        return "expected", one.prediction.step, plain.prediction.step
    return "measured", one.measured, plain.measured


# -- variables -----------------------------------------------------------------------------------------


def _rows(problem: Problem, one: Candidate) -> Iterator[Row]:
    """Variables that are alike and are treated alike, those with most elements first."""
    kinds: dict[tuple[str, str, str], list[VariablePlan]] = {}
    for plan in one.strategy.plans:
        kinds.setdefault((re.sub(r"\d+", "*", plan.variable.name), _method(plan), _sync(plan)), []).append(plan)
    ordered = sorted(kinds.items(), key=lambda item: -_elements(item[1]))
    others = [plan for _, plans in ordered[MOST_ROWS:] for plan in plans]
    rows = [(name if len(plans) > 1 else plans[0].variable.name, plans) for (name, _, _), plans in ordered[:MOST_ROWS]]
    for name, plans in [*rows, *([("others", others)] if others else [])]:
        lost = sum(_error(problem, plan) for plan in plans)
        saved = _saved(problem, one, plans)
        yield Row(
            name,
            len(plans),
            _elements(plans),
            " / ".join(sorted({_method(plan) for plan in plans})),
            " / ".join(sorted({_sync(plan) for plan in plans})),
            _places(plans),
            saved,
            lost / one.error if one.error else 0.0,
            _why(problem, one, plans, saved),
        )


def _elements(plans: Sequence[VariablePlan]) -> int:
    return sum(plan.variable.numel for plan in plans)


def _method(plan: VariablePlan) -> str:
    return " / ".join(dict.fromkeys(", ".join([short(p.compressor), *_kept(p)]) for p in plan.parts))


def _kept(part: ShardPlan) -> list[str]:
    return [] if part.memory in (None, "none") else [part.memory]


def _sync(plan: VariablePlan) -> str:
    kinds = dict.fromkeys(p.sync.type + (", by nodes" if p.sync.hierarchical else "") for p in plan.parts)
    return " / ".join(kinds) + (f", {len(plan.parts)} parts" if plan.axis is not None else "")


def _places(plans: Sequence[VariablePlan]) -> str:
    """Groups or destinations, runs of them shortened."""
    syncs = [part.sync for plan in plans for part in plan.parts]
    found = sorted({s.destination if s.type == "reduce_broadcast" else s.group for s in syncs})
    runs: list[list[int]] = []
    for place in found:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(told if len(told) <= 4 else [*told[:3], "..."])


def lost(problem: Problem, strategy: Strategy) -> float:
    """Sum of ``|x - C(x)|^2`` over variables, of one that nobody searched for; votes lose nothing that is known."""
    return sum(_error(problem, plan) for plan in strategy.plans)


def _error(problem: Problem, plan: VariablePlan) -> float:
    total, shares = 0.0, plan.sizes or (1,)
    for part, share in zip(plan.parts, shares, strict=True):
        lost = problem.losses.of_method(part.compressor, plan.variable)
        total += lost * times(part.sync.type, part.memory or "none") * share / sum(shares)
    return total


def _saved(problem: Problem, one: Candidate, plans: Sequence[VariablePlan]) -> float:
    """Seconds that the step would take longer if these were exchanged as they are."""
    names = {plan.variable.name for plan in plans if any(part.compressor != "none" for part in plan.parts)}
    if not names:
        return 0.0
    changed = []
    for plan in one.strategy.plans:
        if plan.variable.name in names:
            parts = (_dense(part) for part in plan.parts)
            plan = dataclasses.replace(plan, parts=tuple(parts))
        changed.append(plan)
    return problem.predict(dataclasses.replace(one.strategy, plans=tuple(changed))).step - one.prediction.step


def _why(problem: Problem, one: Candidate, plans: Sequence[VariablePlan], saved: float) -> str:
    """What is gained by compressing them, or what the plan's first method would do to them."""
    if any(part.compressor != "none" for plan in plans for part in plan.parts):
        return f"saves {_ms(saved)}" if saved > LEAST_SAVED else "saves nothing alone"
    if not (method := next((spec for spec in one.methods if spec != "none"), None)):
        return ""
    model = next(p for plan in one.strategy.plans for p in plan.parts if p.compressor == method)
    names = {plan.variable.name for plan in plans if shrinks(make("compressor", method), plan.variable)}
    if not names:
        return f"{short(method)} makes them no smaller"
    changed = tuple(
        dataclasses.replace(plan, parts=(model,), axis=None, sizes=()) if plan.variable.name in names else plan
        for plan in one.strategy.plans
    )
    try:
        more = problem.predict(dataclasses.replace(one.strategy, plans=changed)).step - one.prediction.step
    except ConfigError:  # it cannot carry them
        return ""
    lost = sum(_error(problem, plan) for plan in changed)
    if more >= -LEAST_SAVED:
        return f"{short(method)} would {f'take {_ms(more)} more' if more > LEAST_SAVED else 'save nothing'}"
    beyond = ", beyond the error budget" if lost > problem.budget * SLACK else ""
    return f"{short(method)} would save {_ms(-more)}{beyond}"


def _dense(part: ShardPlan) -> ShardPlan:
    sync = part.sync if part.sync.type == "reduce_broadcast" else dataclasses.replace(part.sync, type="allreduce")
    return ShardPlan(sync, "none", "none", part.priority)


# -- documents -----------------------------------------------------------------------------------------


def _candidate_document(one: Candidate) -> dict[str, Any]:
    prediction = {key: value for key, value in dataclasses.asdict(one.prediction).items() if key != "events"}
    own = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    return {**own, "strategy": one.strategy.to_dict(), "prediction": prediction, "methods": list(one.methods)}


def _candidate_of(document: Mapping[str, Any]) -> Candidate:
    said = {**document, "methods": tuple(document["methods"]), "prediction": Prediction(**document["prediction"])}
    return Candidate(**{**said, "strategy": _strategy_of(document["strategy"])})


def _strategy_of(document: Mapping[str, Any]) -> Strategy:
    """A resolved strategy from its document, without what reads files."""
    plans = []
    for name, entry in document["variables"].items():
        variable = Variable(name, tuple(entry["shape"]), entry["dtype"], sparse=entry["sparse"])
        cut = entry.get("partition")
        parts = tuple(_part_of(part) for part in (entry["parts"] if cut else [entry]))
        plans.append(VariablePlan(variable, parts, *((cut["axis"], tuple(cut["sizes"])) if cut else ())))
    return Strategy(tuple(plans), **document["cluster"], builder=document["builder"] or {})


def _part_of(entry: Mapping[str, Any]) -> ShardPlan:
    said = dict(entry["sync"])
    kind = said.pop("type")
    group = {} if kind in FIELDS else {"group": said.pop("group")}
    sync = Sync.from_spec({"name": kind, **said}, **group)
    return ShardPlan(sync, entry["compressor"], entry["memory"], entry["priority"])


# -- text ----------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _ms(seconds: float) -> str:
    """Milliseconds, to three digits.

    >>> _ms(0.0121), _ms(1.5), _ms(0.0), _ms(-1e-17)
    ('12.1 ms', '1500 ms', '0 ms', '0 ms')
    """
    ms = seconds * 1e3
    if abs(ms) < 5e-4:
        return "0 ms"
    return f"{ms:.0f} ms" if abs(ms) >= 100 else f"{ms:.3g} ms"


def _bytes(nbytes: float) -> str:
    """Bytes in decimal units.

    >>> _bytes(1_234_000), _bytes(12)
    ('1.23 MB', '12 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"
