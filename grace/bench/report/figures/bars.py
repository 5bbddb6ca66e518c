"""Horizontal bars of stacked parts, one row per method."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from grace.bench.common.text import short
from grace.bench.report.figures.labels import text_width
from grace.bench.report.figures.style import INK, MUTED, PAPER, Look, label_axes, panel, set_margins, write

ROW = 21
"""CSS pixels of a row."""
FAR = 4.0
"""Multiple of the median bar at which bars are cut, where at most a third of them are longer."""
Mark = tuple[str, float, Any]
"""Vertical line: name, position, line style of matplotlib."""
REST = "rest"
"""Shade of the part that is the same work in every row."""
ALPHAS = {"full": 1.0, "half": 0.5, "light": 0.22}


@dataclasses.dataclass(frozen=True)
class Bar:
    """Bar of one row.

    Attributes:
        name: the row's name.
        parts: (length, shade), from the left; a shade is "full", "half" or "light" of the look's colour, or "rest".
        text: the text at its end.
        look: its colour.
        low, high: ends of the whisker, or None.
        group: rows of different groups have a gap between them.
    """

    name: str
    parts: Sequence[tuple[float, str]]
    text: str
    look: Look
    low: float | None = None
    high: float | None = None
    group: int = 0

    @property
    def length(self) -> float:
        """Sum of the lengths of all parts."""
        return sum(length for length, _ in self.parts)


def outliers(lengths: Sequence[float]) -> float:
    """Return the length at which bars are cut so that few long ones leave the others room; 0 if none is far from the
    others.

    >>> outliers([1.0, 2.0, 3.0, 90.0]), outliers([1.0, 2.0, 3.0]), outliers([1.0, 90.0])
    (12.0, 0.0, 0.0)
    """
    end = FAR * sorted(lengths)[len(lengths) // 2]
    return end if 0 < 3 * sum(length > end for length in lengths) <= len(lengths) else 0.0


def horizontal(bars: Sequence[Bar], x: str, marks: Sequence[Mark] = (), clip: float = 0.0) -> Any:
    """Return a panel of bars, the first at the top.

    Args:
        bars: at least one.
        x: the label of the lengths, with the unit.
        marks: vertical lines.
        clip: the longest length that is not cut; 0 cuts none.
    """
    gaps = sum(one.group != other.group for one, other in itertools.pairwise(bars))
    top = 22 if marks else 8
    bottom = 42
    drawing, axes = panel(round(top + bottom + ROW * (len(bars) + 0.6 * gaps)))
    names = [short(bar.name) for bar in bars]
    left = min(190, max(text_width(drawing, name, 11) for name in names) + 14)
    longest = max([bar.high or bar.length for bar in bars] + [position for _, position, _ in marks])
    limit = min(longest, clip) if clip else longest
    far = [bar for bar in bars if bar.length >= 0.6 * limit]  # beside shorter bars there is room for their texts
    set_margins(drawing, axes, left, max(text_width(drawing, bar.text, 10.5) for bar in far or bars) + 10, top, bottom)
    axes.set_xlim(0, (limit or 1) * 1.02)
    axes.grid(False, axis="y")
    heights, y = [], 0.0
    for before, bar in zip([None, *bars], bars, strict=False):
        if before is not None:
            y -= 1 if before.group == bar.group else 1.6
        heights.append(y)
    for bar, y in zip(bars, heights, strict=True):
        _draw(axes, bar, y, limit)
    axes.set_ylim(heights[-1] - 0.55, 0.55)
    axes.set_yticks(heights)
    for tick, name in zip(axes.set_yticklabels(names), names, strict=True):
        tick.set(parse_math=False, text=name, color=INK, fontsize=11)
    _marks(axes, drawing, [mark for mark in marks if mark[1] <= limit * 1.02])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.locator_params(axis="x", nbins=5)
    label_axes(axes, x)
    return drawing


def _draw(axes: Any, bar: Bar, y: float, limit: float) -> None:
    start = 0.0
    for length, shade in bar.parts:
        shown = min(length, limit * 1.02 - start)
        if shown > 0:
            color = MUTED if shade == REST else bar.look.color
            alpha = 0.16 if shade == REST else ALPHAS[shade]
            axes.barh(y, shown, left=start, height=0.66, color=color, alpha=alpha, linewidth=0)
        start += length
    cut = start > limit * 1.02
    if cut:
        edge = limit * 0.985
        step = limit * 0.008
        axes.plot([edge - step, edge + step], [y - 0.45, y + 0.45], color=PAPER, linewidth=4, clip_on=False)
    elif bar.low is not None and bar.high is not None and bar.high <= limit * 1.05:
        axes.plot([bar.low, bar.high], [y, y], color=INK, linewidth=1.1, solid_capstyle="butt")
        for end in (bar.low, bar.high):
            axes.plot([end, end], [y - 0.16, y + 0.16], color=INK, linewidth=1.1)
    end = limit * 1.02 if cut else max(start, bar.high or 0)
    write(axes, bar.text, (end, y), (5, 0), textcoords="offset points", va="center_baseline")


def _marks(axes: Any, drawing: Any, marks: Sequence[Mark]) -> None:
    """Draw vertical lines with names above them; a name that would cover another one is moved to the right."""
    frame, ends = axes.get_window_extent(), -1e9
    for name, position, dash in sorted(marks, key=lambda mark: mark[1]):
        axes.axvline(position, color=INK, linewidth=1, linestyle=dash, zorder=3)
        at = axes.transData.transform((position, 0))[0]
        width = text_width(drawing, name, 10)
        left = max(at - width / 2, ends + 10, frame.x0)
        ends = left + width
        write(axes, short(name), (left, frame.y1 + 5), size=10, color=MUTED, xycoords="figure pixels")
