"""A pipeline's plan as one HTML file: the stages, the schedule with its bubbles, and memory by rank."""

from pathlib import Path
from typing import Any

from grace.bench.common.text import format_count, of_bytes, short
from grace.bench.report import page
from grace.bench.report.figures.bars import Bar, horizontal
from grace.bench.report.figures.style import (
    GRID,
    INK,
    PALETTE,
    Figure,
    Look,
    Panel,
    escaped,
    label_axes,
    panel,
    set_margins,
    svg,
    write,
)
from grace.bench.report.report_tables import figure_of, table, words_of
from grace.core.quantities import byte_unit
from grace.pipeline.planning.pipeline_plan import Plan
from grace.pipeline.planning.predict import timeline

BLUE, ORANGE, _, YELLOW = PALETTE[:4]
COLORS = {"F": BLUE, "B": ORANGE}
"""Colour of forward and of backward."""
NEAR = 4.0
"""Multiple of the fullest rank's bytes up to which the limit is drawn: bars would vanish before a longer line."""
MOST_NUMBERS = 120
"""Actions up to which they are numbered by their micro-batches."""
STAGES = [
    figure_of("stage", "stage", "", format_count),
    words_of("nodes", "nodes"),
    words_of("ranks", "ranks"),
    figure_of("forward", "forward", "ms, micro-batch"),
    figure_of("backward", "backward", "ms, micro-batch"),
    figure_of("parameters", "parameters", "", of_bytes),
    words_of("sends", "passes on"),
    figure_of("sent", "there", "micro-batch", of_bytes),
    figure_of("returned", "back", "micro-batch", of_bytes),
]


def write_page(plan: Plan, path: Path) -> None:
    """Write the file, which loads nothing.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    title = f"Pipeline of {len(plan.stages)} stages on {plan.world_size} ranks"
    parts = [
        f'<section id="s0"><h2>{escaped(title)}</h2><p class="about">{escaped(plan.summary)}</p>',
        f"<h3>Where it is cut</h3>{table(_stage_rows(plan), STAGES, {}, 'Stages')}",
        page.figure_html(_schedule_figure(plan), wide=True),
    ]
    if plan.memory:
        parts.append(page.figure_html(_memory_figure(plan)))
    page.write(path, page.document("Grace pipeline plan", ["\n".join([*parts, "</section>"])]))


def _stage_rows(plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for i, stage in enumerate(plan.stages):
        last = i + 1 == len(plan.stages)
        ends = stage.nodes[0] if len(stage.nodes) == 1 else f"{stage.nodes[0]} to {stage.nodes[-1]}"
        rows.append(
            {
                "name": f"stage {i}",
                "stage": i,
                "nodes": f"{ends} ({len(stage.nodes)})",
                "ranks": ", ".join(map(str, stage.ranks)),
                "forward": 1e3 * stage.forward,
                "backward": 1e3 * stage.backward,
                "parameters": stage.parameters,
                "sends": "" if last else ", ".join(stage.sends),
                "sent": None if last else stage.sent,
                "returned": None if last else stage.returned,
            }
        )
    return rows


def _schedule_figure(plan: Plan) -> Figure:
    """Draw the actions of each rank over the time of a step; replicas of stages have one row."""
    played = timeline(plan)
    groups = list(dict.fromkeys(stage.ranks for stage in plan.stages))
    drawing, axes = panel(50 + 30 * len(groups), 1000)
    set_margins(drawing, axes, 96, 14, 8, 42)
    total = max(plan.seconds, played.seconds)
    axes.set_xlim(0, 1e3 * total)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(False, axis="y")
    numbered = len(played.events) <= MOST_NUMBERS
    for event in played.events:
        start, width = 1e3 * event.start, 1e3 * (event.end - event.start)
        axes.barh(
            event.stage,
            width,
            left=start,
            height=0.7,
            color=COLORS[event.kind],
            edgecolor=GRID,
            linewidth=0.5,
        )
        if numbered and width > 1e3 * total / 60:
            middle = start + width / 2
            write(axes, str(event.microbatch), (middle, event.stage), size=9, color="white", ha="center", va="center")
    for row, ranks in enumerate(groups):
        exchange = sum(stage.exchange for stage in plan.stages if stage.ranks == ranks)
        if exchange:
            axes.barh(row, 1e3 * exchange, left=1e3 * played.done[row], height=0.7, color=YELLOW, linewidth=0)
    axes.set_yticks(range(len(groups)))
    for tick in axes.set_yticklabels(list(map(_ranks, groups))):
        tick.set(parse_math=False, color=INK, fontsize=10.5)
    label_axes(axes, "ms")
    bubble = f"{100 * plan.bubble:.1f} %"
    about = f"{plan.schedule} over {len(groups)} places: {bubble} of the time is bubble"
    caption = (
        "What each place of the pipeline computes (blue: forward, orange: backward; yellow: the gradients' exchange), "
        "with the micro-batch's number where there is room. What is empty is bubble, "
        f"{bubble} of the schedule, or waits for what crosses."
    )
    return Figure("One step", caption, [Panel("", svg(drawing, "line", about), about)])


def _ranks(ranks: tuple[int, ...]) -> str:
    """Return the name of a row.

    >>> _ranks((0,)), _ranks((0, 1))
    ('rank 0', 'ranks 0, 1')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short(', '.join(map(str, ranks)), 8)}"


def _memory_figure(plan: Plan) -> Figure:
    """Draw the bytes of each rank, in the unit of the fullest one, beside the limit if that is near."""
    most = max(plan.memory)
    unit, size = byte_unit(most)
    bars = [
        Bar(f"rank {rank}", [(nbytes / size, "full")], of_bytes(nbytes), Look(BLUE))
        for rank, nbytes in enumerate(plan.memory)
    ]
    marks = []
    limit = ""
    if plan.limit is not None and plan.limit <= NEAR * most:
        marks = [("device", plan.limit / size, "--")]
        limit = "; the dashed line is what a device has"
    elif plan.limit is not None:
        limit = f"; a device has {of_bytes(plan.limit)}"
    about = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    caption = (
        "Parameters, gradients, optimizer state, buffers, activations kept under the schedule, what is received and "
        f"sent, and Grace's memories and wires{limit}."
    )
    return Figure("Memory by rank", caption, [Panel("", svg(horizontal(bars, unit, marks), "memory", about), about)])
