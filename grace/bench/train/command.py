"""``grace bench train``: what compression does to the quality of a model, and how soon it gets there."""

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.common.progress import Display
from grace.bench.common.text import of_ranks, show_rate
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.train import scenarios
from grace.bench.train.settings import METHODS, Event, Settings
from grace.errors import ConfigError

DEFAULT_METHODS = ", ".join(METHODS)
NAME = "grace bench train"


def command(
    task: Annotated[
        str,
        typer.Option(
            help="digits (accuracy), charlm (a character LSTM's perplexity), chargpt (a character GPT's loss), "
            "recommender (two embedding tables and an MLP), or module:function, which returns a "
            "grace.bench.workloads.Task."
        ),
    ] = "digits",
    methods: Annotated[
        str,
        typer.Option(
            help="Compressor specs, or strategies' builders as auto, separated by commas, or all compressors. "
            f"Default: {DEFAULT_METHODS}.",
            show_default=False,
        ),
    ] = DEFAULT_METHODS,
    framework: Annotated[str, typer.Option(help="torch or tensorflow.")] = "torch",
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd (with momentum), adamw, or both, as in adamw,sgd.", show_default="the task's"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="About how many parameters chargpt's model has, as in 500k.", show_default="70k"),
    ] = None,
    ranks: options.Ranks = 2,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Rates of emulated links, as in 1gbit,100mbit (Linux, root); none is the loopback.",
            show_default="loopback",
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training data.", show_default="the task's")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="How many runs of each method, or their seeds, as in 0,1,7; the table shows means.",
            show_default="3, or 1 with --quick",
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="The quality whose time is measured.", show_default="the task's")
    ] = None,
    lr: Annotated[
        list[str] | None,
        typer.Option(
            "--lr", help="METHOD=RATE: a learning rate for one method; may be repeated.", metavar="METHOD=RATE"
        ),
    ] = None,
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
    included.

    \b
    Examples:
      grace bench train --methods none,topk --seeds 3
      grace bench train --task chargpt --optimizer adamw,sgd --methods none,qsgd
      grace bench train --task recommender --bandwidth 100mbit --quick
    """
    settings = Settings(
        options.methods(methods),
        ranks,
        epochs,
        options.seeds(seeds or ("1" if quick else "3")),
        task,
        rates(lr or []),
        framework,
        options.bandwidths(bandwidth),
        target,
        options.split(optimizer or ""),
        None if size is None else options.size(size),
    )
    if quick and epochs is None:
        settings.epochs = settings.facts["quick_epochs"]
    run(settings, out or Path(f"out/train-{task.replace(':', '-')}")).report_and_exit(Console(highlight=False))


def run(settings: Settings, out: Path) -> BenchmarkRun:
    """Train, show and save; how it ended is in what it returns."""
    console = Console(highlight=False)
    running = BenchmarkRun(NAME, "train", settings.about(), out)
    console.print(f"Starting {of_ranks(settings.ranks)} ...\n")

    def measure() -> None:
        with Display(console, settings) as display:

            def watch(rate: float | None, event: Event) -> None:
                display.show(rate, event)
                if "run" in event:
                    running.save()

            scenarios.run(settings, running.results, watch)

    running.measure(measure)
    show(console, running)
    return running


def show(console: Console, running: BenchmarkRun) -> None:
    """A table per network, and how to read it."""
    from grace.bench.train.table import advice, results_table

    results = running.results
    rates = dict.fromkeys(row["bandwidth"] for row in results.rows)
    optimizers = dict.fromkeys(row["optimizer"] for row in results.rows)
    for rate, optimizer in itertools.product(rates, optimizers):
        rows = [row for row in results.rows if (row["bandwidth"], row["optimizer"]) == (rate, optimizer)]
        where = ["loopback" if rate is None else show_rate(rate)] if rate is not None or len(rates) > 1 else []
        where += [optimizer] if len(optimizers) > 1 else []
        if where and rows:
            console.print(f"\n[bold]{', '.join(where)}[/]")
        if rows:
            console.print(results_table(rows, results))
            last = rows
    if results.rows:
        console.print(advice(last, results))


def rates(texts: list[str]) -> dict[str, float]:
    """Learning rates by method.

    >>> rates(["topk=0.1", "qsgd(levels=7)=1e-3"])
    {'topk': 0.1, 'qsgd(levels=7)': 0.001}
    """
    found = {}
    for text in texts:
        method, _, rate = text.rpartition("=")
        try:
            found[method.strip()] = float(rate)
        except ValueError:
            method = ""
        if not method:
            raise ConfigError(f"a learning rate is given as METHOD=RATE, as in signsgd=0.001, not {text!r}")
    return found
