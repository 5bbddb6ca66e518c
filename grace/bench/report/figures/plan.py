"""Figures of a plan: one predicted step, steps of other numbers of ranks and over other links, memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.text import digits, of_bytes, of_rate, short
from grace.bench.report.figures.bars import Bar, horizontal
from grace.bench.report.figures.labels import text_width
from grace.bench.report.figures.step import lines_of, named_lines
from grace.bench.report.figures.style import (
    INK,
    MUTED,
    PALETTE,
    Figure,
    Look,
    Panel,
    label_axes,
    panel,
    set_margins,
    svg,
)
from grace.planner.scaling import Line
from grace.planner.step import Prediction

KEYS = (
    ("the model computes", "rest"),
    ("encode and decode", "codec"),
    ("on the wire", "wire"),
)
LANES = {"compute": 1, "start": 1, "middle": 1, "finish": 1, "wire": 0}
COLORS = {"compute": MUTED, "wire": PALETTE[0]}
CODEC = PALETTE[1]
DARK = {"none": INK, "this plan": MUTED}
"""Colours of what is no method."""
WIDE = 620
"""CSS pixels of a panel with many lines."""


def gantt(steps: Mapping[str, Prediction], name: str) -> Figure:
    """Return a figure of computation and communication over the time of a step.

    Args:
        steps: predictions with their events, by names.
        name: the prefix of elements' ids.
    """
    panels = []
    for i, (title, step) in enumerate(steps.items()):
        drawing, axes = panel(128)
        left = text_width(drawing, "computing", 11) + 14
        set_margins(drawing, axes, left, 12, 8, 42)
        for what, _, begin, end in step.events:
            color, alpha = COLORS.get(what, CODEC), 0.28 if what == "compute" else 1.0
            bar = axes.barh(LANES[what], 1e3 * (end - begin), left=1e3 * begin, height=0.72, color=color, alpha=alpha)
            bar[0].set(linewidth=0.5, edgecolor="#FFFFFF" if what != "compute" else color)
        axes.set_xlim(0, 1e3 * max([step.step, *(end for *_, end in step.events)]) * 1.01 or 1)
        axes.set_ylim(-0.6, 1.6)
        axes.set_yticks([0, 1], ["wire", "computing"])
        for tick in axes.get_yticklabels():
            tick.set(color=INK, fontsize=11)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.locator_params(axis="x", nbins=6)
        label_axes(axes, "ms of a step")
        about = (
            f"{title}: a step of {digits(1e3 * step.step)} ms, of which {digits(1e3 * step.compute)} ms the model, "
            f"{digits(1e3 * step.codec)} ms encoding and decoding, {digits(1e3 * step.exposed)} ms waiting"
        )
        panels.append(
            Panel(f"{short(title, 44)}: {digits(1e3 * step.step)} ms", svg(drawing, f"{name}{i}", about), about)
        )
    caption = (
        "Forward, backward, and the optimizer in grey; encoding interrupts backward as gradients become ready, "
        "decoding follows when what travelled has come. What is on the wire beside grey is hidden; where the upper "
        "lane is empty, the step waits. The scales of the panels differ."
    )
    return Figure("One step, as it is expected", caption, panels, KEYS)


def over_ranks(lines: Mapping[str, Line], now: int, name: str) -> Figure:
    """Return a figure of steps over numbers of ranks.

    Args:
        lines: predictions by names.
        now: the number of ranks that is planned for.
        name: the prefix of elements' ids.
    """
    drawing, axes = _lines(lines, "ranks (log scale)")
    counts = sorted({int(x) for line in lines.values() for x, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.axvline(now, color=MUTED, linewidth=1, linestyle=":", zorder=1)
    named_lines(axes, _points(lines), looks(lines))
    about = "Lines of the time of a step against ranks: " + _describe(lines, "{:,} ranks")
    caption = (
        "One method for all variables, cut into an optimizer's own buckets, over links like these; the plan as it is, "
        "without planning anew. All-gathers (topk's) bring what every rank sends, and rise with the ranks: where "
        "one crosses none's line, compressing has stopped paying. "
        f"The dotted line is at {now:,} ranks."
    )
    return Figure("Step time against ranks", caption, [Panel("", svg(drawing, name, about), about)])


def over_rates(lines: Mapping[str, Line], now: float | None, name: str) -> Figure:
    """Return a figure of steps over bandwidths.

    Args:
        lines: predictions by names.
        now: bit/s that is planned for, if it is known.
        name: the prefix of elements' ids.
    """
    drawing, axes = _lines(lines, "bandwidth of a link (log scale)")
    rates = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xscale("log")
    axes.set_xticks(rates[::3], [of_rate(rate) for rate in rates[::3]])
    axes.minorticks_off()
    if now is not None and rates[0] <= now <= rates[-1]:
        axes.axvline(now, color=MUTED, linewidth=1, linestyle=":", zorder=1)
    named_lines(axes, _points(lines), looks(lines))
    about = "Lines of the time of a step against the bandwidth: " + _describe(lines, "{:.3g} bit/s")
    caption = (
        "The same at this number of ranks, over links of other bandwidths with the same latency. To the right of where "
        "none's line is the lowest, compressing costs more than it saves."
    )
    return Figure("Step time against bandwidth", caption, [Panel("", svg(drawing, name, about), about)])


def memory(steps: Mapping[str, Prediction], name: str) -> Figure:
    """Return a figure of the bytes that exchanges keep on a rank.

    Args:
        steps: predictions by names.
        name: the prefix of elements' ids.
    """
    seen = looks(steps)
    ordered = sorted(steps.items(), key=lambda item: item[1].memory)
    bars = [Bar(who, [(step.memory / 1e6, "full")], of_bytes(step.memory), seen[who]) for who, step in ordered]
    about = "Bars of memory: " + ", ".join(f"{bar.name} {bar.text}" for bar in bars)
    drawing = horizontal(bars, "MB on a rank, beside weights and gradients")
    caption = (
        "What exchanges keep on the rank that keeps most: residuals (twice: what is kept, and what the step under way "
        "makes of it), buffers that travel, and what comes from other ranks, more with each where it is gathered."
    )
    return Figure("Memory", caption, [Panel("", svg(drawing, name, about), about)])


def looks(names: Mapping[str, Any] | Sequence[str]) -> dict[str, Look]:
    """Return a colour for each method; plans and none are dark."""
    found: dict[str, Look] = {}
    for name in names:
        used = len([one for one in found if one not in DARK])
        marker = "*" if name == "this plan" else ("o", "s")[used // len(PALETTE) % 2]
        found[name] = Look(DARK.get(name, PALETTE[used % len(PALETTE)]), marker, "-")
    return found


def _points(lines: Mapping[str, Line]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(x, 1e3 * step.step) for x, step in line] for name, line in lines.items()}


def _lines(lines: Mapping[str, Line], x: str) -> tuple[Any, Any]:
    return lines_of(_points(lines), looks(lines), x, "ms of a step (log scale)", WIDE)


def _describe(lines: Mapping[str, Line], template: str) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{digits(1e3 * step.step)} ms at {template.format(x)}" for x, step in line)
        for name, line in lines.items()
    )
