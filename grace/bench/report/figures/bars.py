"""Horizontal bars of stacked parts, one row per method."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from grace.bench.common.text import labels, short
from grace.bench.report.figures import style
from grace.bench.report.figures.style import INK, MUTED, PAPER, Axes, Drawing, Look, Panel

ROW = 21
"""CSS pixels of a row."""
FAR = 4.0
"""Multiple of the median bar at which bars are cut, where at most a third of them are longer."""
Mark = tuple[str, float, Any]
"""Vertical line: name, position, line style of matplotlib."""
REST = "rest"
"""Shade of the part that is the same work in every row."""
ALPHAS = {"full": 1.0, "half": 0.5, "light": 0.22, REST: 0.16}


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


def bars_panel(title: str, bars: Sequence[Bar], x: str, ident: str, what: str, unit: str = "", **more: Any) -> Panel:
    """Return the panel of :func:`horizontal` bars of ``what``, with the texts of all bars for screen readers."""
    about = f"Bars of {what}: " + ", ".join(f"{bar.name} {bar.text}{unit}" for bar in bars)
    return Panel.of(title, horizontal(bars, x, **more), ident, about)


def outliers(lengths: Sequence[float]) -> float:
    """Return the length at which bars are cut so that few long ones leave the others room; 0 if none is far from the
    others.

    >>> outliers([1.0, 2.0, 3.0, 90.0]), outliers([1.0, 2.0, 3.0]), outliers([1.0, 90.0])
    (12.0, 0.0, 0.0)
    """
    end = FAR * sorted(lengths)[len(lengths) // 2]
    return end if 0 < 3 * sum(length > end for length in lengths) <= len(lengths) else 0.0


def horizontal(bars: Sequence[Bar], x: str, marks: Sequence[Mark] = (), clip: float = 0.0) -> Drawing:
    """Return a panel of bars, at least one, the first at the top. Longer ones than ``clip`` are cut, if it is not 0."""
    gaps = [1.0 if one.group == other.group else 1.6 for one, other in itertools.pairwise(bars)]
    heights = [-height for height in itertools.accumulate(gaps, initial=0.0)]
    drawing, axes = style.panel(round(60 + ROW * (1 - heights[-1])), names=len(marks))
    longest = max([bar.high or bar.length for bar in bars] + [position for _, position, _ in marks])
    limit = 1.02 * ((min(longest, clip) if clip else longest) or 1)
    axes.set(xlim=(0, limit), ylim=(heights[-1] - 0.55, 0.55))
    axes.grid(False, axis="y")
    names = labels(bar.name for bar in bars)
    axes.set_yticks(heights, [names[bar.name] for bar in bars], color=INK)
    for bar, y in zip(bars, heights, strict=True):
        _draw(axes, bar, y, limit)
    for name, position, dash in marks:
        if position <= limit:
            axes.axvline(position, color=INK, linewidth=1, linestyle=dash, zorder=3, label=short(name))
    if marks:
        style.legend(drawing, axes, "outside upper left")
    style.plain_ticks(axes)
    style.label_axes(axes, x)
    return drawing


def _draw(axes: Axes, bar: Bar, y: float, limit: float) -> None:
    start = 0.0
    for length, shade in bar.parts:
        shown = min(length, limit - start)
        if shown > 0:
            color = MUTED if shade == REST else bar.look.color
            axes.barh(y, shown, left=start, height=0.66, color=color, alpha=ALPHAS[shade], linewidth=0)
        start += length
    cut = start > limit
    if cut:
        edge = limit * 0.97
        axes.plot([edge, edge + limit * 0.016], [y - 0.45, y + 0.45], color=PAPER, linewidth=4, clip_on=False)
    elif bar.low is not None and bar.high is not None and bar.high <= limit * 1.03:
        middle, half = (bar.low + bar.high) / 2, abs(bar.high - bar.low) / 2
        axes.errorbar(middle, y, xerr=half, color=INK, elinewidth=1.1, capsize=3, clip_on=False)
    end = limit if cut else max(start, bar.high or 0)
    style.write(axes, bar.text, (end, y), (5, 0), textcoords="offset points", va="center_baseline")
