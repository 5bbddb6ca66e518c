"""Figures of a plan: one predicted step, steps of other numbers of ranks and over other links, memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.text import digits, of_bytes, of_ranks, of_rate, short
from grace.bench.report.figures import style
from grace.bench.report.figures.bars import Bar, bars_panel
from grace.bench.report.figures.lines import Points, describe, lines, rank_ticks
from grace.bench.report.figures.style import INK, MUTED, PALETTE, PAPER, Axes, Figure, Look, Panel
from grace.bench.report.scaling import Line
from grace.planner.step import Prediction

KEYS = (("the model computes", "rest"), ("encode and decode", "codec"), ("on the wire", "wire"))
LANES = {"wire": 0, "compute": 1}
"""Heights of events; encoding and decoding interrupt computation."""
COLORS = {"compute": MUTED, "wire": PALETTE[0]}
CODEC = PALETTE[1]
DARK = {"none": INK, "this plan": MUTED}
"""Colours of names that are no method's."""
WIDE = 520
"""CSS pixels of a panel with many lines."""


def gantt(steps: Mapping[str, Prediction], name: str) -> Figure:
    """Return a figure of computation and communication over the time of a step, of predictions with their events."""
    panels = []
    for i, (title, step) in enumerate(steps.items()):
        drawing, axes = style.panel(128)
        for kind, _, begin, end in step.events:
            color = COLORS.get(kind, CODEC)
            looks: dict[str, Any] = {"color": color, "alpha": 0.28} if kind == "compute" else {"color": color}
            lane = LANES.get(kind, LANES["compute"])
            axes.barh(lane, 1e3 * (end - begin), left=1e3 * begin, height=0.72, edgecolor=PAPER, linewidth=0.5, **looks)
        axes.set(xlim=(0, 1e3 * max([step.step, *(end for *_, end in step.events)]) * 1.01 or 1), ylim=(-0.6, 1.6))
        axes.set_yticks([0, 1], ["wire", "computing"], color=INK)
        axes.grid(False, axis="y")
        style.plain_ticks(axes)
        style.label_axes(axes, "ms of a step")
        total, compute, codec, exposed = (
            f"{digits(1e3 * seconds)} ms" for seconds in (step.step, step.compute, step.codec, step.exposed)
        )
        parts = f"{compute} the model, {codec} encoding and decoding, {exposed} waiting"
        about = f"{title}: a step of {total}, of which {parts}"
        panels.append(Panel.of(f"{short(title, 44)}: {total}", drawing, f"{name}{i}", about))
    caption = (
        "Forward, backward, and the optimizer in grey; encoding interrupts backward as gradients become ready, "
        "decoding follows when what travelled has come. What is on the wire beside grey is hidden; where the upper "
        "lane is empty, the step waits. The scales of the panels differ."
    )
    return Figure("One step, as it is expected", caption, panels, KEYS)


def over_ranks(predictions: Mapping[str, Line], now: int, name: str) -> Figure:
    """Return a figure of steps over numbers of ranks; ``now`` is the number that is planned for."""
    counts = sorted({int(x) for line in predictions.values() for x, _ in line})
    series = _series(predictions)
    drawing, axes = lines(series, looks(series), "ranks (log scale)", "ms of a step (log scale)", WIDE)
    rank_ticks(axes, counts)
    _dotted(axes, now)
    about = "Lines of the time of a step against ranks: " + describe(series, {x: of_ranks(x) for x in counts}, " ms")
    caption = (
        "One method for all variables, cut into an optimizer's own buckets, over links like these; the plan as it is, "
        "without planning anew. All-gathers (topk's) bring what every rank sends, and rise with the ranks: where "
        "one crosses none's line, compressing has stopped paying. "
        f"The dotted line is at {now:,} ranks."
    )
    return Figure("Step time against ranks", caption, [Panel.of("", drawing, name, about)])


def over_rates(predictions: Mapping[str, Line], now: float | None, name: str) -> Figure:
    """Return a figure of steps over bandwidths; ``now`` is the one that is planned for, in bit/s, if it is known."""
    rates = sorted({x for line in predictions.values() for x, _ in line})
    series = _series(predictions)
    x, y = "bandwidth of a link (log scale)", "ms of a step (log scale)"
    drawing, axes = lines(series, looks(series), x, y, WIDE)
    axes.set_xscale("log")
    axes.set_xticks(rates[::3], [of_rate(rate) for rate in rates[::3]])
    axes.minorticks_off()
    if now is not None and rates[0] <= now <= rates[-1]:
        _dotted(axes, now)
    points = describe(series, {x: of_rate(x) for x in rates}, " ms")
    about = f"Lines of the time of a step against the bandwidth: {points}"
    caption = (
        "The same at this number of ranks, over links of other bandwidths with the same latency. To the right of where "
        "none's line is the lowest, compressing costs more than it saves."
    )
    return Figure("Step time against bandwidth", caption, [Panel.of("", drawing, name, about)])


def memory(steps: Mapping[str, Prediction], name: str) -> Figure:
    """Return a figure of the bytes that exchanges keep on a rank."""
    seen = looks(steps)
    ordered = sorted(steps.items(), key=lambda item: item[1].memory)
    bars = [Bar(who, [(step.memory / 1e6, "full")], of_bytes(step.memory), seen[who]) for who, step in ordered]
    caption = (
        "What exchanges keep on the rank that keeps most: residuals (twice: what is kept, and what the step under way "
        "makes of it), buffers that travel, and what comes from other ranks, more with each where it is gathered."
    )
    return Figure(
        "Memory", caption, [bars_panel("", bars, "MB on a rank, beside weights and gradients", name, "memory")]
    )


def looks(names: Mapping[str, Any] | Sequence[str]) -> dict[str, Look]:
    """Return a colour for each method; plans and none are dark."""
    methods = [name for name in names if name not in DARK]
    found = {name: Look(color, "*" if name == "this plan" else "o") for name, color in DARK.items()}
    for i, name in enumerate(methods):
        found[name] = Look(PALETTE[i % len(PALETTE)], ("o", "s")[i // len(PALETTE) % 2])
    return found


def _series(predictions: Mapping[str, Line]) -> dict[str, Points]:
    return {name: [(x, 1e3 * step.step) for x, step in line] for name, line in predictions.items()}


def _dotted(axes: Axes, x: float) -> None:
    axes.axvline(x, color=MUTED, linewidth=1, linestyle=":", zorder=1)
