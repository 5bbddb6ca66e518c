"""Verdicts on plans, and tables of them: the order of predictions, and the regret of the plan that was chosen."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple, TypedDict

from rich.table import Table

from grace.bench.common.tables import Columns, table
from grace.bench.common.tables import markdown as markdown_table
from grace.bench.common.text import digits
from grace.bench.ranks.scenario import Scenario
from grace.bench.ranks.sweep import PLACE

APART = 0.10
"""Relative difference of two plans from which on their order counts."""


class PlanRow(TypedDict, total=False):
    """Row of a plan.

    Attributes:
        name: "none" for plain sums, the method, or "planned" and what the planner calls it.
        predicted_ms, measured_ms: the step as predicted, and the median of its turns.
        turns_ms: the median step of each turn.
        allowed: True if the plan is within ``auto``'s bounds.
        single: True if it has one method for all variables.
        chosen: True if ``auto`` has taken it.
    """

    name: str
    predicted_ms: float
    measured_ms: float
    turns_ms: list[float]
    allowed: bool
    single: bool
    chosen: bool


class Goal(NamedTuple):
    """Goal of a figure of :class:`PlanVerdict`: its words, and the least share of the order, or most of all else."""

    words: str
    limit: float


GOALS = {
    "order": Goal("pairs in the right order", 0.95),
    "regret": Goal("regret after trials, at most", 0.05),
    "to_plain": Goal("step to plain sums', at most", 1.03),
    "to_single": Goal("step to the best single method's, at most", 1.05),
    "settled": Goal("steps until it is settled, at most", 60),
    "uncompressed": Goal("steps of them before trials, at most", 15),
    "planning": Goal("seconds of planning, at most", 2.0),
}


@dataclass(frozen=True)
class PlanVerdict:
    """The verdict on a scenario, or on several: then the worst of each.

    Attributes:
        pairs, right: numbers of pairs of plans that differ, and of those whose order was predicted.
        chosen: the name of the plan that ``auto`` has taken.
        regret: its step over that of the best plan within the bounds, minus 1 (:func:`to_fastest`).
        to_plain: its step over that of plain sums.
        to_single: its step over that of the best single method within the bounds.
        settled, uncompressed: steps until the choice, and those of them before anything was tried.
        planning: seconds of planning, without measurements.
    """

    right: int
    pairs: int
    chosen: str
    regret: float
    to_plain: float
    to_single: float
    settled: int
    uncompressed: int
    planning: float

    @property
    def order(self) -> float:
        """Share of pairs in the right order."""
        return self.right / self.pairs if self.pairs else 1.0

    def holds(self, goal: str) -> bool:
        """Return True if a goal of :data:`GOALS` is reached."""
        found, limit = getattr(self, goal), GOALS[goal].limit
        return bool(found >= limit if goal == "order" else found <= limit)


def order(plans: Sequence[PlanRow]) -> tuple[int, int]:
    """Return how many pairs were predicted in the order in which they were measured, of those that differ by 10 %."""
    right = pairs = 0
    for one, other in combinations(plans, 2):
        faster, slower = sorted((one, other), key=lambda plan: plan["measured_ms"])
        if slower["measured_ms"] > (1 + APART) * faster["measured_ms"]:
            pairs += 1
            right += slower["predicted_ms"] > faster["predicted_ms"]
    return right, pairs


def to_fastest(mine: PlanRow, others: Sequence[PlanRow]) -> float:
    """Return a plan's step over that of the fastest of others.

    Every other round tells which one is the fastest, and the rest how much faster it is, and the other way round: of
    equal plans one is always fastest by chance, and that would be taken for regret. Turns of one round are compared
    with each other, so that what disturbs for a while disturbs both.

    >>> mine, other, noisy = ({"turns_ms": turns} for turns in ([4.0, 4.0], [2.0, 2.0], [1.0, 3.0]))
    >>> to_fastest(mine, [other]), round(to_fastest(mine, [mine, other, noisy]), 3)
    (2.0, 1.667)
    """
    found = []
    for half in (0, 1):
        fastest = min(others, key=lambda plan: median(plan["turns_ms"][half::2]))
        turns = zip(mine["turns_ms"][1 - half :: 2], fastest["turns_ms"][1 - half :: 2], strict=False)
        found.append(median(one / other for one, other in turns))
    return fmean(found)


def judge(scenario: Scenario) -> PlanVerdict:
    """Return the verdict on a scenario."""
    plans = scenario["plans"]
    plain = next(plan for plan in plans if plan["name"] == "none")
    chosen = next((plan for plan in plans if plan["chosen"]), plain)
    allowed = [plan for plan in plans if plan["allowed"] or plan is plain]
    return PlanVerdict(
        *order(plans),
        chosen["name"],
        max(0.0, to_fastest(chosen, allowed) - 1),
        to_fastest(chosen, [plain]),
        to_fastest(chosen, [plan for plan in allowed if plan["single"] or plan is plain]),
        scenario["settled"],
        scenario["uncompressed"],
        scenario["planning"],
    )


def totals(scenarios: Sequence[Scenario]) -> tuple[PlanVerdict, float]:
    """Return the worst of all scenarios, and the median regret."""
    found = [judge(scenario) for scenario in scenarios]
    worst = max(found, key=lambda verdict: verdict.regret)
    most = {key: max(getattr(one, key) for one in found) for key in GOALS if key != "order"}
    right, pairs = sum(one.right for one in found), sum(one.pairs for one in found)
    total = PlanVerdict(right, pairs, worst.chosen, **most)
    return total, median(one.regret for one in found)


def plans_table(scenario: Scenario) -> Table:
    """Return the table of a scenario's plans, with predicted and measured steps; the chosen one is bold."""
    columns: Columns[PlanRow] = {
        "plan": lambda plan: plan["name"],
        "predicted\nms": lambda plan: digits(plan["predicted_ms"]),
        "measured\nms": lambda plan: digits(plan["measured_ms"]),
        "within\nbounds": lambda plan: "yes" if plan["allowed"] else "no",
    }

    def style(plan: PlanRow) -> str:
        return "bold" if plan["chosen"] else "" if plan["allowed"] else "dim"

    return table(scenario["plans"], columns, style=style)


def verdict_words(scenario: Scenario) -> str:
    """Return the verdict on a scenario, in two sentences."""
    verdict = judge(scenario)
    return (
        f"{verdict.right} of {verdict.pairs} pairs in the right order. After {verdict.settled} steps it took "
        f"{verdict.chosen}: regret {verdict.regret:.1%}, {verdict.to_plain:.2f} of plain sums' step."
    )


def markdown(scenarios: Sequence[Scenario]) -> str:
    """Return the table of all scenarios in Markdown, and the worst of each figure beside its goal."""
    found = [{**scenario, "verdict": judge(scenario)} for scenario in scenarios]
    columns: Columns[Scenario] = {
        **PLACE,
        "plans": lambda row: str(len(row["plans"])),
        "order": lambda row: f"{row['verdict'].right}/{row['verdict'].pairs}",
        "regret": lambda row: f"{row['verdict'].regret:.1%}",
        "to plain": lambda row: f"{row['verdict'].to_plain:.2f}",
        "to single": lambda row: f"{row['verdict'].to_single:.2f}",
        "settled": lambda row: str(row["settled"]),
        "planned in": lambda row: f"{row['planning']:.2g} s",
        "taken": lambda row: row["verdict"].chosen,
    }
    worst, usual = totals(scenarios)

    def reached(goal: str) -> str:
        return f"{getattr(worst, goal):.4g}" + ("" if worst.holds(goal) else " (missed)")

    goals: Columns[str] = {
        "of all scenarios": lambda goal: GOALS[goal].words,
        "found": reached,
        "goal": lambda goal: f"{'>=' if goal == 'order' else '<='} {GOALS[goal].limit:.4g}",
    }
    median_line = f"| regret after trials, median | {usual:.4g} | |"
    return f"{markdown_table(found, columns)}\n\n{markdown_table(GOALS, goals)}\n{median_line}"
