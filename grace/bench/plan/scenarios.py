"""Starting the ranks of each scenario of ``grace bench plan``, and keeping what they tell in a file that grows."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace.bench.common.text import of_ranks, show_rate
from grace.bench.plan.settings import Event, Settings
from grace.bench.ranks.scenario import told
from grace.errors import ConfigError

KEY = ("model", "ranks", "bandwidth")
Scenario = dict[str, Any]


def run(
    settings: Settings, kept: "Kept", found: list[Scenario], watch: Callable[[str, Event], None] = lambda name, e: None
) -> None:
    """Measure every scenario that was not yet; each is kept as soon as it is there.

    Args:
        settings: what to run.
        kept: where they are kept.
        found: scenarios that were measured before; others are added.
        watch: called with a scenario's name and each event of its ranks, see :mod:`grace.bench.plan.worker`.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    done = {tuple(one[key] for key in KEY) for one in found}
    for key in settings.scenarios:
        if key in done:
            continue
        about = dict(zip(KEY, key, strict=True))
        watch(named(about), {"engine": "torch"})
        began = time.monotonic()
        model, ranks, rate = key
        tell = lambda event, about=about: watch(named(about), event)  # type: ignore[misc]  # noqa: E731
        found.append({**about, **told("grace.bench.plan.worker", settings, [model], ranks, rate, tell)})
        found[-1]["wall_seconds"] = time.monotonic() - began
        kept.add(found[-1])


def named(scenario: Scenario) -> str:
    """What it is called.

    >>> named({"model": "lstm", "ranks": 2, "bandwidth": 1e9})
    'lstm, 2 ranks at 1gbit'
    """
    rate = scenario["bandwidth"]
    where = " on loopback" if rate is None else f" at {show_rate(rate)}"
    return f"{scenario['model']}, {of_ranks(scenario['ranks'])}{where}"


class Kept:
    """A file of scenarios, one JSON object a line; none keeps nothing.

    >>> file = Path(tempfile.mkdtemp(), "plans.jsonl")
    >>> Kept(file).add({"model": "lstm"})
    >>> Kept(file).read()
    [{'model': 'lstm'}]
    """

    def __init__(self, file: Path | None):
        self.file = file

    def begin(self, resume: bool) -> list[Scenario]:
        """Those that are there, if they are to be gone on from; else an empty file."""
        if self.file is None:
            return []
        if resume and self.file.exists():
            return self.read()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")
        return []

    def read(self) -> list[Scenario]:
        """All of them.

        Raises:
            ConfigError: a line is no scenario.
        """
        assert self.file is not None
        found = []
        for number, line in enumerate(self.file.read_text().splitlines(), start=1):
            try:
                scenario = json.loads(line)
                scenario["model"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{self.file}, line {number}, is no scenario of grace bench plan") from None
            found.append(scenario)
        return found

    def add(self, scenario: Scenario) -> None:
        """One more."""
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps(scenario) + "\n")
