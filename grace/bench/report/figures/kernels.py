"""Figures of the compressors alone: error against bits, and the time of encoding and decoding."""

from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.text import digits, number, power
from grace.bench.report.figures.bars import Bar, horizontal, outliers
from grace.bench.report.figures.labels import beside_points
from grace.bench.report.figures.style import INK, Figure, Look, Panel, label_axes, panel, set_margins, svg
from grace.bench.report.rows import cases

KEYS = (("encode", "full"), ("decode", "half"), ("memory (error feedback)", "light"))
Rows = Sequence[Mapping[str, Any]]


def figures(rows: Rows, looks: Mapping[str, Look], name: str) -> list[Figure]:
    """Return all figures that the rows allow; ``name`` is the prefix of their elements' ids."""
    return [figure for figure in (_errors(rows, looks, name), _times(rows, looks, name)) if figure.panels]


def _errors(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels, some_exact = [], False
    known = [
        row for row in rows if (number(row.get("bits_per_element")) or 0) > 0 and number(row.get("vnmse")) is not None
    ]
    inexact = [row["vnmse"] for row in known if row["vnmse"] > 0]
    floor = 10**-0.7 * min(inexact, default=1.0)
    for i, ((tensor,), some) in enumerate(cases(known, "tensor").items()):
        drawing, axes = panel(384)
        set_margins(drawing, axes, 50, 16, 38, 42)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        points = []
        for row in some:
            look, exact = looks[str(row["method"])], row["vnmse"] <= 0
            some_exact |= exact
            at = floor if exact else row["vnmse"]
            marker = "v" if exact else look.marker
            axes.plot(row["bits_per_element"], at, color=look.color, marker=marker, markersize=7, clip_on=False)
            points.append((f"{row['method']}" + (" (exact)" if exact else ""), row["bits_per_element"], at))
        xs = [row["bits_per_element"] for row in known]
        axes.set_xlim(min(xs) / 1.6, max(xs) * 1.6)
        axes.set_ylim(floor / 1.3, 30 * max([*inexact, 1.0]))
        axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: power(value) if value >= 0.1 else f"{value:.3g}")
            axis.set_minor_formatter(lambda value, _: "")
        axes.yaxis.set_major_formatter(lambda value, _: power(value))
        label_axes(axes, "bits per element (log scale)", "vNMSE: mean of |C(x) \u2212 x|² / |x|² (log scale)")
        frame, level = axes.get_window_extent(), axes.transData.transform((1, 1))[1]
        beside_points(axes, points, [(frame.x0, level - 1, frame.x1, level + 1)])
        about = f"Points of vNMSE against bits per element, {tensor} tensor: " + "; ".join(
            f"{row['method']} {digits(row['vnmse'])} at {digits(row['bits_per_element'])} bits" for row in some
        )
        panels.append(Panel(f"{tensor} tensor", svg(drawing, f"{name}-error{i}", about), about))
    caption = (
        "The error of one rank's encoding against its size, both measured. Left is smaller, down is more exact: "
        "nothing should be right of and above something else. At the dashed line the error is as large as the "
        "gradient; what lies near it relies on error feedback, or on the mean over many ranks."
        + (" Methods without an error stand at the lower edge." if some_exact else "")
    )
    return Figure("Error against bits", caption, panels)


def _times(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((tensor,), some) in enumerate(cases(rows, "tensor").items()):
        bars = []
        for row in some:
            copies = [number(row.get(f"{key}_copies")) for key in ("encode", "decode", "memory")]
            if copies[0] is None and copies[1] is None:
                continue
            parts = [(value or 0.0, shade) for value, (_, shade) in zip(copies, KEYS, strict=True)]
            text = digits(sum(value or 0.0 for value in copies))
            bars.append(Bar(str(row["method"]), parts, text, looks[str(row["method"])]))
        if not bars:
            continue
        bars.sort(key=lambda bar: bar.length)
        drawing = horizontal(bars, "multiples of the time of one copy", clip=outliers([bar.length for bar in bars]))
        about = f"Bars of the time of encoding, decoding and memory in copies, {tensor} tensor: " + ", ".join(
            f"{bar.name} {bar.text}" for bar in bars
        )
        panels.append(Panel(f"{tensor} tensor", svg(drawing, f"{name}-copies{i}", about), about))
    caption = (
        "How long a rank computes to encode a tensor, to decode it, and to keep what was left out, as multiples of the "
        "time in which the same machine copies the tensor once; the fastest first, the sum at the bar's end. "
        "Bars far beyond the others are cut where a gap is; the number at the end counts."
    )
    return Figure("Time of encoding and decoding", caption, panels, KEYS)
