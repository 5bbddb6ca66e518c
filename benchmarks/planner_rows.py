"""Rows of the planner: ``python -m benchmarks.planner_rows``.

Runs ``grace bench plan`` over five models, four links, and 2 and 4 ranks, the short scenarios first; plans that are
near the best one have eight turns, of about six seconds in all. The rows go into a folder, as those of ``grace bench
plan``; pages quote those of ``benchmarks/results/plan.json``. A scenario that is in the folder is not measured again,
so that a run that was stopped, or ran out of time, goes on where it was.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    def scenarios(self) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        """Scenarios until the time is over."""
        for scenario in sorted(super().scenarios, key=cost):
            if time.monotonic() < self.ends:
                yield scenario


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
    run_sweep("plan", rows, given.out, True, verdict).report_and_exit()


if __name__ == "__main__":
    main()
