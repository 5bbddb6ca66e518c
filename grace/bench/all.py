"""``grace bench all`` and ``grace demo``: the gain of compression, the quality of models, and the costs."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common import options, results
from grace.bench.common.results import Results
from grace.bench.common.text import parse_rate, show_rate
from grace.bench.kernels import kernels_command
from grace.bench.lifecycle import BenchmarkRun, need_report
from grace.bench.link.emulation import possible
from grace.bench.step import command as step_command
from grace.bench.step import settings as step
from grace.bench.train import command as train_command
from grace.bench.train import settings as training

BANDWIDTHS, QUICK_BANDWIDTH = "10gbit,1gbit,100mbit", "1gbit"


def command(
    model: Annotated[str, typer.Option(help="What steps are timed of; see grace bench step.")] = "transformer",
    task: Annotated[str, typer.Option(help="What is trained; see grace bench train.")] = "digits",
    methods: Annotated[
        str | None,
        typer.Option(help="Compressor specs, separated by commas, or all.", show_default="each part's own"),
    ] = None,
    ranks: options.Ranks = 2,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Rates of emulated links for the steps; none is the loopback.",
            show_default=f"{BANDWIDTHS}, or {QUICK_BANDWIDTH} with --quick",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Training runs of each method.", show_default="3, or 1 with --quick")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for report.html and a folder of results per part.")
    ] = Path("out/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer methods and rounds: under two minutes.")] = False,
) -> None:
    """Run the three benchmarks, and put them into one report.

    step: whether a training step gets faster, over networks of given bandwidths.
    train: whether the model still learns. kernels: what encoding and decoding
    cost and lose, without a network. Each part can be run by itself, with more
    options: grace bench step, train, kernels.
    """
    _run("grace bench all", "", model, task, methods, ranks, bandwidth, seeds, out, quick)


def demo(
    ranks: options.Ranks = 2,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.html and the results.")] = Path(
        "out/demo"
    ),
) -> None:
    """Show in about a minute what gradient compression costs, and when it pays.

    It is grace bench all --quick: two processes train a small transformer over
    an emulated slow network, with and without Grace; a small network learns
    handwritten digits with each method; and the methods are timed by themselves.
    """
    introduction = (
        "Processes that train one model together exchange their gradients at every step; over a slow network they "
        "wait for that. Grace compresses the gradients. Three small experiments on this machine show when that pays "
        "and what it costs; they take about a minute."
    )
    _run("grace demo", introduction, "transformer", "digits", None, ranks, None, None, out, quick=True)


def _run(
    name: str,
    introduction: str,
    model: str,
    task: str,
    methods: str | None,
    ranks: int,
    bandwidth: str | None,
    seeds: str | None,
    out: Path,
    quick: bool,
) -> None:
    began = time.monotonic()
    console = Console(highlight=False)
    need_report()
    rates, note = _bandwidths(bandwidth, quick)
    chosen = None if methods is None else options.methods(methods)
    steps = step.Settings(
        model=model,
        methods=chosen or list(step.QUICK_METHODS if quick else step.METHODS),
        ranks=[ranks],
        bandwidths=rates,
        rounds=step.QUICK_ROUNDS if quick else step.ROUNDS,
        baselines=["ddp"] if quick else list(step.BASELINES),
    )
    count = options.seeds(seeds or ("1" if quick else "3"))
    trained = training.Settings(chosen or list(training.METHODS), ranks, seeds=count, task=task)
    if quick:
        trained.epochs = trained.facts["quick_epochs"]
    tensors = ("captured",) if quick else kernels_command.TENSORS
    coded = kernels_command.settings(methods=methods, quick=quick, tensors=",".join(tensors))
    results.make_folder(out)
    if introduction:
        _print_wrapped(console, introduction)
        console.print()
    where = "over the loopback" if rates == [None] else f"over a network of {', '.join(map(_shown, rates))}"
    parts: list[tuple[str, Callable[[], BenchmarkRun]]] = [
        (f"Does a training step get faster, {where}?", lambda: step_command.run(steps, out / "step")),
        ("Does the model still learn?", lambda: train_command.run(trained, out / "train")),
        ("What does compressing cost and lose?", lambda: kernels_command.run(coded, out / "kernels")),
    ]
    finished: list[Results] = []
    for number, (question, part) in enumerate(parts, start=1):
        if number > 1:
            console.print()
        console.rule(f"[bold]{number}. {question}[/]", align="left")
        if number == 1 and note:
            _print_wrapped(console, note)
        running = part()
        running.name = name
        if running.results.rows:
            finished.append(running.results)
        if running.code:
            break
    report = running.report(finished, out)
    running.exit_if_failed()
    console.print()
    console.rule("[bold]In short[/]", align="left")
    for words in steps_verdict(finished):
        _print_wrapped(console, words)
        console.print()
    seconds = time.monotonic() - began
    console.print(f"The report, with pictures, is {report} ({seconds:.0f} s).", soft_wrap=True)


def steps_verdict(finished: list[Results]) -> list[str]:
    """Return the verdicts of the steps, one text per scenario."""
    return [
        f"With {scenario}: {words}" for run in finished for scenario, words in run.settings.get("verdict", {}).items()
    ]


def _bandwidths(text: str | None, quick: bool) -> tuple[list[float | None], str]:
    """Return the networks and a note. Without a choice of the user's it is the loopback where no link can be emulated,
    and the note says so."""
    if text is not None:
        return options.bandwidths(text), ""
    reason = possible()
    if reason:
        note = f"A slow network cannot be emulated here ({reason}), so the steps go over the loopback, the fastest one."
        return [None], note
    return [parse_rate(rate) for rate in (QUICK_BANDWIDTH if quick else BANDWIDTHS).split(",")], ""


def _shown(rate: float | None) -> str:
    return "loopback" if rate is None else show_rate(rate)


def _print_wrapped(console: Console, text: str) -> None:
    console.print(textwrap.fill(text, console.width), markup=False)
