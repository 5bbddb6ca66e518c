"""Predicted and measured steps as tables: for a terminal, and in Markdown."""

from collections.abc import Sequence

from rich.table import Table

from grace.bench.common.kept import Scenario
from grace.bench.common.tables import figures_table
from grace.bench.common.tables import markdown as table_of
from grace.bench.common.text import of_rate
from grace.bench.plan.verdicts import GOALS, Verdict, judged, totals

WORDS = {
    "order": "pairs in the right order",
    "regret": "regret after trials, at most",
    "to_plain": "step to plain sums', at most",
    "to_single": "step to the best single method's, at most",
    "settled": "steps until it is settled, at most",
    "uncompressed": "steps of them before trials, at most",
}


def plans_table(scenario: Scenario) -> Table:
    """Return the plans of a scenario, and what was expected of each; times in milliseconds."""
    table = figures_table("plan", ("predicted\nms", "measured\nms", "within\nbounds"))
    for plan in scenario["plans"]:
        times = [f"{plan[key]:.4g}" for key in ("predicted_ms", "measured_ms")]
        style = "bold" if plan["chosen"] else "" if plan["allowed"] else "dim"
        table.add_row(plan["name"], *times, "yes" if plan["allowed"] else "no", style=style)
    return table


def verdict_words(verdict: Verdict) -> str:
    """Return a sentence on a scenario."""
    return (
        f"{verdict.right} of {verdict.pairs} pairs in the right order. After {verdict.settled} steps it took "
        f"{verdict.chosen}: regret {verdict.regret:.1%}, {verdict.to_plain:.2f} of plain sums' step."
    )


def markdown(scenarios: Sequence[Scenario]) -> str:
    """Return all scenarios, one line each, and the worst of each figure beside its goal."""
    head = ("model", "link", "ranks", "plans", "order", "regret", "to plain", "to single", "settled", "taken")
    rows = []
    for scenario in scenarios:
        found, rate = judged(scenario), scenario["bandwidth"]
        rows.append(
            (
                scenario["model"],
                "loopback" if rate is None else of_rate(rate),
                str(scenario["ranks"]),
                str(len(scenario["plans"])),
                f"{found.right}/{found.pairs}",
                f"{found.regret:.1%}",
                f"{found.to_plain:.2f}",
                f"{found.to_single:.2f}",
                str(found.settled),
                found.chosen,
            )
        )
    worst, usual = totals(scenarios)
    lines = ["| of all scenarios | found | goal |", "| --- | --- | --- |"]
    for goal, words in WORDS.items():
        sign, mark = (">=" if goal == "order" else "<="), "" if worst.holds(goal) else " (missed)"
        lines.append(f"| {words} | {getattr(worst, goal):.4g}{mark} | {sign} {GOALS[goal]:.4g} |")
    lines.append(f"| regret after trials, median | {usual:.4g} | |")
    return "\n".join([table_of([head, *rows]), "", *lines])
