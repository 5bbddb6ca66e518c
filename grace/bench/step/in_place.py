"""Measurement on the ranks that a launcher has started already."""

import dataclasses
from collections.abc import Callable

import grace
from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.step.rows import Table, add_verdicts, conclude
from grace.bench.step.settings import Event, Settings, about


def run_here(settings: Settings, results: Results, watch: Callable[[str, Event], None]) -> bool:
    """Measure on the ranks that a launcher has started, of which this process is one, over the network between them.

    Args:
        settings: the settings; engine, ranks and bandwidths are replaced by those of this run.
        results: results of kind "step", which are filled in on rank 0.
        watch: called on rank 0 with the scenario's name and each event.

    Returns:
        True if this is rank 0.
    """
    from grace.bench.step.worker import measure

    backend = grace.init()
    settings = dataclasses.replace(settings, engine=backend.name, ranks=[backend.size], bandwidths=[None])
    results.settings = about(settings)
    table = Table(backend.name, backend.size, None)
    name = scenario(backend.size, None)

    def add_event(event: Event) -> None:
        table.add(event)
        results.settings.update(table.facts)
        results.rows = add_verdicts(table.rows(), backend.name)
        watch(name, event)

    if backend.rank == 0:
        watch(name, {"engine": backend.name})
    measure(settings, backend, backend.name, add_event if backend.rank == 0 else lambda event: None)
    if backend.rank == 0:
        conclude(results, 0, backend.size, None, backend.name)
    return backend.rank == 0
