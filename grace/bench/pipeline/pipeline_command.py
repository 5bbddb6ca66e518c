"""``grace bench pipeline``: a comparison of the planned cut with others, and of predicted with measured steps."""

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated

import typer

from grace.bench.common import options
from grace.bench.common.options import option
from grace.bench.common.settings_checks import check_at_least_1, check_methods, check_models, check_ranks, unique_lists
from grace.bench.ranks.launchers import check_links
from grace.bench.ranks.scenario import Scenario
from grace.bench.ranks.sweep import Resume, SweepSettings, run_sweep
from grace.bench.report.pipeline_table import verdict
from grace.errors import ConfigError
from grace.pipeline.planning.schedules import SCHEDULES

KNOWN = ("vgg11", "resnet18", "gpt", "encoder_decoder", "unet", "mlp")
QUICK = {"rounds": 2, "blocks": 4, "seconds": 0.3}
"""Settings with ``--quick``."""


def stage_count(text: str) -> int | None:
    """Parse a number of stages, or None for ``any``."""
    if text == "any":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--stages is a whole number, or any, not {text!r}") from None


@dataclasses.dataclass
class PipelineSettings(SweepSettings):
    """Settings of the benchmark. ``seconds`` is about how long each cut's steps are measured.

    Raises:
        ConfigError: a value cannot work.

    >>> PipelineSettings(models=["mlp"], bandwidths=[None, 1e9]).scenarios[1]
    {'model': 'mlp', 'bandwidth': 1000000000.0, 'compressor': 'none', 'ranks': 2}
    """

    models: list[str] = option(
        list(KNOWN),
        f"{', '.join(KNOWN)}, or module:function; separated by commas.",
        parse=options.split,
        show_default="all",
    )
    ranks: int = option(2, "Processes.", "--ranks", "-n")
    stages: int | None = option(
        2,
        "How many, all with as many replicas; or any: then shares of the ranks are compared.",
        parse=stage_count,
        text="2",
    )
    bandwidths: list[float | None] = options.bandwidth_option("loopback")
    compressors: list[str] = option(
        ["none"],
        "Compressors of gradients between replicas, each a scenario.",
        "--methods",
        parse=options.methods,
        text="none",
    )
    microbatches: int = option(4, "Into how many a batch is cut.")
    schedule: str = option("1f1b", "gpipe or 1f1b.")
    blocks: int = option(16, "From how many blocks stages are made.", show_default=f"16, quick {QUICK['blocks']}")
    rounds: int = option(3, "How often each cut has its turn.", show_default=f"3, quick {QUICK['rounds']}")
    seconds: float = 2.0

    def __post_init__(self) -> None:
        unique_lists(self, "models", "bandwidths", "compressors")
        check_models(self.models, KNOWN)
        check_methods(self.compressors)
        check_ranks(self.ranks, 2, "one rank has the whole model")
        if self.stages is not None and (self.stages < 1 or self.ranks % self.stages):
            raise ConfigError(f"--stages must divide the {self.ranks} ranks, and {self.stages} does not")
        check_links(self.ranks, self.bandwidths)
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"--schedule must be gpipe or 1f1b, not {self.schedule!r}")
        check_at_least_1(self, "microbatches", "blocks", "rounds")

    @property
    def scenarios(self) -> list[Scenario]:
        """Model, bandwidth, compressor and ranks of each scenario."""
        each = itertools.product(self.models, self.bandwidths, self.compressors, [self.ranks])
        return [dict(zip(("model", "bandwidth", "compressor", "ranks"), one, strict=True)) for one in each]


@options.with_options(PipelineSettings)
def command(
    given: options.Given,
    out: options.Folder = Path("out/pipeline"),
    resume: Resume = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cuts, and less time for everything.")] = False,
) -> None:
    """Compare cuts of a model into pipeline stages: what is predicted, and what is measured.

    Ranks measure the parts of the model and the link, and plan. Then the plan is
    measured in turns with all cuts in two at the ends of blocks, and with what
    people cut by hand: stages with as many layers, with as many parameters, and
    with as long a time (GPipe's). With --stages any, one measures ways to share
    out the ranks instead: data parallelism alone, as many replicas of every
    stage, and of 3 ranks two for one stage. Results are saved after each
    scenario, Ctrl-C included; with --resume a run goes on.
    """
    settings = PipelineSettings(**{**(QUICK if quick else {}), **given})
    run_sweep("pipeline", settings, out, resume, verdict).report_and_exit()
