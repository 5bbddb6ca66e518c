"""``grace demo`` and ``grace bench``."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench import training
from grace.bench.compare_command import compare
from grace.bench.launch import WorkerError
from grace.bench.link_command import link
from grace.errors import ConfigError

DEFAULT_METHODS = ", ".join(training.METHODS)

app = typer.Typer(no_args_is_help=True, help="Measure compressors.")
app.command()(link)
app.command()(compare)

Methods = Annotated[
    str,
    typer.Option(
        help=f"Compressor specs, separated by commas, or all. Default: {DEFAULT_METHODS}.", show_default=False
    ),
]
Ranks = Annotated[int, typer.Option("--ranks", "-n", help="Processes to train on.")]
Seeds = Annotated[str, typer.Option("--seeds", "--seed", help="One run per seed, as in 0,1,2; the table shows means.")]
Framework = Annotated[str, typer.Option(help="torch or tensorflow.")]


def demo(
    methods: Methods = DEFAULT_METHODS,
    framework: Framework = "torch",
    ranks: Ranks = 2,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training images.", show_default="20, or 2 with --quick")
    ] = None,
    seeds: Seeds = "0",
    out: Annotated[Path, typer.Option(help="Folder for accuracy.png and results.json.")] = Path("out/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Two epochs only, to see that everything works.")] = False,
) -> None:
    """Train a small network with several methods, and compare bytes, time and accuracy.

    The network learns scikit-learn's handwritten digits on real ranks, which
    torchrun (TensorFlow's: horovodrun or mpirun) starts on this machine. Every
    method starts from the same weights, sees the same data in the same order,
    and uses the same learning rate.
    """
    if epochs is None and quick:
        epochs = training.QUICK_EPOCHS
    settings = training.Settings(_methods(methods), ranks, epochs, _integers(seeds), framework=framework)
    _train("grace demo", settings, out)


@app.command()
def train(
    task: Annotated[str, typer.Option(help="digits (accuracy) or charlm (a character LSTM's perplexity).")] = "digits",
    methods: Methods = DEFAULT_METHODS,
    framework: Framework = "torch",
    ranks: Ranks = 2,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the training data.", show_default="the task's")
    ] = None,
    seeds: Seeds = "0,1,2",
    lr: Annotated[
        list[str] | None,
        typer.Option(
            "--lr", help="METHOD=RATE: a learning rate for one method; may be repeated.", metavar="METHOD=RATE"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the picture, results.json and runs.jsonl.", show_default="out/train-TASK"),
    ] = None,
) -> None:
    """Train a task with several methods and seeds: quality against bytes and time.

    Every method starts from the same weights and sees the same data in the same
    order. Methods whose aggregate is not on the scale of a gradient (the votes
    of signsgd and signum) need a learning rate of their own: give it with --lr.
    Each run is kept in runs.jsonl when it ends, Ctrl-C included.
    """
    settings = training.Settings(_methods(methods), ranks, epochs, _integers(seeds), task, _rates(lr or []), framework)
    _train("grace bench train", settings, out or Path(f"out/train-{task}"))


def _train(command: str, settings: training.Settings, out: Path) -> None:
    from grace.bench.table import advice, results_table

    began = time.monotonic()
    console = Console(highlight=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error}") from error
    console.print(f"Starting {settings.ranks} {'rank' if settings.ranks == 1 else 'ranks'} ...\n")
    runs_file = out / "runs.jsonl"
    try:
        results = training.run(settings, runs_file)
    except WorkerError as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print(f"{command}: interrupted; the ranks are ended{_kept(runs_file)}", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print(results_table(results, settings))
    console.print(advice(results, settings))
    files = training.save(out, results, settings, shlex.join(["grace", *sys.argv[1:]]))
    console.print(f"\nWrote {' and '.join(map(str, files))} after {time.monotonic() - began:.0f} s.")


def _kept(runs_file: Path) -> str:
    count = len(training.load_runs(runs_file)) if runs_file.exists() else 0
    return f"; {count} finished {'run is' if count == 1 else 'runs are'} in {runs_file}" if count else ""


def _methods(text: str) -> list[str]:
    return training.every_method() if text.strip() == "all" else split(text)


def _rates(texts: list[str]) -> dict[str, float]:
    rates = {}
    for text in texts:
        method, _, rate = text.rpartition("=")
        try:
            rates[method.strip()] = float(rate)
        except ValueError:
            method = ""
        if not method:
            raise ConfigError(f"a learning rate is given as METHOD=RATE, as in signsgd=0.001, not {text!r}")
    return rates


def split(text: str) -> list[str]:
    """Specs separated by commas; those inside parentheses belong to a spec.

    >>> split("none, qsgd(levels=7, norm=max),topk")
    ['none', 'qsgd(levels=7, norm=max)', 'topk']
    """
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"seeds are whole numbers separated by commas, as in 0,1,2, not {text!r}") from None
