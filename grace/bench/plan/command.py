"""``grace bench plan``: the order of predicted steps, and the regret of what ``auto`` chooses."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common import options
from grace.bench.common.ending import Ending
from grace.bench.common.kept import Kept, Scenario
from grace.bench.common.progress import Bar
from grace.bench.plan import scenarios
from grace.bench.plan.settings import LINKS, METHODS, MODELS, QUICK_ROUNDS, ROUNDS, Event, Settings
from grace.bench.plan.tables import markdown, plans_table, verdict_words
from grace.bench.plan.verdicts import Verdict, judged, totals

NAME = "grace bench plan"


def command(
    models: Annotated[
        str, typer.Option(help="As grace bench step knows them, or module:function; separated by commas.")
    ] = ",".join(MODELS),
    rates: Annotated[str, typer.Option("--links", help="Rates of emulated links (Linux, root), and loopback.")] = LINKS,
    ranks: Annotated[str, typer.Option("--ranks", "-n", help="Numbers of processes.")] = "2,4",
    methods: Annotated[
        str | None,
        typer.Option(help="Compressors, each of which makes a plan.", show_default=f"{len(METHODS)} usual ones"),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="How often each plan has its turn.", show_default=f"{ROUNDS}, quick {QUICK_ROUNDS}"),
    ] = None,
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
    settings = Settings(
        models=options.split(models),
        bandwidths=options.bandwidths(rates),
        ranks=options.integers(ranks, "--ranks"),
        methods=list(METHODS) if methods is None else options.methods(methods),
        rounds=rounds if rounds is not None else ROUNDS,
    )
    validate(settings.quick() if quick else settings, out, resume, Console(highlight=False))


def validate(
    settings: Settings, out: Path | None = None, resume: bool = False, console: Console | None = None
) -> Verdict | None:
    """Measure, and show tables.

    Args:
        settings: what to run.
        out: file that each scenario is added to when it is there; None keeps nothing.
        resume: go on from what the file has, whatever settings it was measured with.
        console: where all is shown; nowhere if left out.

    Returns:
        The worst of all scenarios; None if nothing was measured.

    Raises:
        ConfigError: the file to go on from is damaged.
        typer.Exit: a rank or a network failed (1), or Ctrl-C (130); what is finished is shown and kept.
    """
    console = console or Console(quiet=True)
    kept = Kept(out)
    found = kept.open(resume)
    known, ending = len(found), Ending(NAME)
    with ending.record_failure(), Bar(console) as bar:

        def watch(name: str, event: Event) -> None:
            bar.show(name, event)
            if "scenario" in event:
                _show(console, name, event["scenario"])

        scenarios.run(settings, kept, found, watch)
    if found:
        where = f", {known} of them measured before" if known else ""
        console.print(f"\n[bold]All {len(found)} scenarios{where}[/]\n")
        console.print(markdown(found), markup=False, soft_wrap=True)
    ending.exit_if_failed()
    return totals(found)[0] if found else None


def _show(console: Console, name: str, scenario: Scenario) -> None:
    console.print(f"\n[bold]{name}[/] ({scenario['seconds']:.0f} s)", soft_wrap=True)
    console.print(plans_table(scenario))
    console.print(verdict_words(judged(scenario)), markup=False)
    for plan, why in scenario["missing"].items():
        console.print(f"Left out: {plan}: {why}", markup=False, style="dim")
