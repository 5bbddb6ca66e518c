"""What ``grace bench plan`` is to run."""

import dataclasses
from typing import Any

from grace.bench.common import options
from grace.bench.link.emulation import Link
from grace.bench.step.settings import MODELS as KNOWN
from grace.communicators.choice import build_communicator
from grace.errors import ConfigError

MODELS = ("transformer", "resnet", "lstm", "ncf", "mlp")
LINKS = "loopback,10gbit,1gbit,100mbit"
METHODS = ("fp16", "block(bits=4)", "qsgd", "efsignsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
"""Each for all variables, beside plain sums."""
ROUNDS, QUICK_ROUNDS = 3, 2
Event = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """What to run.

    Args:
        models: names of :mod:`grace.bench.workloads.models`, or ``module:function``.
        bandwidths: bits per second of emulated links; None for loopback.
        ranks: numbers of processes on this machine.
        methods: compressor specs, each of which makes a plan.
        rounds: how often each plan has its turn.
        own: how many of the planner's other candidates are measured, the best ones.
        seconds: about how long each plan's steps are measured.

    Raises:
        ConfigError: a value cannot work.

    >>> Settings(models=["lstm"], bandwidths=[1e9], ranks=[2, 4]).scenarios
    [('lstm', 2, 1000000000.0), ('lstm', 4, 1000000000.0)]
    """

    models: list[str] = dataclasses.field(default_factory=lambda: list(MODELS))
    bandwidths: list[float | None] = dataclasses.field(default_factory=lambda: options.bandwidths(LINKS))
    ranks: list[int] = dataclasses.field(default_factory=lambda: [2, 4])
    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    rounds: int = ROUNDS
    own: int = 3
    seconds: float = 1.0

    def __post_init__(self) -> None:
        for key in ("models", "bandwidths", "ranks", "methods"):
            setattr(self, key, list(dict.fromkeys(getattr(self, key))))
            if not getattr(self, key) and key != "methods":
                raise ConfigError(f"nothing is to be measured: there are no {key}")
        for model in self.models:
            if model not in KNOWN and ":" not in model:
                raise ConfigError(f"unknown model {model!r}; known: {', '.join(KNOWN)}, or module:function")
        for method in self.methods:
            build_communicator(method, None, None)
        for ranks in self.ranks:
            if not 2 <= ranks <= 1000:
                raise ConfigError(f"--ranks must be between 2 and 1000, not {ranks}: one rank exchanges nothing")
            for rate in self.bandwidths:
                if rate is not None:
                    Link(ranks, rate)
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, not {self.rounds}")

    @property
    def scenarios(self) -> list[tuple[str, int, float | None]]:
        """Models, numbers of ranks and bandwidths; those that tell of one cluster beside each other."""
        return [(model, n, rate) for n in self.ranks for rate in self.bandwidths for model in self.models]

    def quick(self) -> "Settings":
        """The same with less time for everything."""
        return dataclasses.replace(self, rounds=min(self.rounds, QUICK_ROUNDS), own=1, seconds=0.3)
