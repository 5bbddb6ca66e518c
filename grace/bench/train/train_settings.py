"""Settings of ``grace bench train``."""

import dataclasses
import importlib.util
from typing import Any

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_ranks, unique_lists
from grace.bench.ranks.launchers import check_links
from grace.bench.workloads.task import OPTIMIZERS, in_optimizer
from grace.bench.workloads.tasks import facts, task_class
from grace.core.registry import make
from grace.errors import ConfigError, missing_extra

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
PACKAGES = {"torch": ("torch", "torch"), "numba": ("numba", "torch"), "sklearn": ("scikit-learn", "bench")}
"""Modules that the benchmark needs, and the package and the extra that bring each."""


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
    """Settings of the benchmark. Seeds are those of initial weights and of the data's order, the same for every method.

    Raises:
        ConfigError: a value cannot work.
        MissingExtraError: a package is not installed.
    """

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
    bandwidths: list[float | None] = option(
        [None],
        "Rates of emulated links, as in 1gbit,100mbit (Linux, root); none is the loopback.",
        "--bandwidth",
        parse=options.bandwidths,
        show_default="loopback",
    )
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
        for module, named in PACKAGES.items():
            if importlib.util.find_spec(module) is None:
                raise missing_extra(*named)
        self.facts = facts(self.task)
        self.optimizers = self.optimizers or [self.facts["optimizer"]]
        unique_lists(self, "methods", "seeds", "bandwidths", "optimizers")
        check_ranks(self.ranks, 1)
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
            if not rate > 0:
                raise ConfigError(f"the learning rate of {method} must be positive, not {rate}")
        check_links(self.ranks, self.bandwidths)

    def use_quick_epochs(self) -> None:
        """Train for as many epochs as show that methods learn, unless the user has set another number."""
        self.epochs = self.epochs or self.facts["quick_epochs"]

    def label(self, method: str, optimizer: str) -> str:
        """Return the name of runs that are under way: the method, and its optimizer if there are several."""
        return method if len(self.optimizers) == 1 else f"{method}, {optimizer}"

    def about(self) -> dict[str, Any]:
        """Return the settings and the task's facts, as they are recorded."""
        target = self.facts["target"] if self.target is None else self.target
        epochs = self.epochs or self.facts["epochs"]
        own = {"target": target, "epochs": epochs, "optimizer": ", ".join(self.optimizers)}
        return {**self.facts, **dataclasses.asdict(self), **own}
