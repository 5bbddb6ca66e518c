"""Figures of the compressors alone: error against bits, and the time of encoding and decoding."""

from collections.abc import Mapping
from typing import Any

from grace.bench.common.text import digits, labels, number
from grace.bench.report.figures import style
from grace.bench.report.figures.bars import Bar, bars_panel, outliers
from grace.bench.report.figures.style import DASHED, INK, Figure, Look, Panel
from grace.bench.report.rows import Rows, cases

KEYS = (("encode", "full"), ("decode", "half"), ("memory (error feedback)", "light"))


def figures(rows: Rows, looks: Mapping[str, Look], name: str) -> list[Figure]:
    """Return all figures that the rows allow; ``name`` is the prefix of their elements' ids."""
    return [figure for figure in (_errors(rows, looks, name), _times(rows, looks, name)) if figure.panels]


def _errors(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    known = [
        row for row in rows if (number(row.get("bits_per_element")) or 0) > 0 and number(row.get("vnmse")) is not None
    ]
    bits = [row["bits_per_element"] for row in known]
    inexact = [row["vnmse"] for row in known if row["vnmse"] > 0]
    floor = 10**-0.7 * min(inexact, default=1.0)
    for i, ((tensor,), some) in enumerate(cases(known, "tensor").items()):
        drawing, axes = style.panel(300, names=len(some))
        style.log_scale(axes, "x", min(bits) / 1.6, max(bits) * 1.6)
        style.log_scale(axes, "y", floor / 1.3, 3 * max([*inexact, 1.0]))
        axes.axhline(1, color=INK, linewidth=1, linestyle=DASHED, zorder=1)
        names = labels(str(row["method"]) for row in some)
        for row in some:
            look, exact = looks[str(row["method"])], row["vnmse"] <= 0
            label = names[str(row["method"])] + (" (exact)" if exact else "")
            at, marker = (floor, "v") if exact else (row["vnmse"], look.marker)
            form: dict[str, Any] = {"color": look.color, "marker": marker, "linestyle": "", "markersize": 7}
            axes.plot(row["bits_per_element"], at, **form, clip_on=False, label=label)
        style.legend(drawing, axes)
        style.label_axes(axes, "bits per element (log scale)", "vNMSE: mean of |C(x) \u2212 x|² / |x|² (log scale)")
        about = f"Points of vNMSE against bits per element, {tensor} tensor: " + "; ".join(
            f"{row['method']} {digits(row['vnmse'])} at {digits(row['bits_per_element'])} bits" for row in some
        )
        panels.append(Panel.of(f"{tensor} tensor", drawing, f"{name}-error{i}", about))
    caption = (
        "The error of one rank's encoding against its size, both measured. Left is smaller, down is more exact: "
        "nothing should be right of and above something else. At the dashed line the error is as large as the "
        "gradient; what lies near it relies on error feedback, or on the mean over many ranks."
        + (" Methods without an error stand at the lower edge." if len(inexact) < len(known) else "")
    )
    return Figure("Error against bits", caption, panels)


def _times(rows: Rows, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((tensor,), some) in enumerate(cases(rows, "tensor").items()):
        bars = []
        for row in some:
            copies = [number(row.get(f"{key}_copies")) for key in ("encode", "decode", "memory")]
            if copies[0] is not None or copies[1] is not None:
                parts = [(value or 0.0, shade) for value, (_, shade) in zip(copies, KEYS, strict=True)]
                total = digits(sum(length for length, _ in parts))
                bars.append(Bar(str(row["method"]), parts, total, looks[str(row["method"])]))
        if bars:
            bars.sort(key=lambda bar: bar.length)
            x, clip = "multiples of the time of one copy", outliers([bar.length for bar in bars])
            what = f"the time of encoding, decoding and memory in copies, {tensor} tensor"
            panels.append(bars_panel(f"{tensor} tensor", bars, x, f"{name}-copies{i}", what, clip=clip))
    caption = (
        "How long a rank computes to encode a tensor, to decode it, and to keep what was left out, as multiples of the "
        "time in which the same machine copies the tensor once; the fastest first, the sum at the bar's end. "
        "Bars far beyond the others are cut where a gap is; the number at the end counts."
    )
    return Figure("Time of encoding and decoding", caption, panels, KEYS)
