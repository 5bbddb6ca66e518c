"""Plans explained: which candidates there were, which one was taken and why, and what it does with each variable."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grace.core.quantities import align_columns, show_bytes, show_ms
from grace.errors import ConfigError
from grace.planner.error_budget import SLACK
from grace.planner.greedy import Candidate
from grace.planner.outer_plans import outer_remarks
from grace.planner.problem import Problem, short
from grace.planner.step_simulation import Prediction
from grace.planner.uniform_plans import DENSE
from grace.strategy.plan import VariablePlan

MARGIN = 0.03
"""The part of a step by which a plan must be faster than no compression."""
MOST_ROWS = 24
"""Kinds of variables that are told apart."""
PLAN_HEADINGS = ("", "plan", "expected", "measured", "sent", "error", "memory")
"""Headings of candidates; a star stands before the one that is taken."""
HEADINGS = ("variables", "", "elements", "method", "sync", "error", "why")
"""Headings of the cells of rows."""


@dataclass(frozen=True)
class Row:
    """Variables that are alike, and are treated alike.

    Attributes:
        variables: their name, with * for numbers that differ.
        count, elements: their number, and that of their elements.
        method: compressor and memory.
        sync: the synchronization.
        share: the largest part of its bound that the error of one of them takes.
        why: the reason, in words.
    """

    variables: str
    count: int
    elements: int
    method: str
    sync: str
    share: float
    why: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, under :data:`HEADINGS`."""
        count, elements, share = f"x{self.count}", f"{self.elements:,}", f"{self.share:.2g}"
        return (self.variables, count, elements, self.method, self.sync, share, self.why)


@dataclass(frozen=True)
class Plan:
    """Choice between candidates, and its reasons. It prints as a table.

    Attributes:
        candidates: the best by prediction first.
        number: the index of the one that is taken.
        quality, reference: the class of methods, and the method whose error bounds those of matrices.
        rows: the variables.
        remarks: methods that nobody measured, ranks that compute longer than others, and an outer plan that would be
            much faster.
    """

    candidates: tuple[Candidate, ...]
    number: int
    quality: str
    reference: str
    rows: tuple[Row, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate:
        """The candidate that is taken; plain all-reduce where compression does not pay."""
        return self.candidates[self.number]

    @property
    def plain(self) -> Candidate:
        """No compression, by all-reduce."""
        return next(one for one in self.candidates if one.baseline)

    @property
    def compresses(self) -> bool:
        """True if it is anything else than that."""
        return self.chosen is not self.plain

    @property
    def why(self) -> str:
        """One sentence."""
        one, plain = self.chosen, self.plain
        how, mine, other = _seconds(one, plain)
        if not self.compresses:
            sure = " by more than turns differ" if how == "measured" else ""
            return f"do not compress: nothing is {100 * MARGIN:g} % faster than {show_ms(other)}{sure}"
        lost = "it loses nothing" if not one.share else f"its errors take at most {one.share:.2g} of a variable's bound"
        return f"{one.name}: {show_ms(mine)} {how} against {show_ms(other)} uncompressed, {other / mine:.1f}x; {lost}"

    def __str__(self) -> str:
        found = [self.why, *self.remarks, "", *align_columns([PLAN_HEADINGS, *map(self._cells, self.candidates)])]
        if self.rows:
            found += ["", *align_columns([HEADINGS, *(row.cells for row in self.rows)])]
        return "\n".join([*found, "", self.legend])

    @property
    def legend(self) -> str:
        """The meaning of the errors."""
        bound = f"largest part of a variable's bound (matrices: the error of {self.reference})"
        return f"error: {bound}; quality: {self.quality}"

    def _cells(self, one: Candidate) -> tuple[str, ...]:
        """Return a candidate as text, under :data:`PLAN_HEADINGS`."""
        step, sent, memory = one.prediction.step, one.prediction.sent, one.prediction.memory
        times = show_ms(step), "" if one.measured is None else show_ms(one.measured)
        taken = "*" if one is self.chosen else ""
        return (taken, one.name, *times, show_bytes(sent, 3), f"{one.share:.2g}", show_bytes(memory, 3))

    def to_dict(self) -> dict[str, object]:
        """Return all of it, but for the predictions' events, as JSON holds it; :meth:`from_dict` is the way back."""
        candidates = []
        for one in self.candidates:
            prediction = {key: value for key, value in vars(one.prediction).items() if key != "events"}
            strategy, methods = one.strategy.to_dict(), list(one.methods)
            candidates.append({**vars(one), "strategy": strategy, "prediction": prediction, "methods": methods})
        return {
            **vars(self),
            "candidates": candidates,
            "rows": [asdict(row) for row in self.rows],
            "remarks": list(self.remarks),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Plan":
        """Return a plan from its document. Raise ConfigError if something is missing, or is no such thing."""
        try:
            candidates = tuple(map(_candidate_of, document["candidates"]))
            candidates[document["number"]]  # raises if there is no such one
            rows, remarks = tuple(Row(**row) for row in document["rows"]), tuple(document["remarks"])
            return cls(**{**document, "candidates": candidates, "rows": rows, "remarks": remarks})
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ConfigError(f"no document of a plan: {error}; make the plan again") from error


def _candidate_of(document: Mapping[str, Any]) -> Candidate:
    from grace.strategy import schema  # it needs pydantic, which builders do not

    prediction, strategy = Prediction(**document["prediction"]), schema.parse(document["strategy"])
    methods = tuple(document["methods"])
    return Candidate(**{**document, "methods": methods, "prediction": prediction, "strategy": strategy})


def plan_of(
    problem: Problem, candidates: Sequence[Candidate], chosen: str | None = None, remarks: Sequence[str] = ()
) -> Plan:
    """Return the plan: which candidate to take, and why.

    That which trials have chosen is taken; without trials the one with the shortest predicted step, if it is shorter
    than plain all-reduce's by :data:`MARGIN`; else plain all-reduce, as a strategy like any other, so that "do not
    compress" runs, is saved and is measured as all are.

    Args:
        candidates: what :func:`~grace.planner.greedy.find_candidates` found, with ``measured`` where it is known.
        chosen: the name of the candidate that trials have chosen; None without trials.
    """
    plain = next(one for one in candidates if one.baseline)
    taken = min(candidates, key=lambda one: one.prediction.step)
    if taken.prediction.step >= plain.prediction.step * (1 - MARGIN):
        taken = plain
    if chosen is not None:
        taken = next((one for one in candidates if one.name == chosen), plain)
    said = (*remarks, *outer_remarks(problem, taken.prediction))
    rows, number = tuple(_rows(problem, taken)), candidates.index(taken)
    return Plan(tuple(candidates), number, problem.quality, problem.errors.reference, rows, remarks=said)


def _seconds(one: Candidate, plain: Candidate) -> tuple[str, float, float]:
    """Return the seconds of both, measured if both were."""
    if one.measured is None or plain.measured is None:
        return "expected", one.prediction.step, plain.prediction.step
    return "measured", one.measured, plain.measured


def _rows(problem: Problem, one: Candidate) -> Iterator[Row]:
    """Yield variables that are alike and are treated alike, those with most elements first."""
    kinds: dict[tuple[str, str, str], list[VariablePlan]] = {}
    for plan in one.strategy.plans:
        part = plan.parts[0]  # the planner cuts no variable
        method = short(str(part.compressor))  # its own plans have specs as text
        if part.memory not in (None, "none"):
            method = f"{method}, {part.memory}"
        kinds.setdefault((re.sub(r"\d+", "*", plan.variable.name), method, part.sync.type), []).append(plan)
    ordered = sorted(kinds.items(), key=lambda kind: -sum(plan.variable.numel for plan in kind[1]))
    named = [
        (plans[0].variable.name if len(plans) == 1 else name, method, sync, plans)
        for (name, method, sync), plans in ordered[:MOST_ROWS]
    ]
    if others := ordered[MOST_ROWS:]:
        methods, syncs = (" / ".join(sorted({kind[i] for kind, _ in others})) for i in (1, 2))
        named.append(("others", methods, syncs, [plan for _, plans in others for plan in plans]))
    for name, method, sync, plans in named:
        share, elements = max(largest_share(problem, plan) for plan in plans), sum(p.variable.numel for p in plans)
        yield Row(name, len(plans), elements, method, sync, share, _why(problem, one, plans))


def largest_share(problem: Problem, plan: VariablePlan) -> float:
    """Return the largest part of its bound that the error of a variable takes; votes have no error that is known."""
    share = problem.errors.share
    return max(share(str(p.compressor), p.sync.type, str(p.memory or "none"), plan.variable) for p in plan.parts)


def _saved(problem: Problem, one: Candidate, plans: Sequence[VariablePlan]) -> float:
    """Return the seconds by which the step would be longer with variables of one group, or one root, uncompressed."""
    dense = {}
    for plan in plans:
        if plan.parts[0].compressor == "none":
            continue
        sync = plan.parts[0].sync
        if sync.type != "reduce_broadcast":
            sync = replace(sync, type="allreduce")
        part = replace(DENSE, sync=sync, priority=plan.parts[0].priority)
        dense[plan.variable.name] = replace(plan, parts=(part,))
    changed = tuple(dense.get(plan.variable.name, plan) for plan in one.strategy.plans)
    return problem.predict(replace(one.strategy, plans=changed)).step - one.prediction.step


def _why(problem: Problem, one: Candidate, plans: Sequence[VariablePlan]) -> str:
    """Return why variables are treated so: what compressing them saves, or why they are not compressed."""
    if any(plan.parts[0].compressor != "none" for plan in plans):
        saved = _saved(problem, one, plans)
        return f"saves {show_ms(saved)}" if saved > 5e-7 else "saves nothing alone"  # show_ms would print 0
    largest = max(plans, key=lambda plan: plan.variable.numel).variable
    lossy = [method for method in problem.candidates() if method.compressor != "none"]
    serving = [method for method in lossy if method.serves(largest, problem.errors.tables)]
    if not serving:
        return "no method makes them smaller" if lossy else ""
    least = min(problem.share(method, largest) for method in serving)
    return "every method loses too much" if least > SLACK else "compressing them gains nothing"
