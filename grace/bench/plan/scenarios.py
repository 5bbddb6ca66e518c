"""Starting the ranks of each scenario of ``grace bench plan``, and keeping what they tell in a file that grows."""

import time
from collections.abc import Callable
from functools import partial

from grace.bench.common.kept import Kept, Scenario
from grace.bench.common.text import scenario as named
from grace.bench.plan.settings import Event, Settings
from grace.bench.ranks.scenario import run_scenario

KEY = ("model", "ranks", "bandwidth")


def run(
    settings: Settings,
    kept: Kept,
    found: list[Scenario],
    watch: Callable[[str, Event], None] = lambda name, e: None,
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
        model, ranks, rate = key
        name, began = f"{model}, {named(ranks, rate)}", time.monotonic()
        watch(name, {"engine": "torch"})
        scenario = run_scenario("grace.bench.plan.worker", settings, [model], ranks, rate, partial(watch, name))
        found.append({**dict(zip(KEY, key, strict=True)), **scenario})
        found[-1]["wall_seconds"] = time.monotonic() - began
        kept.add(found[-1])
