"""``grace bench train``: what compression does to the quality of a model, and how soon it gets there."""

import dataclasses
import itertools
import math
import statistics
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from grace.bench.common import options
from grace.bench.common.ending import WorkerError
from grace.bench.common.events import Event
from grace.bench.common.options import option
from grace.bench.common.progress import ScenarioBars
from grace.bench.common.quality import better, shortfall, shown
from grace.bench.common.results import Row, Settings
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_ranks, unique_lists
from grace.bench.common.text import scenario, show_rate
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.launchers import check_links
from grace.bench.ranks.scenario import run_scenario
from grace.bench.workloads.task import OPTIMIZERS, in_optimizer
from grace.bench.workloads.tasks import facts, task_class
from grace.core.registry import make
from grace.errors import ConfigError, require

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
MEANS = (
    "quality", "sent_bytes_per_step", "bits_per_element", "codec_ms", "step_ms", "samples_per_s", "train_seconds",
)  # fmt: skip
"""Keys whose values are averaged over seeds."""


def learning_rates(texts: list[str]) -> dict[str, float]:
    """Parse learning rates of methods.

    >>> learning_rates(["topk=0.1", "qsgd(levels=7)=1e-3"])
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


@dataclasses.dataclass
class TrainSettings:
    """Settings of the benchmark. Seeds, the same for every method, are of initial weights and of the data's order."""

    task: str = option(
        "digits",
        "digits (accuracy), digits-cnn (a convolutional network's loss), charlm (a character LSTM's perplexity), "
        "chargpt (a character GPT's loss), recommender (two embedding tables and an MLP), or module:function, which "
        "returns a grace.bench.workloads.Task.",
    )
    methods: list[str] = option(
        list(METHODS),
        "Compressor specs, or strategies' builders as auto, separated by commas, or all compressors. Default: "
        f"{', '.join(METHODS)}.",
        parse=options.methods,
        show_default=False,
    )
    optimizers: list[str] = option(
        [],
        "sgd (with momentum), adamw, or both, as in adamw,sgd.",
        "--optimizer",
        parse=options.split,
        show_default="the task's",
    )
    size: int | None = option(
        None,
        "About how many parameters chargpt's model has, as in 500k.",
        parse=options.size,
        show_default="70k",
    )
    ranks: int = option(2, "Processes to train on.", "--ranks", "-n")
    bandwidths: list[float | None] = options.bandwidth_option()
    epochs: int | None = option(None, "Passes over the training data.", show_default="the task's")
    seeds: list[int] = option(
        [0, 1, 2],
        "How many runs of each method, or their seeds, as in 0,1,7; the table shows means.",
        parse=options.seeds,
        show_default="3, or 1 with --quick",
    )
    target: float | None = option(None, "The quality whose time is measured.", show_default="the task's")
    rates: dict[str, float] = option(
        {},
        "METHOD=RATE: a learning rate for one method; may be repeated.",
        "--lr",
        parse=learning_rates,
        repeated=True,
        metavar="METHOD=RATE",
    )

    def __post_init__(self) -> None:
        require("torch", "torch")
        require("numba", "torch")
        require("sklearn", "bench", "scikit-learn")
        self.facts = facts(self.task)
        self.optimizers = self.optimizers or [self.facts["optimizer"]]
        unique_lists(self, "methods", "seeds", "bandwidths", "optimizers")
        check_ranks(self.ranks)
        if self.ranks > self.facts["batch"]:
            raise ConfigError(
                f"--ranks {self.ranks}: a batch of {self.task} has {self.facts['batch']} samples to share"
            )
        check_at_least_1(self, "epochs")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ConfigError(f"seeds must be in [0, 2**32), not {self.seeds}")
        task_class(self.task, self.size)
        for optimizer in self.optimizers:
            if optimizer not in OPTIMIZERS:
                raise ConfigError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.rates and len(self.optimizers) > 1:
            raise ConfigError("a method's learning rate is for one optimizer: name one, and run the other one apart")
        for method in self.methods:
            if "strategy" in in_optimizer(method):
                make("builder", method)
            else:
                check_methods([method])
        for method, rate in self.rates.items():
            if method not in self.methods:
                raise ConfigError(f"a learning rate is given for {method!r}, which is not among the methods")
            if not 0 < rate < math.inf:
                raise ConfigError(f"the learning rate of {method} must be above 0 and finite, not {rate}")
        check_links(self.ranks, self.bandwidths)

    def name_of(self, method: str, optimizer: str) -> str:
        """Return the name of a method in messages: with the optimizer, if there are several."""
        return method if len(self.optimizers) == 1 else f"{method}, {optimizer}"

    def use_quick_epochs(self) -> None:
        """Train for as many epochs as show that methods learn, unless the user has set another number."""
        self.epochs = self.epochs or self.facts["quick_epochs"]

    def about(self) -> Settings:
        """Return the settings and the task's facts, as they are recorded."""
        target = self.facts["target"] if self.target is None else self.target
        epochs = self.epochs or self.facts["epochs"]
        own = {"target": target, "epochs": epochs, "optimizer": ", ".join(self.optimizers)}
        return {**self.facts, **dataclasses.asdict(self), **own}


@options.with_options(TrainSettings)
def command(
    given: options.Given,
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
    run(settings, folder).report_and_exit()


def run(settings: TrainSettings, out: Path | None) -> BenchmarkRun:
    """Train with every method and seed over each network, show and save; return the benchmark with its results and its
    exit code. Without a folder nothing is shown or saved."""
    running = BenchmarkRun("train", settings.about(), out)

    def measure() -> None:
        with ScenarioBars(running.console) as bars:
            for rate in settings.bandwidths:
                add = TrainRows(settings, running, bars, rate).add
                run_scenario(["-m", "grace.bench.train.train_rank"], settings, [], settings.ranks, rate, add)
        if not running.results.rows:
            raise WorkerError("; ".join(f"{name}: {why}" for name, why in running.results.settings["skipped"].items()))

    return running.measure(measure)


class TrainRows:
    """Rows of a network, added to a benchmark's results, saved, and told in a line, as runs of its ranks end."""

    def __init__(self, settings: TrainSettings, running: BenchmarkRun, bars: ScenarioBars, rate: float | None):
        self.settings, self.running, self.bars, self.rate = settings, running, bars, rate
        self.rows_before = list(running.results.rows)
        self.runs: list[Row] = []

    def add(self, event: Event) -> None:
        """Add an event of the ranks; see :mod:`grace.bench.train.train_rank`."""
        settings, results, rate = self.settings, self.running.results, self.rate
        self.bars.show(scenario(settings.ranks, rate), event)
        results.settings |= event.get("facts", {})
        if "run" not in event:
            return
        run = event["run"]
        self.runs.append(run)
        results.settings["parameters"] = run["parameters"]
        results.rows = [*self.rows_before, *summarize(self.runs, settings, rate)]
        self.running.save()
        name = settings.name_of(run["method"], run["optimizer"])
        where = "" if rate is None else f", {show_rate(rate)}"
        quality = f"{results.settings['metric']} {shown(run['quality'], results.settings)}"
        self.running.console.print(f"{name}, seed {run['seed']}{where}: {quality}", markup=False)


def summarize(runs: list[Row], settings: TrainSettings, rate: float | None = None) -> list[Row]:
    """Return a row for each method and optimizer with runs over this bandwidth: means, beside those of ``none``."""
    about = settings.about()
    rows = []
    for optimizer, method in itertools.product(settings.optimizers, settings.methods):
        own = [run for run in runs if (run["method"], run["optimizer"]) == (method, optimizer)]
        if own:
            qualities = [run["quality"] for run in own]
            row: Row = {"method": method, "optimizer": optimizer, "bandwidth": rate, "ranks": settings.ranks}
            row |= {"lr": own[0]["lr"], **{key: statistics.fmean(run[key] for run in own) for key in MEANS}}
            row |= {"quality_spread": (max(qualities) - min(qualities)) / 2, "shortfall": None}
            row |= _to_target(own, about["target"], better(about))
            row |= {"curve": np.mean([run["curve"] for run in own], axis=0).tolist(), "runs": own}
            rows.append(row)
    plains = {row["optimizer"]: row for row in rows if row["method"] == "none"}
    for row in rows:
        plain = plains.get(row["optimizer"])
        if plain is not None:
            row["shortfall"] = shortfall(about, row["quality"], plain["quality"], plain["curve"][0][-1])
    return rows


def _to_target(runs: list[Row], target: float | None, sign: int) -> Row:
    """Return the number of runs that reached the target, and the mean seconds until then, if all did.

    >>> run = {"curve": [[0.5, 10, 1.0, 0.8], [1, 20, 2.0, 0.9], [2, 40, 4.0, 0.7]]}
    >>> _to_target([run], 0.85, 1), _to_target([run], 0.95, 1)
    ({'reached': 1, 'seconds_to_target': 2.0}, {'reached': 0, 'seconds_to_target': None})
    """
    # point: epochs, bytes, seconds, quality
    seconds = []
    for run in runs if target is not None else []:
        good = [point for point in run["curve"] if sign * (point[-1] - target) >= 0]
        seconds += [point[2] for point in good[:1]]
    all_did = bool(runs) and len(seconds) == len(runs)
    return {"reached": len(seconds), "seconds_to_target": statistics.fmean(seconds) if all_did else None}
