"""``grace bench pipeline``: a comparison of the planned cut with others, and of predicted with measured steps."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.common.ending import Ending
from grace.bench.common.kept import Kept
from grace.bench.common.progress import Bar
from grace.bench.common.text import scenario as named
from grace.bench.pipeline.settings import KNOWN, QUICK_ROUNDS, ROUNDS, Settings
from grace.bench.pipeline.tables import cuts_table, markdown, verdict_words
from grace.bench.ranks.scenario import run_scenario

NAME = "grace bench pipeline"
KEY = ("model", "bandwidth", "compressor")


def command(
    models: Annotated[
        str, typer.Option(help=f"{', '.join(KNOWN)}, or module:function; separated by commas.", show_default="all")
    ] = ",".join(KNOWN),
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Processes.")] = 2,
    stages: Annotated[
        str, typer.Option(help="How many, all with as many replicas; or any: then shares of the ranks are compared.")
    ] = "2",
    rates: Annotated[
        str, typer.Option("--links", help="Rates of emulated links (Linux, root), and loopback.")
    ] = "loopback",
    compressors: Annotated[
        str, typer.Option("--methods", help="Compressors of gradients between replicas, each a scenario.")
    ] = "none",
    microbatches: Annotated[int, typer.Option(help="Into how many a batch is cut.")] = 4,
    schedule: Annotated[str, typer.Option(help="gpipe or 1f1b.")] = "1f1b",
    blocks: Annotated[int, typer.Option(help="From how many blocks stages are made.")] = 16,
    rounds: Annotated[
        int | None,
        typer.Option(help="How often each cut has its turn.", show_default=f"{ROUNDS}, quick {QUICK_ROUNDS}"),
    ] = None,
    out: options.KeptIn = None,
    resume: options.Resume = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cuts, and less time for everything.")] = False,
) -> None:
    """Compare cuts of a model into pipeline stages: what is predicted, and what is measured.

    Ranks measure the parts of the model and the link, and plan. Then the plan is
    measured in turns with all cuts in two at the ends of blocks, and with what
    people cut by hand: stages with as many layers, with as many parameters, and
    with as long a time (GPipe's). With --stages any, one measures ways to share
    out the ranks instead: data parallelism alone, as many replicas of every
    stage, and of 3 ranks two for one stage. The last table is Markdown.
    """
    settings = Settings(
        models=options.split(models),
        bandwidths=options.bandwidths(rates),
        compressors=options.methods(compressors),
        ranks=ranks,
        stages=None if stages == "any" else options.integers(stages, "--stages")[0],
        microbatches=microbatches,
        schedule=schedule,
        blocks=blocks,
        rounds=rounds if rounds is not None else ROUNDS,
    )
    compare(settings.quick() if quick else settings, out, resume, Console(highlight=False))


def compare(
    settings: Settings, out: Path | None = None, resume: bool = False, console: Console | None = None
) -> list[dict[str, Any]]:
    """Measure all scenarios, and show tables.

    Args:
        settings: the settings of the benchmark.
        out: the file that each finished scenario is added to; None for no file.
        resume: True to continue from the scenarios in the file.
        console: the console that shows tables; none if left out.

    Returns:
        All scenarios.

    Raises:
        ConfigError: the file to continue from is damaged.
        typer.Exit: a rank or a network failed (1), or Ctrl-C (130); finished scenarios are shown and kept.
    """
    console = console or Console(quiet=True)
    store = Kept(out)
    found = store.open(resume)
    done = {tuple(one[key] for key in KEY) for one in found}
    ending = Ending(NAME)
    with ending.record_failure(), Bar(console) as bar:
        for key in settings.scenarios:
            if key not in done:
                found.append(_measure(settings, *key, bar, console))
                store.add(found[-1])
    if found:
        console.print(f"\n[bold]All {len(found)} scenarios[/]\n")
        console.print(markdown(found), markup=False, soft_wrap=True)
    ending.exit_if_failed()
    return found


def _measure(
    settings: Settings, model: str, rate: float | None, compressor: str, bar: Bar, console: Console
) -> dict[str, Any]:
    name = f"{model}, {named(settings.ranks, rate)}, {compressor}"
    bar.show(name, {"engine": "torch"})
    watch = partial(bar.show, name)
    began = time.monotonic()
    found = run_scenario("grace.bench.pipeline.worker", settings, [model, compressor], settings.ranks, rate, watch)
    scenario = {"model": model, "bandwidth": rate, "compressor": compressor, "ranks": settings.ranks, **found}
    scenario["wall_seconds"] = time.monotonic() - began
    console.print(f"\n[bold]{name}[/] ({scenario['wall_seconds']:.0f} s)", soft_wrap=True)
    console.print(cuts_table(scenario))
    console.print(verdict_words(scenario), markup=False)
    for cut, why in scenario["missing"].items():
        console.print(f"Left out: {cut}: {why}", markup=False, style="dim")
    return scenario
