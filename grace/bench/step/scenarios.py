"""Scenarios of ``grace bench step``: Grace's methods and others, side by side over the same network."""

from collections.abc import Callable
from functools import partial

from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.ranks.scenario import run_scenario
from grace.bench.step.rows import Table, add_verdicts, conclude
from grace.bench.step.settings import Event, Settings


def run(settings: Settings, results: Results, watch: Callable[[str, Event], None]) -> None:
    """Measure every scenario; each row is added to the results when it is measured.

    Args:
        settings: the settings of the benchmark.
        results: results of kind "step"; rows and settings are filled in, the verdicts at each scenario's end.
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

    def add_event(table: Table, event: Event) -> None:
        table.add(event)
        results.settings.update(table.facts)
        results.rows = [*before, *add_verdicts([row for each in tables for row in each.rows()], settings.engine)]
        watch(scenario(ranks, rate), event)

    for table in tables:
        watch(scenario(ranks, rate), {"engine": table.engine})
        nodes = settings.nodes(ranks)
        run_scenario(
            "grace.bench.step.worker",
            settings,
            [table.engine],
            ranks,
            rate,
            partial(add_event, table),
            table.engine,
            nodes,
        )
    conclude(results, len(before), ranks, rate, settings.engine)
