"""Starting the ranks of each scenario of ``grace bench plan``, and keeping what they tell in a file that grows."""

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace.bench.common.text import of_ranks, show_rate
from grace.bench.link.emulation import Link
from grace.bench.plan.settings import Event, Settings
from grace.bench.ranks.events import Follower
from grace.bench.ranks.launchers import launcher
from grace.bench.ranks.run import run_ranks
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
        found.append({**about, **_measure(settings, *key, lambda e, about=about: watch(named(about), e))})  # type: ignore[misc]
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


def _measure(
    settings: Settings, model: str, ranks: int, rate: float | None, watch: Callable[[Event], None]
) -> Scenario:
    """Start the ranks, and return what rank 0 tells in the end."""
    found: Scenario = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grace-bench-")))
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
        follower = Follower(folder / "events.jsonl")

        def listen() -> None:
            for event in follower.new():
                found.update(event.get("scenario", {}))
                watch(event)

        link = None if rate is None else stack.enter_context(Link(ranks, rate))
        start = stack.enter_context(launcher("torch", ranks, link))
        run_ranks(start, ["-m", "grace.bench.plan.worker", str(folder), model], folder, listen)
    return found
