"""Step times of Grace's methods and of what people use without Grace, side by side over the same network."""

from collections.abc import Callable
from functools import partial

from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.ranks.scenario import told
from grace.bench.step.rows import Table, conclude, judged
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
        given, nodes = [table.engine], settings.nodes(ranks)
        told("grace.bench.step.worker", settings, given, ranks, rate, partial(take, table), table.engine, nodes)
    conclude(results, len(before), ranks, rate, settings.engine)
