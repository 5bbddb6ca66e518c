"""Settings of ``grace bench step``."""

import dataclasses
from functools import partial

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.results import Settings
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_ranks, unique_lists
from grace.bench.common.user_functions import load_function
from grace.bench.ranks.launchers import ENGINES, check_engine, check_links, has_horovod
from grace.errors import ConfigError
from grace.launch.command_lines import checked_strategy

METHODS = (
    "none", "fp16", "qsgd", "natural", "terngrad", "efsignsgd", "topk(ratio=0.01)", "dgc(ratio=0.01)",
    "powersgd(rank=4)", "topk(ratio=0.01) | qsgd(levels=7, bucket_size=64)",
)  # fmt: skip
QUICK_METHODS = ("none", "block(bits=4)", "topk(ratio=0.01)", "powersgd(rank=4)")
ON_DEVICE: options.Given = {
    "model": "gpt2",
    "methods": ["none", "fp16", "qsgd", "signsgd", "topk(ratio=0.01)", "powersgd(rank=4)"],
    "ranks": [8],
    "bandwidths": [10e9, 25e9],
}
"""Defaults on a GPU, where ranks are pretended and wires are simulated."""
ROUNDS, QUICK_ROUNDS = 8, 3
BASELINES = ("ddp", "horovod")
BOUND = "no communication"
"""Name of the contestant whose ranks train alone: no exchange can be faster."""
SHARDS_ALONE = "shard groups alone"
"""Name of the contestant, with ``--sharded``, whose replicas exchange nothing."""
MODELS = ("transformer", "resnet", "resnet50", "gpt2", "lstm", "ncf", "mlp")
"""Functions of :mod:`grace.bench.workloads.models`."""


def baseline_names(text: str) -> list[str]:
    """Parse names of baselines; ``none`` is no baseline."""
    return [] if text == "none" else options.split(text)


@dataclasses.dataclass
class StepSettings:
    """Settings of the benchmark. Each number of ranks over each network is a scenario.

    >>> StepSettings(methods=["topk"], bandwidths=[1e9]).scenarios
    [(2, 1000000000.0)]
    """

    model: str = option(
        "transformer",
        f"{', '.join(MODELS)}, or module:function, which returns (model, loss, samples), where loss(model) is the loss "
        "of a batch of so many samples, on the device of its choice.",
        show_default="transformer, on a GPU gpt2",
    )
    methods: list[str] = option(
        list(METHODS),
        "Compressor specs, separated by commas, or all.",
        parse=options.methods,
        show_default="ten, or four with --quick",
    )
    strategies: list[str] = option(
        [], "A strategy's file or builder to compare too; may be repeated.", "--strategy", repeated=True
    )
    engine: str = option("torch", "What moves Grace's payloads: torch, horovod or mpi.")
    ranks: list[int] = option(
        [2],
        "Processes to train on; several numbers as in 2,4 show the scaling.",
        "--ranks",
        "-n",
        parse=partial(options.integers, what="--ranks"),
        show_default="2, on a GPU 8 that are pretended",
    )
    bandwidths: list[float | None] = options.bandwidth_option("loopback, on a GPU 10gbit,25gbit")
    baselines: list[str] = option(
        list(BASELINES),
        "Of ddp and horovod, what to compare with where it is installed; or none.",
        parse=baseline_names,
        show_default=",".join(BASELINES),
    )
    rounds: int = option(ROUNDS, "Blocks of steps of each row.", show_default="8, or 3 with --quick")
    ddp_hook: bool = option(False, "Measure the methods as DDP's hooks too.", "--ddp-hook")
    bucket_bytes: int | None = option(
        None, "Bytes on the wire that a collective of Grace's carries.", show_default="Grace's choice"
    )
    sharded: int = option(0, "Ranks of a shard group (FSDP2), one node of emulated links.")
    reduce_scatter: str | None = option(
        None, "A compressor of shard groups' reduce-scatters, to measure the methods with too."
    )

    def __post_init__(self) -> None:
        check_engine(self.engine)
        unique_lists(self, "ranks", "bandwidths")
        unique_lists(self, "methods", "strategies", "baselines", allow_empty=True)
        check_methods(self.methods)
        for given in self.strategies:
            checked_strategy(given)
        for name in self.baselines:
            if name not in BASELINES:
                raise ConfigError(f"unknown baseline {name!r}; known: {', '.join(BASELINES)}, or none")
        if not (self.methods or self.strategies or self.baselines):
            raise ConfigError("nothing is to be compared: --methods, --strategy and --baselines are empty")
        for ranks in self.ranks:
            check_ranks(ranks)
            check_links(self.nodes(ranks), self.bandwidths)
        self._check_sharded()
        if self.ddp_hook and self.engine != "torch":
            raise ConfigError("--ddp-hook is for --engine torch: DistributedDataParallel has no other engine")
        if self.model not in MODELS:
            load_function(self.model, "model", MODELS)
        check_at_least_1(self, "bucket_bytes", "rounds")

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
            check_methods([self.reduce_scatter])
            if self.sharded == 1:
                raise ConfigError("--reduce-scatter needs shard groups of 2 ranks or more: --sharded 2")

    def nodes(self, ranks: int) -> int:
        """Return the number of machines that links join: one for each rank, or each shard group."""
        return ranks // max(1, self.sharded) or 1

    @property
    def scenarios(self) -> list[tuple[int, float | None]]:
        """Numbers of ranks, and bandwidths, of all scenarios."""
        return [(ranks, rate) for ranks in self.ranks for rate in self.bandwidths]

    @property
    def engines(self) -> list[str]:
        """Engines whose ranks are started for a scenario, one after the other: that of the methods first."""
        if self.sharded:
            return [self.engine]
        wanted = {"torch": "ddp" in self.baselines, "horovod": "horovod" in self.baselines and has_horovod()}
        return [self.engine, *(name for name in ENGINES if name != self.engine and wanted.get(name))]

    def about(self) -> Settings:
        """Return the settings as they are recorded; further facts come from the ranks."""
        return {**dataclasses.asdict(self), "verdict": {}}
