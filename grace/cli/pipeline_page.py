"""A plan drawn: where the model is cut, the schedule with its bubbles, and memory by rank, as one HTML file."""

from pathlib import Path
from typing import Any

from grace.bench.common.text import of_bytes, short
from grace.bench.report import page
from grace.bench.report.figures.bars import Bar, horizontal
from grace.bench.report.figures.style import (
    GRID,
    INK,
    MUTED,
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
from grace.pipeline.planning.pipeline_plan import UNITS, Plan
from grace.pipeline.planning.predict import timeline

BLUE, ORANGE, GREEN, YELLOW = PALETTE[:4]
LOOKS = {"F": (BLUE, 1.0), "B": (ORANGE, 1.0), "I": (ORANGE, 1.0), "W": (GREEN, 1.0), "X": (YELLOW, 1.0)}
WHAT = {"F": "blue: forward", "B": "orange: backward", "I": "orange: backward of inputs", "W": "green: of weights"}
NEAR = 4.0
"""Times the fullest rank's bytes up to which the limit is drawn beside it: bars would vanish before a longer line."""
STAGE = 76
"""CSS pixels of a stage, with what crosses to the next."""
LINE = "One step"
"""The figure that is as wide as the page."""
MOST_NUMBERS = 120
"""Actions up to which they are numbered by their micro-batches."""


def write_page(plan: Plan, path: Path) -> None:
    """Write the file: figures are in it, and nothing is loaded.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    drawn = [_cuts(plan), _line(plan), _memory(plan)] if plan.memory else [_cuts(plan), _line(plan)]
    title = f"Pipeline of {len(plan.stages)} stages on {plan.world_size} ranks"
    section = "\n".join(
        [
            f'<section id="s0"><h2>{escaped(title)}</h2><p class="about">{escaped(plan.summary)}</p>',
            *(page.figure_html(one, wide=one.title == LINE) for one in drawn),
            "</section>",
        ]
    )
    page.write(path, page.document("Grace pipeline plan", [section]))


def _cuts(plan: Plan) -> Figure:
    """Stages from top to bottom, with what crosses between them."""
    count = len(plan.stages)
    drawing, axes = panel(STAGE * count + 8)
    set_margins(drawing, axes, 4, 4, 4, 4)
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(STAGE * count, 0)
    told = []
    for i, stage in enumerate(plan.stages):
        top = STAGE * i
        axes.add_patch(_box(0.0, top + 2, 1.0, 46))
        ends = stage.nodes[0] if len(stage.nodes) == 1 else f"{stage.nodes[0]} to {stage.nodes[-1]}"
        first = f"{i}: {short(ends, 44)} ({len(stage.nodes)} nodes)"
        second = (
            f"{_ranks(stage.ranks, 24)}; {1e3 * stage.forward:.3g} + "
            f"{1e3 * stage.backward:.3g} ms; {of_bytes(stage.parameters)} of parameters"
        )
        write(axes, first, (0.02, top + 20), size=11.5)
        write(axes, second, (0.02, top + 38), size=10.5, color=MUTED)
        told.append(f"stage {first}, {second}")
        if i + 1 < count:
            axes.annotate(
                "",
                (0.06, top + STAGE),
                (0.06, top + 50),
                arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
            )
            values = short(", ".join(stage.sends), 30)
            crosses = f"{values}: {of_bytes(stage.sent)} there, {of_bytes(stage.returned)} back"
            write(axes, crosses, (0.1, top + 66), size=10.5)
            told.append(f"then {crosses}")
    about = "; ".join(told)
    caption = (
        "Each stage with its first and last node, its ranks, and the milliseconds of forward and backward of a "
        "micro-batch; between them the values that are passed on, and their bytes for a micro-batch."
    )
    return Figure("Where it is cut", caption, [Panel("", svg(drawing, "cuts", about), about)])


def _ranks(ranks: tuple[int, ...], most: int) -> str:
    """A place's ranks, in so many characters.

    >>> _ranks((0,), 8), _ranks((0, 1), 8)
    ('rank 0', 'ranks 0, 1')
    """
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {short(', '.join(map(str, ranks)), most)}"


def _box(x: float, y: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor="none", edgecolor=MUTED, linewidth=1)


def _line(plan: Plan) -> Figure:
    """Who computes what when."""
    played = timeline(plan)
    places = list(dict.fromkeys(stage.ranks for stage in plan.stages))
    order = sorted(range(len(places)), key=lambda p: min(i for i, s in enumerate(plan.stages) if s.ranks == places[p]))
    drawing, axes = panel(round(50 + 30 * len(places)), 1000)
    set_margins(drawing, axes, 96, 14, 8, 42)
    total = max(plan.seconds, played.seconds)
    axes.set_xlim(0, 1e3 * total)
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.grid(False, axis="y")
    numbered = len(played.events) <= MOST_NUMBERS
    for event in played.events:
        color, alpha = LOOKS[event.kind]
        lower = any(i < event.stage for i, s in enumerate(plan.stages) if s.ranks == plan.stages[event.stage].ranks)
        axes.barh(
            order.index(event.stage),
            1e3 * (event.end - event.start),
            left=1e3 * event.start,
            height=0.7,
            color=color,
            alpha=0.6 if lower else alpha,
            edgecolor=GRID,
            linewidth=0.5,
        )
        if numbered and event.end - event.start > total / 60:
            at = 1e3 * (event.start + event.end) / 2, order.index(event.stage)
            write(axes, str(event.microbatch), at, size=9, color="white", ha="center", va="center")
    for row, place_ in enumerate(order):
        waits = sum(stage.exchange for stage in plan.stages if stage.ranks == places[place_])
        if waits:
            axes.barh(row, 1e3 * waits, left=1e3 * played.done[place_], height=0.7, color=YELLOW, linewidth=0)
    axes.set_yticks(range(len(places)))
    names = [_ranks(places[p], 8) for p in order]
    for tick in axes.set_yticklabels(names):
        tick.set(parse_math=False, color=INK, fontsize=10.5)
    label_axes(axes, "ms")
    kinds = list(dict.fromkeys(event.kind for event in played.events))
    keys = [WHAT[kind] for kind in sorted(kinds)]
    about = f"{plan.schedule} over {len(places)} places: {100 * plan.bubble:.1f} % of the time is bubble"
    caption = (
        f"What each place of the pipeline computes ({', '.join(keys)}; yellow: the gradients' exchange; paler: a "
        f"rank's later stages), with the micro-batch's number where there is room. What is empty is bubble, "
        f"{100 * plan.bubble:.1f} % of the schedule, or waits for what crosses."
    )
    return Figure(LINE, caption, [Panel("", svg(drawing, "line", about), about)])


def _memory(plan: Plan) -> Figure:
    """Bytes of each rank, in the unit of the fullest one, beside the limit if that is near."""
    look, most = Look(BLUE), max(plan.memory)
    unit, size = next(((unit, size) for unit, size in UNITS.items() if most >= size), ("B", 1.0))
    bars = [
        Bar(f"rank {rank}", [(nbytes / size, "full")], of_bytes(nbytes), look)
        for rank, nbytes in enumerate(plan.memory)
    ]
    near = plan.limit is not None and plan.limit <= NEAR * most
    marks = [("device", plan.limit / size, "--")] if plan.limit is not None and near else []
    drawing = horizontal(bars, unit, marks)
    about = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    caption = (
        "Parameters, gradients, optimizer state, buffers, activations kept under the schedule, what is received and "
        "sent, and Grace's memories and wires"
    )
    if plan.limit is not None:
        caption += "; the dashed line is what a device has" if near else f"; a device has {of_bytes(plan.limit)}"
    caption += "."
    return Figure("Memory by rank", caption, [Panel("", svg(drawing, "memory", about), about)])
