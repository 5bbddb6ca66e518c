"""Settings of ``grace bench pipeline``."""

import dataclasses
from typing import Any

from grace.bench.link.emulation import Link
from grace.communicators.choice import build_communicator
from grace.errors import ConfigError
from grace.pipeline.planning.schedules import SCHEDULES

KNOWN = ("vgg11", "resnet18", "gpt", "encoder_decoder", "unet", "mlp")
ROUNDS, QUICK_ROUNDS = 3, 2
CHOSEN = "planned"
"""Name of the cut that the search finds."""
Event = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """Settings of the benchmark.

    Args:
        models: names of :mod:`grace.bench.workloads.pipelines`, or ``module:function``.
        bandwidths: bits per second of emulated links; None for loopback.
        compressors: compressors of gradients between replicas; each makes a scenario.
        ranks: number of processes on this machine.
        stages: number of stages; for 2 every cut at a block's end is measured; None compares the ways to share out
            the ranks.
        microbatches: number of microbatches of a batch.
        schedule: one of :data:`grace.pipeline.planning.schedules.SCHEDULES`.
        blocks: number of blocks that stages are made of.
        rounds: number of turns of each cut.
        seconds: approximate seconds in which each cut's steps are measured.

    Raises:
        ConfigError: a value cannot work.

    >>> Settings(models=["mlp"], bandwidths=[None, 1e9]).scenarios
    [('mlp', None, 'none'), ('mlp', 1000000000.0, 'none')]
    """

    models: list[str] = dataclasses.field(default_factory=lambda: list(KNOWN))
    bandwidths: list[float | None] = dataclasses.field(default_factory=lambda: [None])
    compressors: list[str] = dataclasses.field(default_factory=lambda: ["none"])
    ranks: int = 2
    stages: int | None = 2
    microbatches: int = 4
    schedule: str = "1f1b"
    blocks: int = 16
    rounds: int = ROUNDS
    seconds: float = 2.0

    def __post_init__(self) -> None:
        for key in ("models", "bandwidths", "compressors"):
            setattr(self, key, list(dict.fromkeys(getattr(self, key))))
            if not getattr(self, key):
                raise ConfigError(f"nothing is to be measured: there are no {key}")
        for model in self.models:
            if model not in KNOWN and ":" not in model:
                raise ConfigError(f"unknown model {model!r}; known: {', '.join(KNOWN)}, or module:function")
        for compressor in self.compressors:
            build_communicator(compressor, None, None)
        if not 2 <= self.ranks <= 1000:
            raise ConfigError(f"--ranks must be between 2 and 1000, not {self.ranks}: one rank has the whole model")
        if self.stages is not None and (self.stages < 1 or self.ranks % self.stages):
            raise ConfigError(f"--stages must divide the {self.ranks} ranks, and {self.stages} does not")
        for rate in self.bandwidths:
            if rate is not None:
                Link(self.ranks, rate)
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"--schedule must be gpipe or 1f1b, not {self.schedule!r}")
        for name in ("microbatches", "blocks", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")

    @property
    def scenarios(self) -> list[tuple[str, float | None, str]]:
        """Models, bandwidths and compressors of all scenarios."""
        return [(m, rate, c) for m in self.models for rate in self.bandwidths for c in self.compressors]

    def quick(self) -> "Settings":
        """Return settings with less time for everything."""
        return dataclasses.replace(self, rounds=min(self.rounds, QUICK_ROUNDS), blocks=min(self.blocks, 4), seconds=0.3)
