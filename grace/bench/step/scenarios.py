"""Step times of Grace's methods and of what people use without Grace, side by side over the same network."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from grace.bench.common.results import Results
from grace.bench.link.emulation import Link
from grace.bench.ranks.events import Follower
from grace.bench.ranks.launchers import launcher
from grace.bench.ranks.run import run_ranks
from grace.bench.step.rows import Table, conclude, judged, scenario
from grace.bench.step.settings import Event, Settings


def run(settings: Settings, results: Results, watch: Callable[[str, Event], None]) -> None:
    """Measure every scenario; what is measured is added to the results when it is there.

    Args:
        settings: what to run.
        results: of kind "step"; its rows and settings are filled in, the verdicts at each scenario's end.
        watch: called with a scenario's name and each event of its ranks, see :mod:`grace.bench.step.worker`.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    for ranks, rate in settings.scenarios:
        _scenario(settings, results, ranks, rate, watch)


def _scenario(
    settings: Settings, results: Results, ranks: int, rate: float | None, watch: Callable[[str, Event], None]
) -> None:
    before = list(results.rows)
    tables = [Table(engine, ranks, rate) for engine in settings.groups]

    def take(table: Table, event: Event) -> None:
        table.take(event)
        results.settings.update(table.facts)
        results.rows = [*before, *judged([row for each in tables for row in each.rows()], settings.engine)]
        watch(scenario(ranks, rate), event)

    for table in tables:
        watch(scenario(ranks, rate), {"engine": table.engine})
        _measure(settings, table.engine, ranks, rate, partial(take, table))
    conclude(results, len(before), ranks, rate, settings.engine)


def _measure(settings: Settings, engine: str, ranks: int, rate: float | None, take: Callable[[Event], None]) -> None:
    """Start the ranks, and hand on what rank 0 tells."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grace-bench-")))
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
        follower = Follower(folder / "events.jsonl")

        def watch() -> None:
            for event in follower.new():
                take(event)

        link = None if rate is None else stack.enter_context(Link(settings.nodes(ranks), rate))
        start = stack.enter_context(launcher(engine, ranks, link))
        run_ranks(start, ["-m", "grace.bench.step.worker", str(folder), engine], folder, watch)
