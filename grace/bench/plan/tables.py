"""Predicted and measured steps as tables: for a terminal, and in Markdown."""

from collections.abc import Sequence

from rich.table import Table

from grace.bench.common.kept import Scenario, relative_error
from grace.bench.common.tables import figures_table
from grace.bench.common.tables import markdown as table_of
from grace.bench.common.text import of_rate
from grace.bench.plan.verdicts import GOALS, Totals, Verdict, judged

WORDS = {
    "median": "median error",
    "worst": "worst error",
    "order": "pairs in the right order",
    "regret": "regret without measuring, at most",
    "regret_measured": "regret with measuring, at most",
}


def plans_table(scenario: Scenario) -> Table:
    """The plans of a scenario, and what was expected of each; times in milliseconds."""
    headers = ("predicted\nms", "measured\nms", "error", "codec\npredicted", "codec\nmeasured")
    table = figures_table("plan", headers)
    for plan in scenario["plans"]:
        times = [plan[key] for key in ("predicted_ms", "measured_ms", "codec_ms", "measured_codec_ms")]
        cells = [f"{value:.4g}" for value in times]
        style = "bold" if plan["chosen"] else "" if plan["allowed"] else "dim"
        table.add_row(plan["name"], cells[0], cells[1], f"{relative_error(plan):+.0%}", cells[2], cells[3], style=style)
    return table


def verdict_words(verdict: Verdict) -> str:
    """On a scenario, in a sentence or two."""
    return (
        f"Errors: {verdict.median:.0%} in the median, {verdict.worst:.0%} at most; {verdict.right} of {verdict.pairs} "
        f"pairs in the right order. Without measuring it takes {verdict.chosen} (regret {verdict.regret:.1%}), with it "
        f"{verdict.measured} ({verdict.regret_measured:.1%})."
    )


def markdown(scenarios: Sequence[Scenario], totals: Totals) -> str:
    """All scenarios, one line each, and what comes out."""
    head = ("model", "link", "ranks", "plans", "median error", "worst", "order", "regret", "regret, measured", "taken")
    rows = []
    for scenario in scenarios:
        found, rate = judged(scenario), scenario["bandwidth"]
        rows.append(
            (
                scenario["model"],
                "loopback" if rate is None else of_rate(rate),
                str(scenario["ranks"]),
                str(len(scenario["plans"])),
                f"{found.median:.0%}",
                f"{found.worst:.0%}",
                f"{found.right}/{found.pairs}",
                f"{found.regret:.1%}",
                f"{found.regret_measured:.1%}",
                found.measured,
            )
        )
    return "\n".join([table_of([head, *rows]), "", *summary(totals)])


def summary(totals: Totals) -> list[str]:
    """What comes out, beside the goals, as lines of Markdown."""
    lines = [f"| of {totals.plans} plans | found | goal |", "| --- | --- | --- |"]
    for goal, words in WORDS.items():
        sign, mark = (">=" if goal == "order" else "<="), "" if totals.holds(goal) else " (missed)"
        lines.append(f"| {words} | {getattr(totals, goal):.1%}{mark} | {sign} {GOALS[goal]:.0%} |")
    lines.append(f"| regret without and with measuring, median | {_pair(totals, 'usual_regret')} | |")
    lines.append(f"| error before and after corrections, median | {totals.before[0]:.1%}, {totals.after[0]:.1%} | |")
    lines.append(f"| error before and after corrections, worst | {totals.before[1]:.1%}, {totals.after[1]:.1%} | |")
    lines += ["", "| plan | predicted / measured - 1, median |", "| --- | --- |"]
    lines += [f"| {name} | {error:+.0%} |" for name, error in totals.methods.items()]
    return lines


def _pair(totals: Totals, name: str) -> str:
    return f"{getattr(totals, name):.1%}, {getattr(totals, f'{name}_measured'):.1%}"
