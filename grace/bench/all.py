"""``grace bench all`` and ``grace demo``: the gain of compression, the quality of models, and the costs."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common import options, results
from grace.bench.common.options import option
from grace.bench.common.results import Results
from grace.bench.kernels import kernels_command
from grace.bench.lifecycle import BenchmarkRun, write_report_of
from grace.bench.link.emulation import possible
from grace.bench.step import step_command, step_settings
from grace.bench.train import train_command
from grace.core.quantities import parse_rate
from grace.errors import require

BANDWIDTHS, QUICK_BANDWIDTH = "10gbit,1gbit,100mbit", "1gbit"


@dataclasses.dataclass
class AllSettings:
    """Settings of the three benchmarks; None is the default of each."""

    model: str = option("transformer", "What steps are timed of; see grace bench step.")
    task: str = option("digits-cnn", "What is trained; see grace bench train.")
    methods: list[str] | None = option(
        None,
        "Compressor specs, separated by commas, or all.",
        parse=options.methods,
        show_default="those of grace bench step, and more of kernels; or four with --quick",
    )
    ranks: int = option(2, "Processes to train on.", "--ranks", "-n")
    bandwidths: list[float | None] | None = option(
        None,
        "Rates of emulated links for the steps; none is the loopback.",
        "--bandwidth",
        parse=options.bandwidths,
        show_default=f"{BANDWIDTHS}, or {QUICK_BANDWIDTH} with --quick",
    )
    seeds: list[int] | None = option(
        None, "Training runs of each method.", parse=options.seeds, show_default="3, or 1 with --quick"
    )


@options.with_options(AllSettings)
def command(
    given: options.Given,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for report.html and a folder of results per part.")
    ] = Path("out/bench"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer methods and rounds: under two minutes.")] = False,
) -> None:
    """Run the three benchmarks, and put them into one report.

    train: whether the model still learns. step: whether a training step gets
    faster, over networks of given bandwidths; its verdict recommends no method
    that learns clearly less. kernels: what encoding and decoding cost and lose,
    without a network. Each part can be run by itself, with more options: grace
    bench train, step, kernels.
    """
    _run("grace bench all", "", AllSettings(**given), out, quick)


def demo(
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Processes to train on.")] = 2,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for report.html and the results.")] = Path(
        "out/demo"
    ),
) -> None:
    """Show in two to three minutes what gradient compression costs, and when it pays.

    It is grace bench all --quick: a small network learns handwritten digits with
    each method; two processes train a small transformer over an emulated slow
    network, with and without Grace; and the methods are timed by themselves.
    """
    introduction = (
        "Processes that train one model together exchange their gradients at every step; over a slow network they "
        "wait for that. Grace compresses the gradients. Three small experiments on this machine show when that pays "
        "and what it costs; they take two to three minutes."
    )
    _run("grace demo", introduction, AllSettings(ranks=ranks), out, quick=True)


def _run(name: str, introduction: str, settings: AllSettings, out: Path, quick: bool) -> None:
    """Run the parts, until one fails, and write their report."""
    began, console = time.monotonic(), Console(highlight=False)
    require("matplotlib", "bench")  # for the report at the end
    rates, note = _bandwidths(settings.bandwidths, quick)
    methods = settings.methods or list(step_settings.QUICK_METHODS if quick else step_settings.METHODS)
    steps = step_settings.StepSettings(
        settings.model,
        methods,
        ranks=[settings.ranks],
        bandwidths=rates,
        rounds=step_settings.QUICK_ROUNDS if quick else step_settings.ROUNDS,
        baselines=["ddp"] if quick else list(step_settings.BASELINES),
    )
    seeds = settings.seeds or ([0] if quick else [0, 1, 2])
    trained = train_command.TrainSettings(settings.task, methods, ranks=settings.ranks, seeds=seeds)
    if quick:
        trained.use_quick_epochs()
    coded = kernels_command.KernelsSettings(
        methods=methods if quick or settings.methods else None, tensors=["captured"] if quick else None, quick=quick
    ).about()
    results.make_folder(out)
    if introduction:
        console.print(f"{introduction}\n", markup=False)
    finished: list[Results] = []
    parts: dict[str, Callable[[], BenchmarkRun]] = {
        "Does the model still learn?": lambda: train_command.run(trained, out / "train"),
        f"Does a training step get faster?{note}": lambda: step_command.run(
            steps, out / "step", shortfalls=_shortfalls(finished[0])
        ),
        "What does compressing cost and lose?": lambda: kernels_command.run(coded, out / "kernels"),
    }
    for number, (question, part) in enumerate(parts.items(), start=1):
        console.print(f"\n{number}. {question}\n", style="bold", markup=False)
        running = part()
        running.name = name
        if running.results.rows:
            finished.append(running.results)
        if running.code:  # the report has the parts that are finished
            break
    report = write_report_of(out, finished)
    running.exit_if_failed()
    console.print("\nIn short", style="bold")
    for run in finished:
        for scenario, words in run.settings.get("verdict", {}).items():
            console.print(f"With {scenario}: {words}\n", markup=False)
    seconds = time.monotonic() - began
    console.print(f"The report, with pictures, is {report} ({seconds:.0f} s).", soft_wrap=True)


def _shortfalls(trained: Results) -> dict[str, float | None] | None:
    """Return the largest shortfall of each method, over optimizers; None if there is no ``none`` to compare with."""
    if all(row["method"] != "none" for row in trained.rows):
        return None
    found: dict[str, float | None] = {}
    for row in trained.rows:
        known = [each for each in (found.get(row["method"]), row["shortfall"]) if each is not None]
        found[row["method"]] = max(known, default=None)
    return found


def _bandwidths(given: list[float | None] | None, quick: bool) -> tuple[list[float | None], str]:
    """Return the networks, and a note on the loopback, which is the default where no link can be emulated."""
    if given is not None:
        return given, ""
    reason = possible()
    if reason:
        return [None], f" (over the loopback, the fastest network; a slow one cannot be emulated here: {reason})"
    return [parse_rate(rate) for rate in (QUICK_BANDWIDTH if quick else BANDWIDTHS).split(",")], ""
