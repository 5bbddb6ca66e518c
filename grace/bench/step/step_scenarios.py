"""Scenarios of ``grace bench step``: Grace's methods and others, side by side over the same network."""

import dataclasses
from collections.abc import Callable
from functools import partial

import grace
from grace.bench.common.results import Results
from grace.bench.ranks.rank_program import Event
from grace.bench.ranks.scenario import run_scenario
from grace.bench.step.step_rows import ScenarioRows
from grace.bench.step.step_settings import StepSettings

RANK_PROGRAM = ("-m", "grace.bench.step.step_rank")


def run(settings: StepSettings, results: Results, watch: Callable[[str, Event], None]) -> None:
    """Measure every scenario; each row is added to the results when it is measured.

    Args:
        settings: the settings of the benchmark.
        results: results of kind "step"; rows and settings are filled in, the verdicts at each scenario's end.
        watch: called with a scenario's name and each event of its ranks, see :mod:`grace.bench.step.step_rank`.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    for ranks, rate in settings.scenarios:
        rows = ScenarioRows(results, ranks, rate, settings.engines, watch)
        for engine in settings.engines:
            rows.begin(engine)
            add = partial(rows.add, engine)
            run_scenario(RANK_PROGRAM, settings, [engine], ranks, rate, add, engine, settings.nodes(ranks))
        rows.conclude()


def run_here(settings: StepSettings, results: Results, watch: Callable[[str, Event], None]) -> None:
    """Measure on the ranks that a launcher has started, of which this process is one, over the network between them.

    Args:
        settings: the settings; engine, ranks and bandwidths are replaced by those of this run.
        results: results of kind "step", which are filled in on rank 0.
        watch: called on rank 0 with the scenario's name and each event.
    """
    from grace.bench.step.step_rank import measure

    backend = grace.init()
    settings = dataclasses.replace(settings, engine=backend.name, ranks=[backend.size], bandwidths=[None])
    results.settings = settings.about()
    rows = ScenarioRows(results, backend.size, None, [backend.name], watch)
    if backend.rank == 0:
        rows.begin(backend.name)
        measure(settings, backend, backend.name, partial(rows.add, backend.name))
        rows.conclude()
    else:
        measure(settings, backend, backend.name, lambda event: None)
