"""``grace bench plan``: the order of predicted steps, and the regret of what ``auto`` chooses."""

from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.plan.plan_settings import QUICK, PlanSettings
from grace.bench.plan.plan_verdicts import markdown, plans_table, verdict_words
from grace.bench.ranks.sweep import Sweep

SWEEP = Sweep("grace bench plan", "grace.bench.plan.plan_rank", plans_table, verdict_words, markdown)


@options.with_options(PlanSettings)
def command(
    given: dict[str, Any],
    out: options.KeptIn = None,
    resume: options.Resume = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for everything.")] = False,
) -> None:
    """Measure whether auto chooses well, beside other plans.

    In each scenario (a model, a number of ranks, a link) the ranks train with
    strategy="auto" until it has chosen. Then its choice, its other candidates,
    plain sums and one method for all variables are measured in turns. The
    tables have how many pairs of plans were predicted in the right order, how
    much longer the chosen plan's step is than that of the best one within the
    bounds (regret), and after how many steps it was chosen. The last one is
    Markdown.
    """
    settings = PlanSettings(**{**(QUICK if quick else {}), **given})
    SWEEP.run(settings, out, resume, Console(highlight=False))
