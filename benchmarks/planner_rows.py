"""Rows of the planner: ``python -m benchmarks.planner_rows``.

Runs ``grace bench plan`` over five models, four links, and 2 and 4 ranks, the short scenarios first; plans that are
near the best one have eight turns, of about six seconds in all. The rows go into a folder, as those of ``grace bench
plan``; pages quote those of ``benchmarks/results/plan.json``. A scenario that is in the folder is not measured again,
so that a run that was stopped, or ran out of time, goes on where it was. At the end the worst of each figure stands
beside its goal.
"""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from grace.bench.common.tables import Columns, table
from grace.bench.plan.plan_command import PlanSettings
from grace.bench.ranks.sweep import run_sweep
from grace.bench.report.plan_table import verdict

MODELS = {"mlp": 0.3, "ncf": 9.6, "lstm": 10.6, "resnet": 11.2, "transformer": 16.8}
"""Models, and their millions of parameters."""
RATES = [0.0, 10e9, 1e9, 100e6]
"""Bandwidths in bit/s; 0 for the loopback."""
TURNS: dict[str, Any] = {"rounds": 8, "seconds": 6.0}
RANKS = [2, 4]
OUT = Path("out/planner_rows")


class Goal(NamedTuple):
    """Goal of a figure: its words, and the least share of the order, or most of all else."""

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


def cost(scenario: dict[str, Any]) -> float:
    """Return about how long an uncompressed step travels, in seconds.

    >>> cost({"model": "mlp", "ranks": 2, "bandwidth": 100e6}) < cost({"model": "mlp", "ranks": 4, "bandwidth": 100e6})
    True
    """
    ranks = scenario["ranks"]
    return float(2 * (ranks - 1) / ranks * 32e6 * MODELS.get(scenario["model"], 1.0) / (scenario["bandwidth"] or 20e9))


class Rows(PlanSettings):
    """Settings of ``grace bench plan`` whose scenarios, short ones first, end with the time."""

    ends = math.inf
    """When no scenario begins any more, on the monotonic clock."""

    @property
    def scenarios(self) -> Iterator[dict[str, Any]]:
        """Scenarios until the time is over."""
        for scenario in sorted(super().scenarios, key=cost):
            if time.monotonic() < self.ends:
                yield scenario


def worst(scenarios: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the worst of all scenarios by the names of goals; for the order the share of all their pairs."""
    found = {goal: max(row[goal] for row in scenarios) for goal in GOALS if goal != "order"}
    right, pairs = (sum(row[key] for row in scenarios) for key in ("right", "pairs"))
    return {"order": right / pairs if pairs else 1.0, **found}


def missed(goal: str, value: float) -> bool:
    """Return True if a value misses a goal of :data:`GOALS`."""
    return value < GOALS[goal].limit if goal == "order" else value > GOALS[goal].limit


def show_goals(console: Console, scenarios: Sequence[dict[str, Any]]) -> None:
    """Show the worst of each figure beside its goal."""
    columns: Columns[tuple[str, float]] = {
        "of all scenarios": lambda one: GOALS[one[0]].words,
        "found": lambda one: f"{one[1]:.4g}" + (" (missed)" if missed(*one) else ""),
        "goal": lambda one: f"{'>=' if one[0] == 'order' else '<='} {GOALS[one[0]].limit:.4g}",
    }
    console.print("", table(worst(scenarios).items(), columns), sep="\n")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"(default: {OUT})")
    parser.add_argument("--minutes", type=float, default=20, help="how long scenarios are begun (default: 20)")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help=f"(default: {' '.join(MODELS)})")
    parser.add_argument(
        "--rates", nargs="*", type=float, default=RATES, help="bit/s, 0 for the loopback (default: 0 10e9 1e9 100e6)"
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS, help="(default: 2 4)")
    given = parser.parse_args()
    rows = Rows(given.models, [rate or None for rate in given.rates], given.ranks, **TURNS)
    rows.ends = time.monotonic() + 60 * given.minutes
    running = run_sweep("plan", rows, given.out, True, verdict)
    if running.results.rows:
        show_goals(running.console, running.results.rows)
    running.report_and_exit()


if __name__ == "__main__":
    main()
