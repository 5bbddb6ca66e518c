"""``grace bench train``: what compression does to the quality of a model, and how soon it gets there."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.common.progress import TrainingBars
from grace.bench.common.results import Row
from grace.bench.common.text import of_ranks, show_rate
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.train import training_runs
from grace.bench.train.train_settings import TrainSettings
from grace.bench.train.train_table import advice, results_table

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
    console.print(f"Starting {of_ranks(settings.ranks)} ...\n")

    def measure() -> None:
        with TrainingBars(console, settings) as bars:

            def watch(rate: float | None, event: training_runs.Event) -> None:
                bars.show(rate, event)
                if "run" in event:
                    running.save()

            training_runs.run(settings, running.results, watch)

    running.measure(measure)
    show(console, running)
    return running


def show(console: Console, running: BenchmarkRun) -> None:
    """Show a table for each network and optimizer, and how to read them."""
    results = running.results
    tables: dict[tuple[float | None, str], list[Row]] = {}
    for row in results.rows:
        tables.setdefault((row["bandwidth"], row["optimizer"]), []).append(row)
    rates, optimizers = {rate for rate, _ in tables}, {optimizer for _, optimizer in tables}
    for (rate, optimizer), rows in tables.items():
        where = ["loopback" if rate is None else show_rate(rate)] if rate is not None or len(rates) > 1 else []
        where += [optimizer] if len(optimizers) > 1 else []
        if where:
            console.print(f"\n[bold]{', '.join(where)}[/]")
        console.print(results_table(rows, results))
    if tables:
        console.print(advice(rows, results))
