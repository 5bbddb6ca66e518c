"""Verdicts on plans, and tables of them: the order of predictions, and the regret of the plan that was chosen."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean, median
from typing import TypedDict

from rich.console import Console
from rich.table import Table

from grace.bench.common.results import Results, Row
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits
from grace.bench.report.scenarios import show_scenarios

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


def judge(plans: Sequence[PlanRow]) -> Row:
    """Return the verdict on the plans of a scenario, as values of its row.

    - ``right``, ``pairs``: numbers of pairs whose order was predicted, and of those that differ (:func:`order`).
    - ``chosen``, ``step_ms``: the name of the plan that ``auto`` has taken, and its measured step.
    - ``regret``: its step over that of the best plan within the bounds, minus 1 (:func:`to_fastest`).
    - ``to_plain``, ``to_single``: its step over that of plain sums, and of the best single method within the bounds.
    """
    plain = next(plan for plan in plans if plan["name"] == "none")
    chosen = next((plan for plan in plans if plan["chosen"]), plain)
    allowed = [plan for plan in plans if plan["allowed"] or plan is plain]
    single = [plan for plan in allowed if plan["single"] or plan is plain]
    right, pairs = order(plans)
    return {
        "right": right,
        "pairs": pairs,
        "chosen": chosen["name"],
        "step_ms": chosen["measured_ms"],
        "regret": max(0.0, to_fastest(chosen, allowed) - 1),
        "to_plain": to_fastest(chosen, [plain]),
        "to_single": to_fastest(chosen, single),
    }


def verdict(scenario: Row) -> str:
    """Return the verdict on a scenario, in two sentences."""
    return (
        "{right} of {pairs} pairs in the right order. After {settled} steps it took {chosen}: regret {regret:.1%}, "
        "{to_plain:.2f} of plain sums' step."
    ).format_map(scenario)


def show(console: Console, results: Results) -> None:
    """Show the plans of each scenario, then all scenarios, and their regret."""
    columns: Columns[Row] = {
        "order": lambda row: f"{row['right']}/{row['pairs']}",
        "regret": lambda row: f"{row['regret']:.1%}",
        "to\nplain": lambda row: f"{row['to_plain']:.2f}",
        "to\nsingle": lambda row: f"{row['to_single']:.2f}",
        "settled": lambda row: str(row["settled"]),
        "planned\nin": lambda row: f"{row['planning']:.2g} s",
    }
    show_scenarios(console, results, _plans_table, verdict, columns)
    regrets = [row["regret"] for row in results.rows]
    if len(regrets) > 1:
        console.print(f"\nRegret: median {median(regrets):.1%}, worst {max(regrets):.1%}.")


def _plans_table(scenario: Row) -> Table:
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
