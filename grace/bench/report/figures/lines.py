"""Lines of one figure against another, with the methods' names below."""

from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.text import digits, labels
from grace.bench.report.figures import style
from grace.bench.report.figures.style import WIDTH, Axes, Drawing, Look

Points = Sequence[tuple[Any, float | None]]


def lines(
    series: Mapping[str, Points],
    looks: Mapping[str, Look],
    x: str,
    y: str,
    width: int = WIDTH,
    include: Sequence[float] = (),
) -> tuple[Drawing, Axes]:
    """Return a panel of lines through points (x, y), with a logarithmic y axis that reaches the values to ``include``,
    too. Points without y are left out."""
    known = {name: sorted((at, value) for at, value in points if value) for name, points in series.items()}
    known = {name: points for name, points in known.items() if points}
    drawing, axes = style.panel(280, width, names=len(known))
    names = labels(known)
    for name, points in known.items():
        look = looks[name]
        form: dict[str, Any] = {"color": look.color, "linestyle": look.dash, "marker": look.marker}
        axes.plot(*zip(*points, strict=True), **form, markersize=4.5, linewidth=1.7, label=names[name])
    values = [value for points in known.values() for _, value in points]
    if values:
        values += include
        style.log_scale(axes, "y", min(values) / 1.15, max(values) * 1.15)
        style.legend(drawing, axes)
    style.label_axes(axes, x, y)
    return drawing, axes


def rank_ticks(axes: Axes, counts: Sequence[int]) -> None:
    """Make the x axis one of numbers of ranks, by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()


def describe(series: Mapping[str, Points], where: Mapping[Any, str], unit: str = "") -> str:
    """Return the points of lines as text, with the text of each x, and the unit behind each y.

    >>> describe({"topk": [(2, 1.5), (4, None)]}, {2: "2 ranks", 4: "4 ranks"})
    'topk 1.50 at 2 ranks'
    """
    return "; ".join(
        f"{name} " + ", ".join(f"{digits(y)}{unit} at {where[x]}" for x, y in sorted(points) if y)
        for name, points in series.items()
    )
