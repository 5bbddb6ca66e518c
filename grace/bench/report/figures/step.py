"""Figures of step times: where a step's time goes, speedup against bandwidth, throughput against ranks."""

from collections.abc import Mapping
from typing import Any

from grace.bench.common.text import digits, number, of_ranks, of_rate, short
from grace.bench.report.figures.bars import REST, Bar, Mark, horizontal, outliers
from grace.bench.report.figures.labels import at_the_right, text_width
from grace.bench.report.figures.style import (
    INK,
    MUTED,
    WIDTH,
    Figure,
    Look,
    Panel,
    label_axes,
    panel,
    set_margins,
    svg,
    write,
)
from grace.bench.report.rows import Rows, cases, identity, one_bound, plain, titles

KEYS = (
    ("compute", "rest"),
    ("codec (Grace's encoding and decoding)", "full"),
    ("communication that nothing hides; for baselines with their codec", "half"),
)
CLIP = 2.5
"""Multiple of the slowest baseline at which bars are cut."""


def figures(rows: Rows, looks: Mapping[str, Look], name: str) -> list[Figure]:
    """Return all figures that the rows allow; ``name`` is the prefix of their elements' ids."""
    rows = one_bound([row for row in rows if number(row.get("step_ms"))])
    found = [_time(rows, looks, name)] if rows else []
    if len({row["bandwidth"] for row in rows}) > 1:
        found.append(_bandwidths(rows, looks, name))
    if len({row["ranks"] for row in rows}) > 1:
        found.append(_ranks(rows, looks, name))
    return [figure for figure in found if figure.panels]


def _time(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    found = cases(rows, "ranks", "bandwidth")
    panels = []
    for i, (title, some) in enumerate(zip(titles(found), found.values(), strict=True)):
        order = {"bound": 0, "baseline": 0, "grace": 1}
        some = sorted(some, key=lambda row: (order.get(row["kind"], 1), row["kind"] == "bound", row["step_ms"]))
        bars = [_bar(row, looks, order.get(row["kind"], 1)) for row in some]
        reference = plain(some)
        bound = next((row for row in some if row["kind"] == "bound"), None)
        marks: list[Mark] = [(bound["name"], bound["step_ms"], ":")] if bound else []
        marks += [(reference["name"], reference["step_ms"], (0, (4, 2)))] if reference else []
        ends = [CLIP * max((row["step_ms"] for row in some if row["kind"] != "grace"), default=0)]
        ends += [outliers([row["step_ms"] for row in some])]
        drawing = horizontal(bars, "time of a step (ms)", marks, min((end for end in ends if end), default=0.0))
        about = f"Bars of the time of a step, {title}: " + ", ".join(f"{bar.name} {bar.text} ms" for bar in bars)
        panels.append(Panel(title, svg(drawing, f"{name}-time{i}", about), about))
    caption = (
        "One bar is the median time of a step; its whisker spans the quartiles. Baselines and the bound stand above, "
        "Grace's methods below, the fastest first. A method pays where its bar ends left of the dashed line, plain "
        "training's time; nothing can end left of the dotted line, the time of the same step without any "
        "communication. The panels' scales differ; bars far beyond the others, or the slowest baseline, are cut where "
        "a gap is, and the number at the end counts."
    )
    return Figure("Where the time of a step goes", caption, panels, KEYS)


def _bar(row: Mapping[str, Any], looks: Mapping[str, Look], group: int) -> Bar:
    compute, codec, exposed = (number(row.get(key)) for key in ("compute_ms", "codec_ms", "exposed_ms"))
    total = row["step_ms"]
    parts: list[tuple[float, str]] = [(total, "half")]
    if compute is not None and exposed is not None:
        parts = [(max(0.0, compute), REST), (max(0.0, codec or 0), "full"), (max(0.0, exposed), "half")]
    low, high = number(row.get("step_low_ms")), number(row.get("step_high_ms"))
    return Bar(row["name"], parts, digits(total), looks[identity(row)], low, high, group)


def _bandwidths(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((ranks,), some) in enumerate(cases(rows, "ranks").items()):
        rates = [rate for (rate,) in cases(some, "bandwidth")]
        if len(rates) < 2:
            continue
        lines = {
            who: [(rates.index(row["bandwidth"]), number(row.get("speedup"))) for row in each]
            for (who,), each in cases([{**row, "who": identity(row)} for row in some], "who").items()
        }
        drawing, axes = lines_of(
            lines, looks, "bandwidth of the emulated link (log scale)", "speedup over plain training"
        )
        axes.set_xticks(range(len(rates)), [of_rate(rate).replace("no emulated ", "no ") for rate in rates])
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
        named_lines(axes, lines, looks)
        title = of_ranks(ranks)
        about = f"Lines of the speedup against the bandwidth, {title}: " + _describe(
            lines, [of_rate(rate) for rate in rates]
        )
        panels.append(Panel(title, svg(drawing, f"{name}-bandwidth{i}", about), about))
    caption = (
        "Plain training's time of a step, divided by the method's. Above the dashed line the method makes a step "
        "faster, below it slower. Grey lines are baselines, and the bound that no method can exceed."
    )
    return Figure("Speedup against bandwidth", caption, panels)


def _ranks(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((rate,), some) in enumerate(cases(rows, "bandwidth").items()):
        counts = sorted({row["ranks"] for row in some})
        if len(counts) < 2:
            continue
        lines = {
            who: [(row["ranks"], number(row.get("samples_per_s"))) for row in each]
            for (who,), each in cases([{**row, "who": identity(row)} for row in some], "who").items()
        }
        drawing, axes = lines_of(
            lines, looks, "ranks (log scale)", "samples per second, all ranks together (log scale)"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        first = [row for row in some if row["ranks"] == counts[0]]
        start = next((row for row in first if row["kind"] == "bound"), None) or plain(first)
        if start is not None and number(start.get("samples_per_s")):
            ideal = [start["samples_per_s"] * count / counts[0] for count in counts]
            axes.plot(counts, ideal, color=INK, linewidth=1.1, linestyle=":", zorder=1)
            end = (counts[-1], ideal[-1])
            write(axes, "ideal", end, (-6, 4), color=MUTED, textcoords="offset points", ha="right")
        named_lines(axes, lines, looks)
        title = of_rate(rate)
        about = f"Lines of samples per second against ranks, {title}: " + _describe(
            lines, {count: of_ranks(count) for count in counts}
        )
        panels.append(Panel(title, svg(drawing, f"{name}-ranks{i}", about), about))
    caption = (
        "Every rank has a batch of its own, so twice the ranks are at best twice the samples per second: the dotted "
        "line, which starts at the fewest ranks without communication (or, where that was not measured, with plain "
        "training). The further a line falls below it, the more the ranks wait for each other."
    )
    return Figure("Throughput against the number of ranks", caption, panels)


def lines_of(
    lines: Mapping[str, Any], looks: Mapping[str, Look], x: str, y: str, width: int = WIDTH
) -> tuple[Any, Any]:
    """Return a panel of lines, on a logarithmic axis.

    Args:
        lines: points (x, y) by name; points without y are left out.
    """
    drawing, axes = panel(max(300, 14 * len(lines) + 90), width)
    right = max((text_width(drawing, short(who, 26)) for who in lines), default=0) + 24
    set_margins(drawing, axes, 52, min(right, 200), 34, 42)
    for who, points in lines.items():
        look = looks[who]
        known = sorted(point for point in points if point[1])
        if known:
            form = {"color": look.color, "linestyle": look.dash, "marker": look.marker}
            axes.plot(*zip(*known, strict=True), **form, markersize=4.5, linewidth=1.7)
    axes.set_yscale("log", base=2)
    label_axes(axes, x, y)
    return drawing, axes


def named_lines(axes: Any, lines: Mapping[str, Any], looks: Mapping[str, Look]) -> None:
    """Set the ticks of y, and write the lines' names at their ends."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 6 else (1.0, 1.5) if high / low > 2.5 else (1.0, 1.1, 1.2, 1.35, 1.5, 1.75)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
    axes.yaxis.set_major_formatter(lambda value, _: digits(value) if value >= 100 else f"{value:.3g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.03)
    ends = []
    for who, points in lines.items():
        known = sorted(point for point in points if point[1])
        if known:
            ends.append((who, known[-1][0], known[-1][1], looks[who]))
    at_the_right(axes, ends)


def _describe(lines: Mapping[str, Any], where: Any) -> str:
    return "; ".join(
        f"{who} " + ", ".join(f"{digits(y)} at {where[x]}" for x, y in sorted(points) if y)
        for who, points in lines.items()
    )
