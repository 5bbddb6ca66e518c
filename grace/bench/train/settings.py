"""What ``grace bench train`` is to run."""

import dataclasses
from typing import Any

from grace.bench.link.emulation import Link
from grace.bench.workloads.task import FRAMEWORKS, OPTIMIZERS, check_framework, facts, in_optimizer, task_class
from grace.communicators.choice import build_communicator
from grace.core.registry import make
from grace.errors import ConfigError

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
EXTRAS = {name: {name: name, "numba": name, "sklearn": "bench"} for name in FRAMEWORKS}
"""The packages that a benchmark of a framework needs, and the extra that installs each."""
Event = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """What to run.

    Args:
        methods: compressor specs, with their defaults of memory and communicator; or strategies' builders, as "auto".
        ranks: processes on this machine.
        epochs: passes over the training data; the task's own number if left out.
        seeds: one training run each, of initial weights and data order; the same for every method.
        task: one of ``TASKS``, or "module:function", whose function returns a :class:`~grace.bench.workloads.Task`.
        rates: learning rates of methods that need another than the task's.
        framework: "torch" or "tensorflow".
        bandwidths: bits per second of emulated links, one after the other; None for loopback.
        target: the quality whose time is measured; the task's own if left out.
        optimizers: "sgd" (with momentum), "adamw"; the task's own if left out. Every method is trained with each.
        size: about how many parameters the task's model has, if it can be chosen; the task's own number if left out.

    Raises:
        ConfigError: a value cannot work.

    >>> Settings(methods=["topq"])
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown compressor 'topq' (did you mean 'topk'?); known: ...
    """

    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    ranks: int = 2
    epochs: int | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    task: str = "digits"
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    framework: str = "torch"
    bandwidths: list[float | None] = dataclasses.field(default_factory=lambda: [None])
    target: float | None = None
    optimizers: list[str] = dataclasses.field(default_factory=list)
    size: int | None = None

    def __post_init__(self) -> None:
        self.facts = facts(self.task)
        self.optimizers = self.optimizers or [self.facts["optimizer"]]
        for key in ("methods", "seeds", "bandwidths", "optimizers"):
            value = list(dict.fromkeys(getattr(self, key)))
            if not value:
                raise ConfigError(f"{key}: at least one is needed")
            setattr(self, key, value)
        for key in ("ranks", "epochs"):
            if (getattr(self, key) or 1) < 1 or getattr(self, key) == 0:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ConfigError(f"seeds must be in [0, 2**32), not {self.seeds}")
        check_framework(self.framework)
        task_class(self.task, size=self.size)  # without the framework, which only ranks import
        for optimizer in self.optimizers:
            if optimizer not in OPTIMIZERS:
                raise ConfigError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.rates and len(self.optimizers) > 1:
            raise ConfigError("a method's learning rate is for one optimizer: name one, and run the other one apart")
        for method in self.methods:
            if "strategy" in in_optimizer(method):
                make("builder", method)
            else:
                build_communicator(method, None, None)
        for method, rate in self.rates.items():
            if method not in self.methods:
                raise ConfigError(f"a learning rate is given for {method!r}, which is not among the methods")
            if not rate > 0:
                raise ConfigError(f"the learning rate of {method} must be positive, not {rate}")
        for bandwidth in self.bandwidths:
            if bandwidth is not None:
                Link(self.ranks, bandwidth)

    def label(self, method: str, optimizer: str) -> str:
        """Return what a run is called while it is under way: its method, and its optimizer if there are several."""
        return method if len(self.optimizers) == 1 else f"{method}, {optimizer}"

    def about(self) -> dict[str, Any]:
        """The settings and the task's facts, as they are recorded."""
        target = self.facts["target"] if self.target is None else self.target
        epochs = self.epochs or self.facts["epochs"]
        return {
            **self.facts,
            **dataclasses.asdict(self),
            "target": target,
            "epochs": epochs,
            "optimizer": ", ".join(self.optimizers),
        }
