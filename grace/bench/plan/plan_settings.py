"""Settings of ``grace bench plan``."""

import dataclasses
import itertools
from functools import partial
from typing import Any

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_models, check_ranks, unique_lists
from grace.bench.ranks.launchers import check_links
from grace.bench.step.step_settings import MODELS as KNOWN

MODELS = ("transformer", "resnet", "lstm", "ncf", "mlp")
LINKS = "loopback,10gbit,1gbit,100mbit"
METHODS = ("fp16", "block(bits=4)", "qsgd", "efsignsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
"""Methods that are measured for all variables, beside plain sums."""
QUICK = {"rounds": 2, "own": 1, "seconds": 0.3}
"""Settings with ``--quick``."""


@dataclasses.dataclass
class PlanSettings:
    """Settings of the benchmark. ``own`` is the number of the planner's other candidates that are measured, the best
    ones; ``seconds`` is about how long each plan's steps are measured.

    Raises:
        ConfigError: a value cannot work.

    >>> PlanSettings(models=["lstm"], bandwidths=[1e9], ranks=[2, 4]).scenarios[1]
    {'model': 'lstm', 'ranks': 4, 'bandwidth': 1000000000.0}
    """

    models: list[str] = option(
        list(MODELS),
        "As grace bench step knows them, or module:function; separated by commas.",
        parse=options.split,
        text=",".join(MODELS),
    )
    bandwidths: list[float | None] = option(
        options.bandwidths(LINKS),
        "Rates of emulated links (Linux, root), and loopback.",
        "--links",
        parse=options.bandwidths,
        text=LINKS,
    )
    ranks: list[int] = option(
        [2, 4], "Numbers of processes.", "--ranks", "-n", parse=partial(options.integers, what="--ranks"), text="2,4"
    )
    methods: list[str] = option(
        list(METHODS),
        "Compressors, each of which makes a plan.",
        parse=options.methods,
        show_default=f"{len(METHODS)} usual ones",
    )
    rounds: int = option(3, "How often each plan has its turn.", show_default=f"3, quick {QUICK['rounds']}")
    own: int = 3
    seconds: float = 1.0

    def __post_init__(self) -> None:
        unique_lists(self, "models", "bandwidths", "ranks")
        unique_lists(self, "methods", allow_empty=True)
        check_models(self.models, KNOWN)
        check_methods(self.methods)
        for ranks in self.ranks:
            check_ranks(ranks, 2, "one rank exchanges nothing")
            check_links(ranks, self.bandwidths)
        check_at_least_1(self, "rounds")

    @property
    def scenarios(self) -> list[dict[str, Any]]:
        """Model, number of ranks and bandwidth of each scenario; those of one cluster stand together."""
        each = itertools.product(self.ranks, self.bandwidths, self.models)
        return [{"model": model, "ranks": ranks, "bandwidth": rate} for ranks, rate, model in each]
