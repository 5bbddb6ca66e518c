"""``grace bench plan``: the order of predicted steps, and the regret of what ``auto`` chooses."""

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_models, check_ranks, unique_lists
from grace.bench.ranks.launchers import check_links
from grace.bench.ranks.scenario import Scenario
from grace.bench.ranks.sweep import Resume, SweepSettings, run_sweep
from grace.bench.report.plan_table import verdict
from grace.bench.step.step_settings import MODELS as KNOWN

MODELS = ("transformer", "resnet", "lstm", "ncf", "mlp")
LINKS = "loopback,10gbit,1gbit,100mbit"
METHODS = ("fp16", "block(bits=4)", "qsgd", "efsignsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
"""Methods that are measured for all variables, beside plain sums."""
QUICK = {"rounds": 2, "own": 1, "seconds": 0.3}
"""Settings with ``--quick``."""


@dataclasses.dataclass
class PlanSettings(SweepSettings):
    """Settings of the benchmark. ``own`` is the number of the planner's other candidates that are measured, the best
    ones.

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
    bandwidths: list[float | None] = options.bandwidth_option(LINKS)
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
    seconds: float = option(
        1.0, "About how long each plan's steps are measured.", show_default=f"1, quick {QUICK['seconds']}", min=0
    )
    own: int = 3

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
    def scenarios(self) -> Iterable[Scenario]:
        """Model, number of ranks and bandwidth of each scenario; those of one cluster stand together."""
        each = itertools.product(self.ranks, self.bandwidths, self.models)
        return [{"model": model, "ranks": ranks, "bandwidth": rate} for ranks, rate, model in each]


@options.with_options(PlanSettings)
def command(
    given: options.Given,
    out: options.Folder = Path("out/plan"),
    resume: Resume = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for everything.")] = False,
) -> None:
    """Measure whether auto chooses well, beside other plans.

    In each scenario (a model, a number of ranks, a link) the ranks train with
    strategy="auto" until it has chosen. Then its choice, its other candidates,
    plain sums and one method for all variables are measured in turns. The
    tables have how many pairs of plans were predicted in the right order, how
    much longer the chosen plan's step is than that of the best one within the
    bounds (regret), and after how many steps it was chosen. Results are saved
    after each scenario, Ctrl-C included; with --resume a run goes on.
    """
    settings = PlanSettings(**{**(QUICK if quick else {}), **given})
    run_sweep("plan", settings, out, resume, verdict).report_and_exit()
