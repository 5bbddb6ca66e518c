"""Plans of exchanges and of pipelines as HTML files: what the commands print, and figures."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from rich.console import Console

from grace.bench.common.text import digits, of_bytes, short
from grace.bench.report.figures import Figure, Look, Panel, bars, height_of_bars, lines, looks_of
from grace.bench.report.page import recorded, section, write_page
from grace.core.quantities import byte_unit
from grace.pipeline.planning import pipeline_plan
from grace.pipeline.planning.simulation import simulate_schedule
from grace.planner.explain import Plan
from grace.planner.network import links_of
from grace.planner.problem import Problem, methods_of
from grace.planner.problem import short as short_method
from grace.planner.scaling import Line, over_ranks, over_rates
from grace.planner.step_simulation import Prediction

CHOSEN = "this plan"
LANES = {"wire": 0, "compute": 1}
"""Heights of events; encoding and decoding interrupt computation."""
COLORS = {"compute": "lightgrey", "wire": "C0"}
NEAR = 4.0
"""Multiple of the fullest rank's bytes up to which the limit is drawn: bars would vanish before a longer line."""

MOST_NUMBERS = 120
"""Actions up to which they are numbered by their micro-batches."""


def write_plan(path: Path, plan: Plan, problem: Problem, show: Callable[[Console], None]) -> Path:
    """Write a plan of exchanges: the console's tables, a step's Gantt chart, other ranks and bandwidths, memory."""
    methods = methods_of(problem.methods, problem.quality, problem.cluster.world_size, bool(problem.errors.tables))
    names = [short_method(method.compressor) for method in methods]
    chosen = {CHOSEN: plan.chosen.strategy} if plan.compresses else {}
    steps = {name: problem.predict(strategy) for name, strategy in chosen.items()}
    ranks, links = problem.cluster.world_size, links_of(problem.costs.network)
    here = {name: line[0][1] for name, line in over_ranks(problem, names, {}, [ranks]).items()}
    all_ranks, all_rates = over_ranks(problem, names, chosen), over_rates(problem, names, chosen)
    memory = dict(sorted({**steps, **here}.items(), key=lambda item: item[1].memory))
    drawn = [
        Figure(
            "One step, as it is expected",
            "Forward, backward, and the optimizer in grey; encoding interrupts backward as gradients become ready, "
            "decoding follows when what travelled has come. Where the upper lane is empty, the step waits.",
            {
                f"{short(name, 44)}: {digits(1e3 * step.step)} ms": partial(_draw_gantt, step)
                for name, step in {"plain all-reduce": problem.predict(plan.plain.strategy), **steps}.items()
            },
            2.0,
        ),
        Figure(
            "Step time against ranks and against bandwidth",
            "One method for all variables over links like these, and the plan as it is. All-gathers bring what every "
            "rank sends, and rise with the ranks: where one crosses none's line, compressing has stopped paying. The "
            "dotted lines are what is planned for.",
            {
                "against ranks": _scaling(all_ranks, "ranks", ranks),
                "against bandwidth": _scaling(
                    all_rates, "bit/s of a link", None if links is None else links.bandwidth * 8
                ),
            },
        ),
        Figure(
            "Memory",
            "Bytes that exchanges keep on the rank that keeps most: residuals, buffers that travel, and what comes "
            "from other ranks.",
            {"": partial(bars, x="MB on a rank", rows={name: [step.memory / 1e6] for name, step in memory.items()})},
            height_of_bars(memory),
        ),
    ]
    title = f"{'A plan' if plan.compresses else 'No compression'} for {ranks} ranks"
    return write_page(path, "Grace plan", [section(title, {}, recorded(show), drawn)])


def _draw_gantt(step: Prediction, axes: Axes) -> None:
    """Draw computation and communication over the time of a step."""
    for kind, _, begin, end in step.events:
        lane = LANES.get(kind, LANES["compute"])
        label = {"compute": "the model computes", "wire": "on the wire"}.get(kind, "encode and decode")
        axes.barh(lane, 1e3 * (end - begin), left=1e3 * begin, color=COLORS.get(kind, "C1"), label=label)
    axes.set_yticks(list(LANES.values()), ["wire", "computing"])
    axes.set_xlabel("ms of a step")


def _scaling(predictions: Mapping[str, Line], x: str, now: float | None) -> Panel:
    series = {name: [(at, 1e3 * step.step) for at, step in line] for name, line in predictions.items()}
    return partial(lines, x=x, y="ms of a step", series=series, looks=looks_of(series), log="xy", along={":": now})


def write_pipeline(path: Path, plan: pipeline_plan.PipelinePlan, show: Callable[[Console], None]) -> Path:
    """Write a pipeline's plan: what is shown on a console, the schedule with its bubbles, and memory by rank."""
    title = f"Pipeline of {len(plan.stages)} stages on {plan.world_size} ranks"
    drawn = [
        Figure(
            "One step",
            "What each stage of the pipeline computes, and the gradients' exchange. What is empty is bubble, "
            f"{100 * plan.bubble:.1f} % of the schedule, or waits for what crosses.",
            {plan.schedule: partial(_draw_schedule, plan)},
        )
    ]
    if plan.memory:
        unit, size = byte_unit(max(plan.memory))
        near = plan.limit is not None and plan.limit <= NEAR * max(plan.memory)
        caption = (
            "Parameters, gradients, optimizer state, buffers, activations kept under the schedule, what is received "
            "and sent, and Grace's memories and wires."
        )
        caption += "" if plan.limit is None else f" A device has {of_bytes(plan.limit)}."
        caption += " The dashed line is there." if near else ""
        ranks = {f"rank {rank}": [nbytes / size] for rank, nbytes in enumerate(plan.memory)}
        limit = plan.limit / size if near and plan.limit is not None else None
        panel = partial(bars, x=unit, rows=ranks, along={"--": limit})
        drawn.append(Figure("Memory by rank", caption, {"": panel}, height_of_bars(ranks)))
    return write_page(path, "Grace pipeline plan", [section(title, {}, recorded(show), drawn)])


def _draw_schedule(plan: pipeline_plan.PipelinePlan, axes: Axes) -> None:
    """Draw computations over the time of a step; replicas of a stage have one row."""
    played = simulate_schedule(plan.schedule, plan.stages, plan.microbatches)
    looks: dict[str, Look] = {"F": {"color": "C0", "label": "forward"}, "B": {"color": "C1", "label": "backward"}}
    for event in played.events:
        width = 1e3 * (event.end - event.start)
        axes.barh(event.stage, width, left=1e3 * event.start, edgecolor="white", **looks[event.kind])
        if len(played.events) <= MOST_NUMBERS:
            axes.text(1e3 * event.start, event.stage, f" {event.microbatch}", va="center", clip_on=True)
    for row, (stage, done) in enumerate(zip(plan.stages, played.done, strict=True)):
        axes.barh(row, 1e3 * stage.exchange, left=1e3 * done, color="C2", label="the gradients' exchange")
    names = [f"rank{'s' * (stage.replicas > 1)} {', '.join(map(str, stage.ranks))}" for stage in plan.stages]
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
