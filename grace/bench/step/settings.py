"""Settings of ``grace bench step``."""

import dataclasses
from typing import Any

from grace.bench.common.user_functions import load_function
from grace.bench.link.emulation import Link
from grace.bench.ranks.launchers import ENGINES, check_engine, has_horovod
from grace.communicators.choice import build_communicator
from grace.errors import ConfigError
from grace.launch.command_lines import checked_strategy

METHODS = (
    "none", "fp16", "qsgd", "natural", "terngrad", "efsignsgd", "topk(ratio=0.01)", "dgc(ratio=0.01)",
    "powersgd(rank=4)", "topk(ratio=0.01) | qsgd(levels=7, bucket_size=64)",
)  # fmt: skip
QUICK_METHODS = ("none", "qsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
DEVICE_METHODS = ("none", "fp16", "qsgd", "signsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
DEVICE_RANKS, DEVICE_LINKS = "8", "10gbit,25gbit"
"""Pretended ranks and simulated wires on a GPU."""
ROUNDS, QUICK_ROUNDS = 8, 3
BASELINES = ("ddp", "horovod")
BOUND = "no communication"
"""Name of the contestant whose ranks train alone: no exchange can be faster."""
SHARDS_ALONE = "shard groups alone"
"""Name of the contestant, with ``--sharded``, whose replicas exchange nothing."""
MODELS = ("transformer", "resnet", "resnet50", "gpt2", "lstm", "ncf", "mlp")
"""Functions of :mod:`grace.bench.workloads.models`."""
Event = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """Settings of the benchmark.

    Args:
        model: a name of :mod:`grace.bench.workloads.models`, or ``module:function``.
        methods: compressor specs; memory and communicator are each method's defaults.
        strategies: files' paths, or builders' specs.
        engine: the engine that moves Grace's payloads: "torch", "horovod" or "mpi".
        baselines: "ddp" and "horovod", or one of them; an engine that is not installed is left out.
        ranks: numbers of processes on this machine, one scenario each.
        bandwidths: bits per second of emulated links, one scenario each; None for loopback.
        rounds: blocks of steps per row; the rows take turns.
        ddp_hook: True to measure the methods as hooks of DistributedDataParallel too.
        bucket_bytes: bytes on the wire that a collective of Grace's carries; Grace's own choice if left out.
        sharded: ranks of a shard group, which are one node of emulated links; 0 if every rank has the whole model.
        reduce_scatter: compressor of reduce-scatters within shard groups, which the methods are measured with too.

    Raises:
        ConfigError: a value cannot work.
        MissingExtraError: the engine is not installed.

    >>> Settings(methods=["topk"], bandwidths=[1e9]).scenarios
    [(2, 1000000000.0)]
    >>> Settings(rounds=0)
    Traceback (most recent call last):
    grace.errors.ConfigError: --rounds must be at least 1, not 0
    """

    model: str = "transformer"
    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    strategies: list[str] = dataclasses.field(default_factory=list)
    engine: str = "torch"
    baselines: list[str] = dataclasses.field(default_factory=lambda: list(BASELINES))
    ranks: list[int] = dataclasses.field(default_factory=lambda: [2])
    bandwidths: list[float | None] = dataclasses.field(default_factory=lambda: [None])
    rounds: int = ROUNDS
    ddp_hook: bool = False
    bucket_bytes: int | None = None
    sharded: int = 0
    reduce_scatter: str | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        for key in ("methods", "strategies", "baselines", "ranks", "bandwidths"):
            setattr(self, key, list(dict.fromkeys(getattr(self, key))))
        for method in self.methods:
            build_communicator(method, None, None)
        for given in self.strategies:
            checked_strategy(given)
        for name in self.baselines:
            if name not in BASELINES:
                raise ConfigError(f"unknown baseline {name!r}; known: {', '.join(BASELINES)}, or none")
        if not (self.methods or self.strategies or self.baselines):
            raise ConfigError("nothing is to be compared: --methods, --strategy and --baselines are empty")
        for ranks in self.ranks:
            if not 1 <= ranks <= 1000:
                raise ConfigError(f"--ranks must be between 1 and 1000, not {ranks}")
            for rate in self.bandwidths:
                if rate is not None:
                    Link(self.nodes(ranks), rate)
        self._check_sharded()
        if self.ddp_hook and self.engine != "torch":
            raise ConfigError("--ddp-hook is for --engine torch: DistributedDataParallel has no other engine")
        if self.model not in MODELS:
            load_function(self.model, "model", MODELS)
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ConfigError(f"--bucket-bytes must be at least 1, not {self.bucket_bytes}")
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, not {self.rounds}")

    def _check_sharded(self) -> None:
        if not self.sharded:
            if self.reduce_scatter is not None:
                raise ConfigError("--reduce-scatter is for --sharded: nothing is scattered where models are whole")
            return
        for ranks in self.ranks:
            if self.sharded < 1 or ranks % self.sharded or ranks == self.sharded:
                raise ConfigError(
                    f"--sharded {self.sharded} must divide the {ranks} ranks into two replicas or more, as in "
                    "--ranks 4 --sharded 2"
                )
        if self.engine != "torch":
            raise ConfigError("--sharded is for --engine torch: FSDP2 has no other engine")
        if self.ddp_hook or self.bucket_bytes is not None:
            named = "--ddp-hook" if self.ddp_hook else "--bucket-bytes"
            raise ConfigError(f"{named} is not for --sharded: FSDP2's modules are exchanged one after the other")
        if self.reduce_scatter is not None:
            build_communicator(self.reduce_scatter, None, None)
            if self.sharded == 1:
                raise ConfigError("--reduce-scatter needs shard groups of 2 ranks or more: --sharded 2")

    def nodes(self, ranks: int) -> int:
        """Return the number of machines that emulated links join: one for each rank, or each shard group."""
        return ranks // max(1, self.sharded) or 1

    @property
    def scenarios(self) -> list[tuple[int, float | None]]:
        """Numbers of ranks, and bandwidths, of all scenarios."""
        return [(ranks, rate) for ranks in self.ranks for rate in self.bandwidths]

    @property
    def groups(self) -> list[str]:
        """Engines whose ranks are started for a scenario, one after the other: that of the methods first."""
        if self.sharded:
            return [self.engine]
        wanted = {"torch": "ddp" in self.baselines, "horovod": "horovod" in self.baselines and has_horovod("torch")}
        return [self.engine, *(name for name in ENGINES if name != self.engine and wanted.get(name))]


def about(settings: Settings) -> dict[str, Any]:
    """Return the settings as they are recorded; further facts come from the ranks."""
    return {**dataclasses.asdict(settings), "verdict": {}}
