"""Names beside points and at the ends of lines, placed so that they do not cover each other."""

import math
from collections.abc import Sequence
from typing import Any

from grace.bench.common.text import clean, short
from grace.bench.report.figures.style import MUTED, SIZE, Look, any_text, write

Box = tuple[float, float, float, float]
"""Box in pixels: left, bottom, right, top."""
LINE = 13.5
"""Pixels between the middles of two labels below each other."""
DISTANCES = (9, 16, 26, 38, 52, 70, 92)
"""Distances of a label from its point, in pixels; earlier ones are preferred."""
ANGLES = (0, 180, 90, 270, 35, 145, 325, 215, 60, 120, 240, 300)
"""Directions of a label, seen from its point, in degrees; earlier ones are preferred."""


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share.

    >>> overlap((0, 0, 2, 2), (1, 1, 3, 3)), overlap((0, 0, 1, 1), (2, 0, 3, 1))
    (1, 0)
    """
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions in the order of the wanted ones, at least ``gap`` apart, as near to these as a sweep finds.

    Where the room between ``low`` and ``high`` is too small for all, they are evenly spaced in it.

    >>> spread_out([5, 5, 20], 4, 0, 30)
    [3.0, 7.0, 20.0]
    >>> spread_out([1, 1, 1], 10, 0, 10)
    [0.0, 5.0, 10.0]
    """
    if not wanted:
        return []
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, int]] = []  # (centre, members) of labels that touch each other
    for i in order:
        centre, count = float(wanted[i]), 1
        centre = min(max(centre, low), high)
        while groups and groups[-1][0] + gap * (groups[-1][1] - 1) / 2 + gap > centre - gap * (count - 1) / 2:
            before, members = groups.pop()
            centre = (before * members + centre * count) / (members + count)
            count += members
            half = gap * (count - 1) / 2
            centre = min(max(centre, low + half), high - half)
        groups.append((centre, count))
    placed = [centre + gap * (k - (count - 1) / 2) for centre, count in groups for k in range(count)]
    found = [0.0] * len(wanted)
    for i, position in zip(order, placed, strict=True):
        found[i] = position
    return found


def beside_points(axes: Any, points: Sequence[tuple[str, float, float]], obstacles: Sequence[Box] = ()) -> None:
    """Write a name beside each point (name, x, y), with a thin line to it where the name is further away.

    The axes' limits and position must be final. Each label gets the position, of a few dozen around its point, where it
    covers least of points, other labels and ``obstacles`` (in pixels).
    """
    figure = axes.figure
    canvas = axes.transData.transform([(x, y) for _, x, y in points]) if points else []
    frame: Box = tuple(axes.get_window_extent().extents)  # type: ignore[assignment]
    page: Box = (frame[0] + 1, frame[1] + 2, 72 * figure.get_size_inches()[0] - 2, frame[3] + 6)
    dots: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in canvas]
    occupied: list[Box] = [*obstacles]
    crowd = [sum(math.hypot(x - u, y - v) < 60 for u, v in canvas) for x, y in canvas]
    for i in sorted(range(len(points)), key=lambda i: crowd[i]):
        name, (x, y) = short(points[i][0]), canvas[i]
        width, height = text_width(figure, name), SIZE
        best: tuple[float, Any] = (math.inf, None)
        for far, distance in enumerate(DISTANCES):
            for turn, angle in enumerate(ANGLES):
                dx, dy = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
                left = x + dx - (0 if dx > 1 else width if dx < -1 else width / 2)
                box: Box = (left - 3, y + dy - height / 2 - 1, left + width + 3, y + dy + height / 2 + 1)
                area = (box[2] - box[0]) * (box[3] - box[1])
                cost = 40 * (area - overlap(box, page)) / area + far * 0.6 + turn * 0.05
                cost += sum(10 * shared / area + 1.2 for other in occupied if (shared := overlap(box, other)))
                cost += sum(8 * overlap(box, other) / 144 for k, other in enumerate(dots) if k != i or far)
                end = (left - 1 if dx > 1 else left + width + 1 if dx < -1 else left + width / 2, y + dy)
                if abs(dx) <= 1:
                    end = (end[0], end[1] - math.copysign(height / 2 + 1, dy))
                leader = _leader((x, y), end) if far else []
                crossed = sum(overlap(piece, other) > 0 for piece in leader for other in occupied)
                cost += 0.3 * crossed + 2 * (crossed > 1)
                if cost < best[0]:
                    best = (cost, (box, leader, left, y + dy, end))
        box, leader, left, middle, end = best[1]
        occupied += [box, *leader]
        if leader:
            between = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            axes.annotate("", (x, y), end, xycoords="figure pixels", textcoords="figure pixels", arrowprops=between)
        write(axes, name, (left, middle), xycoords="figure pixels", va="center_baseline")


def _leader(point: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Return small boxes along the line from a point to its label."""
    steps = [(point[0] + (end[0] - point[0]) * t / 8, point[1] + (end[1] - point[1]) * t / 8) for t in range(2, 8)]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in steps]


def at_the_right(axes: Any, ends: Sequence[tuple[str, float, float, Look]]) -> None:
    """Write names of lines in the right margin, each joined to the end (x, y) of its line."""
    frame = axes.get_window_extent()
    pixels = [axes.transData.transform((x, y)) for _, x, y, _ in ends]
    heights = spread_out([y for _, y in pixels], LINE, frame.y0 + 4, frame.y1)
    for (name, _, _, look), (x, y), height in zip(ends, pixels, heights, strict=True):
        line = {"arrowstyle": "-", "color": look.color, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        start = (frame.x1 + 16, height)
        write(axes, "", (x, y), start, xycoords="figure pixels", textcoords="figure pixels", arrowprops=line)
        write(axes, short(name, 26), (frame.x1 + 19, height), xycoords="figure pixels", va="center_baseline")


def keys_at_the_right(axes: Any, names: Sequence[tuple[str, Look]]) -> None:
    """Write names in the right margin, each with a piece of its line: where the ends of lines are too far from the
    margin."""
    frame = axes.get_window_extent()
    for i, (name, look) in enumerate(names):
        height = frame.y1 - 4 - i * LINE
        write(axes, short(name, 26), (frame.x1 + 33, height), xycoords="figure pixels", va="center_baseline")
        xs, ys = zip(*axes.transData.inverted().transform([(frame.x1 + x, height) for x in (8, 18, 28)]), strict=True)
        axes.plot(xs, ys, color=look.color, linestyle=look.dash, linewidth=1.6, clip_on=False)
        axes.plot(xs[1], ys[1], color=look.color, marker=look.marker, markersize=5, clip_on=False)


def text_width(figure: Any, text: str, size: float = SIZE) -> float:
    """Return the pixels that a text takes in matplotlib's own font, which is wider than those of browsers."""
    from matplotlib.text import Text

    drawn = Text(0, 0, clean(text), fontsize=size, parse_math=False, figure=figure)
    with any_text():
        return drawn.get_window_extent(figure.canvas.get_renderer()).width
