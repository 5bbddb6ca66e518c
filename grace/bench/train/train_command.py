"""``grace bench train``: what compression does to the quality of a model, and how soon it gets there."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.common.progress import ScenarioBars
from grace.bench.common.quality import shown
from grace.bench.common.text import scenario, show_rate
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.rank_program import Event
from grace.bench.report.train_table import show
from grace.bench.train import training_runs
from grace.bench.train.train_settings import TrainSettings

NAME = "grace bench train"


@options.with_options(TrainSettings)
def command(
    given: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for results.json, results.csv and report.html.", show_default="out/train-TASK"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, and few epochs: under two minutes.")] = False,
) -> None:
    """Train a task with several methods and seeds: quality against epochs, bytes and time.

    Every method starts from the same weights and sees the same data in the same
    order. Methods whose aggregate is not on the scale of a gradient (the votes
    of signsgd and signum) need a learning rate of their own: give it with --lr.
    The time of evaluations does not count. What is finished is kept, Ctrl-C
    included. Builders whose ranks train alone (diloco) are evaluated at the
    anchor, and end with a last round.

    \b
    Examples:
      grace bench train --methods none,topk --seeds 3
      grace bench train --task chargpt --optimizer adamw,sgd --methods none,qsgd
      grace bench train --task recommender --bandwidth 100mbit --quick
      grace bench train --methods 'block(bits=4),diloco(period=20)'
    """
    settings = TrainSettings(**{**({"seeds": [0]} if quick else {}), **given})
    if quick:
        settings.use_quick_epochs()
    folder = out or Path(f"out/train-{settings.task.replace(':', '-')}")
    run(settings, folder).report_and_exit(Console(highlight=False))


def run(settings: TrainSettings, out: Path) -> BenchmarkRun:
    """Train, show and save; return the benchmark with its results and its exit code."""
    console = Console(highlight=False)
    running = BenchmarkRun(NAME, "train", settings.about(), out)
    running.measure(lambda: _train_all(settings, running, console))
    show(console, running.results)
    return running


def _train_all(settings: TrainSettings, running: BenchmarkRun, console: Console) -> None:
    """Train over each network; each run is saved, and told in a line, when it ends."""
    with ScenarioBars(console) as bars:

        def watch(rate: float | None, event: Event) -> None:
            bars.show(scenario(settings.ranks, rate), event)
            if "run" not in event:
                return
            running.save()
            run, where = event["run"], "" if rate is None else f", {show_rate(rate)}"
            name = settings.label(run["method"], run["optimizer"])
            quality = f"{running.results.settings['metric']} {shown(run['quality'], running.results.settings)}"
            console.print(f"{name}, seed {run['seed']}{where}: {quality}", markup=False)

        training_runs.run(settings, running.results, watch)
