"""Benchmarks of several scenarios, each of which is a row of the results."""

import abc
import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grace.bench.common.progress import ScenarioBars
from grace.bench.common.results import Row
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.scenario import Scenario, run_scenario
from grace.bench.report import scenarios

Resume = Annotated[bool, typer.Option("--resume", help="Leave out the scenarios that the folder has already.")]


@dataclasses.dataclass
class SweepSettings(abc.ABC):
    """Settings of a sweep."""

    @property
    @abc.abstractmethod
    def scenarios(self) -> Iterable[Scenario]:
        """Model, ranks, bandwidth and what else tells one from another of each scenario that is measured."""


def run_sweep(
    kind: str, settings: SweepSettings, out: Path | None, resume: bool, verdict: Callable[[Row], str]
) -> BenchmarkRun:
    """Measure all scenarios of settings, save each and tell its verdict when it ends, and show them all.

    Ranks run the module ``grace.bench.KIND.KIND_rank``, which takes a folder and those values of a scenario that are
    neither ranks nor bandwidth, and emits one event with all of a scenario's results. With ``resume`` scenarios in the
    folder are left out, whatever else they were measured with.
    """
    running = BenchmarkRun(kind, dataclasses.asdict(settings), out, resume)
    rows, known = running.results.rows, list(running.results.rows)
    program = ["-m", f"grace.bench.{kind}.{kind}_rank"]

    def measure() -> None:
        with ScenarioBars(running.console) as bars:
            for scenario in settings.scenarios:
                # a row has more keys than a scenario of the settings: what was measured
                if any(scenario.items() <= row.items() for row in known):
                    continue
                began, name = time.monotonic(), scenarios.name(scenario)
                ranks, rate = scenario["ranks"], scenario["bandwidth"]
                others = [value for key, value in scenario.items() if key not in ("ranks", "bandwidth")]
                found = run_scenario(program, settings, others, ranks, rate, partial(bars.show, name))
                seconds = time.monotonic() - began
                rows.append({**scenario, **found, "wall_seconds": seconds})
                running.save()
                running.console.print(f"{name} ({seconds:.0f} s): {verdict(rows[-1])}", markup=False)

    return running.measure(measure)
