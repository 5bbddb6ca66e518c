"""``grace plan``: a strategy chosen by prediction, before any cluster exists."""

import dataclasses
from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.options import Given, with_options
from grace.bench.common.progress import progress_bar
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits, of_bytes
from grace.cli.plan_inputs import PlanRequest, build_problem, choose_cluster, load_model, read_calibration
from grace.cli.terminal import check_outputs, standard_output
from grace.core import documents
from grace.core.version import __version__
from grace.planner.explain import HEADINGS, Plan, plan_of
from grace.planner.greedy import find_candidates
from grace.planner.outer_plans import outer_plans
from grace.planner.step_simulation import Prediction

FORMAT = 1
"""Version of the file that --json writes."""
OUTER_FIGURES = ("step", "compute", "codec", "exposed", "sent", "memory")
"""Figures of outer plans in that file."""
Candidate = tuple[str, str, Prediction, str]
"""Row of the table of candidates: a star if it is chosen, its name, the prediction, and its largest error."""


@with_options(PlanRequest)
def plan(
    given: Given,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="The model: module:function of a function that returns (model, loss, samples), where loss(model) is "
            "the loss of one batch, or the model alone; or the name of a model of grace bench step, as resnet.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write the strategy to, for grace launch --strategy.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file to write candidates, reasons and predictions to.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write: the timeline of a step, and predictions for other numbers of ranks and other "
            "bandwidths."
        ),
    ] = None,
) -> None:
    """Choose a compression method for each variable by predicting the time of a training step.

    grace plan --model train:net -n 8 --bandwidth 1gbit --latency 50us -o s.yaml
    grace plan --model train:net -r cluster.yaml --report plan.html
    grace plan --model train:net --calibration c.json

    A training step is simulated: when each gradient is ready, how long it takes
    to compress and to send, and how much of that overlaps with backward. The
    model's times are measured here in one process, unless you give them; so are
    the times of compression methods, unless a calibration has them. Planning
    starts from the best single method for all variables. Then each variable gets
    the method that shortens the step most within a bound on its error. If no
    plan is 3 % faster than plain all-reduce, the answer is not to compress.

    Train with the plan: grace launch -n 8 --strategy s.yaml -- python train.py.
    With strategy="auto", a training run makes its own plan, and tries it.
    """
    console = standard_output(150)
    request = PlanRequest(**given)
    inputs = [request.resources, request.calibration]
    check_outputs(output, json_file, report, sources=inputs)  # before minutes of measuring
    if request.calibration is None:
        choose_cluster(request, None)  # it may refuse, before a model is made
    trained = load_model(model)
    calibration = None if request.calibration is None else read_calibration(request.calibration, trained.framework)
    cluster = choose_cluster(request, calibration)
    with progress_bar(console) as progress:
        problem, sources = build_problem(trained, request, cluster, calibration, progress)
        candidates = find_candidates(problem)
        found = plan_of(problem, candidates)
    outer = outer_plans(problem)
    print_plan(found, sources, console, outer)
    builder = request.auto.strategy((), cluster).builder
    strategy = dataclasses.replace(found.chosen.strategy, builder=builder)
    written = []
    if output is not None:
        from grace.strategy import schema

        schema.dump(strategy, output)
        written.append(f"{output}: {len(strategy.plans)} variables, for {strategy.world_size} ranks")
    if json_file is not None:
        document = {
            "grace_plan": FORMAT,
            "grace": __version__,
            "about": sources,
            "why": found.why,
            "compresses": found.compresses,
            "ranks": problem.ranks,
            "timeline": dataclasses.asdict(problem.timeline),
            "seed": problem.seed,
            "strategy": strategy.to_dict(),
            "plan": found.to_dict(),
            "outer": [
                {"name": spec, **{key: getattr(step, key) for key in OUTER_FIGURES}} for spec, step in outer.items()
            ],
        }
        documents.write(json_file, document)
        written.append(str(json_file))
    if report is not None:
        from grace.cli.pages import write_plan

        write_plan(report, found, problem, lambda page: print_plan(found, sources, page, outer))
        written.append(f"{report} ({report.stat().st_size / 1000:.0f} kB)")
    for line in written:
        console.print(f"Wrote {escape(line)}", soft_wrap=True)


def print_plan(plan: Plan, sources: Mapping[str, str], console: Console, outer: Mapping[str, Prediction]) -> None:
    """Print a plan: sources of figures, candidates beside plans whose ranks train alone, and each variable's choice."""
    for heading, source in sources.items():
        console.print(f"{heading + ':':<9}{escape(source)}", soft_wrap=True, style="dim")
    console.print()
    console.print(_candidates_table(plan, outer))
    console.print(
        "ms of a step as expected; exposed: communication that the step waits for; sent: by the rank that sends most;\n"
        f"memory: of exchanges, on a rank; {escape(plan.legend)}\n"
        "diloco: ranks train alone, and exchange drifts; it changes training, and is never chosen",
        style="dim",
        soft_wrap=True,
    )
    if plan.compresses:
        console.print()
        columns: Columns[tuple[str, ...]] = {heading: itemgetter(i) for i, heading in enumerate(HEADINGS)}
        console.print(table([row.cells for row in plan.rows], columns, ["method", "sync", "why"]))
    console.print()
    console.print(escape(plan.why), style="bold", soft_wrap=True)
    for remark in plan.remarks:
        console.print(escape(remark), soft_wrap=True)


def _candidates_table(plan: Plan, outer: Mapping[str, Prediction]) -> Table:
    """Return the table of candidates, and of plans whose ranks train alone."""
    plain = plan.plain.prediction.step
    rows: list[Candidate] = [
        (
            "*" if one is plan.chosen else "",
            "plain all-reduce" if one is plan.plain else one.name,
            one.prediction,
            digits(one.share, 2),
        )
        for one in plan.candidates
    ]
    rows += [("", spec, prediction, "") for spec, prediction in outer.items()]

    def ms(figure: str) -> Callable[[Candidate], str]:
        return lambda row: digits(round(1e3 * getattr(row[2], figure), 6))

    columns: Columns[Candidate] = {
        "": lambda row: row[0],
        "plan": lambda row: row[1],
        "step": ms("step"),
        "x plain": lambda row: f"{plain / row[2].step:.2f}" if row[2].step > 0 else "",
        **{figure: ms(figure) for figure in ("compute", "codec", "exposed")},
        "sent": lambda row: of_bytes(row[2].sent),
        "memory": lambda row: of_bytes(row[2].memory),
        "error": lambda row: row[3],
    }
    return table(rows, columns, ["plan"], lambda row: "bold" if row[0] else "dim" if row[1] in outer else "")
