"""``grace bench pipeline``: a comparison of the planned cut with others, and of predicted with measured steps."""

from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.pipeline.cut_verdicts import cuts_table, markdown, verdict_words
from grace.bench.pipeline.pipeline_settings import QUICK, PipelineSettings
from grace.bench.ranks.sweep import Sweep

SWEEP = Sweep("grace bench pipeline", "grace.bench.pipeline.pipeline_rank", cuts_table, verdict_words, markdown)


@options.with_options(PipelineSettings)
def command(
    given: dict[str, Any],
    out: options.KeptIn = None,
    resume: options.Resume = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cuts, and less time for everything.")] = False,
) -> None:
    """Compare cuts of a model into pipeline stages: what is predicted, and what is measured.

    Ranks measure the parts of the model and the link, and plan. Then the plan is
    measured in turns with all cuts in two at the ends of blocks, and with what
    people cut by hand: stages with as many layers, with as many parameters, and
    with as long a time (GPipe's). With --stages any, one measures ways to share
    out the ranks instead: data parallelism alone, as many replicas of every
    stage, and of 3 ranks two for one stage. The last table is Markdown.
    """
    settings = PipelineSettings(**{**(QUICK if quick else {}), **given})
    SWEEP.run(settings, out, resume, Console(highlight=False))
