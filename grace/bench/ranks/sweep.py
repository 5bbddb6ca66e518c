"""Benchmarks whose scenarios are kept in a file, one after the other."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from rich.console import Console
from rich.table import Table

from grace.bench.common.ending import Ending
from grace.bench.common.progress import ScenarioBars
from grace.bench.common.results import naming_damage
from grace.bench.common.tables import Columns
from grace.bench.common.text import of_rate
from grace.bench.common.text import scenario as scenario_name
from grace.bench.ranks.scenario import Scenario, run_scenario
from grace.core import documents
from grace.core.atomic_files import atomic_write

PLACE: Columns[Scenario] = {
    "model": lambda scenario: scenario["model"],
    "link": lambda scenario: "loopback" if scenario["bandwidth"] is None else of_rate(scenario["bandwidth"]),
    "ranks": lambda scenario: str(scenario["ranks"]),
}
"""Columns of tables of scenarios: what was measured, and where."""


class SweepSettings(Protocol):
    """Settings of a sweep: a dataclass with the scenarios that it measures."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    @property
    def scenarios(self) -> Iterable[Scenario]:
        """Model, ranks, bandwidth and further facts of each scenario."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Benchmark of several scenarios, of which each is shown and kept as soon as it is measured.

    ``program`` is the module that ranks run; it takes a folder and those values of a scenario that are neither ranks
    nor bandwidth, and emits one event with all of a scenario's results. ``summary`` returns the table of all scenarios,
    in Markdown.
    """

    name: str
    program: str
    table: Callable[[Scenario], Table]
    verdict: Callable[[Scenario], str]
    summary: Callable[[Sequence[Scenario]], str]

    def run(
        self, settings: SweepSettings, out: Path | None = None, resume: bool = False, console: Console | None = None
    ) -> list[Scenario]:
        """Measure all scenarios of settings, show tables on the console, if any, and return the scenarios, the file's
        first.

        Each scenario is a dict with model, ranks, bandwidth and what else tells one from another. The file ``out``
        keeps those of an earlier run until the first one is measured. With ``resume`` those in the file are left out,
        whatever else they were measured with. The command exits with 1 if a rank or a network failed, or 130 after
        Ctrl-C; finished scenarios are shown and kept.
        """
        console = console or Console(quiet=True)
        if out is not None:  # a file that cannot be written is refused before anything is measured
            out.parent.mkdir(parents=True, exist_ok=True)
            out.open("a").close()
        found = self.kept(out) if out is not None and resume else []
        known, ending = len(found), Ending(self.name)
        with ending.record_failure(), ScenarioBars(console) as bars:
            for scenario in settings.scenarios:
                # A scenario in the file has more keys than one of the settings: what was measured.
                if not any(scenario.items() <= one.items() for one in found[:known]):
                    found.append(self._measure(settings, scenario, bars, console))
                    if out is not None:  # at once: a sweep takes hours, and may be interrupted
                        with atomic_write(out) as draft:
                            draft.write_text("".join(f"{json.dumps(one)}\n" for one in found))
        if found:
            where = f", {known} of them measured before" if known else ""
            console.print(f"\n[bold]All {len(found)} scenarios{where}[/]\n")
            console.print(self.summary(found), markup=False, soft_wrap=True)
        ending.exit_if_failed()
        return found

    def _measure(self, settings: SweepSettings, scenario: Scenario, bars: ScenarioBars, console: Console) -> Scenario:
        ranks, rate = scenario["ranks"], scenario["bandwidth"]
        model, *others = [value for key, value in scenario.items() if key not in ("ranks", "bandwidth")]
        name = ", ".join([model, scenario_name(ranks, rate), *others])
        began = time.monotonic()
        found = run_scenario(["-m", self.program], settings, [model, *others], ranks, rate, partial(bars.show, name))
        found = {**scenario, **found, "wall_seconds": time.monotonic() - began}
        console.print(f"\n[bold]{name}[/] ({found['wall_seconds']:.0f} s)", soft_wrap=True)
        console.print(self.table(found))
        console.print(self.verdict(found), markup=False)
        for left_out, why in found["missing"].items():
            console.print(f"Left out: {left_out}: {why}", markup=False, style="dim")
        return found

    def kept(self, file: Path) -> list[Scenario]:
        """Return the scenarios in a file, which must be of this benchmark."""
        with naming_damage(file):
            found: list[Scenario] = [json.loads(line) for line in documents.read(file).splitlines()]
            if found:
                self.summary(found)
        return found
