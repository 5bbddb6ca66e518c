"""Figures of reports, in matplotlib's own style."""

import base64
import dataclasses
import html
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any

from grace.bench.common.quality import better, scale
from grace.bench.common.results import Results, Row, Settings
from grace.bench.common.text import clean, digits, number, of_ranks, of_rate, short
from grace.bench.report.rows import cases, identity, one_bound, plain_row
from grace.errors import missing_extra

try:
    from matplotlib import rc_context
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.ticker import LogFormatter
except ImportError as error:
    raise missing_extra("matplotlib", "bench") from error

Look = dict[str, Any]
"""Colour and marker of a method, as matplotlib's arguments."""
Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points of lines, by the lines' names."""
Marks = Mapping[str, float | None]
"""Places of straight lines by their styles; None where a line is left out."""
Panel = Callable[[Axes], None]
"""Function that draws a panel of a figure."""
NO_MARKS: Marks = MappingProxyType({})
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grace",
    "text.parse_math": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": "medium",
}
"""Texts stay texts, and a method's name is never a formula."""
MARKERS = "os^Dv"
CLIP = 2.5
"""Multiple of the slowest baseline, or of the median, at which an axis ends."""


def bars(
    axes: Axes,
    x: str,
    rows: Mapping[str, Sequence[float]],
    parts: Mapping[str, str] = MappingProxyType({"": "C0"}),
    end: float = 0.0,
    along: Marks = NO_MARKS,
) -> None:
    """Draw a bar for each name, from the top, with its sum behind the name: the lengths of its parts are stacked, which
    have names and colours. The axis ends at ``end``, if that is not 0."""
    left = [0.0] * len(rows)
    for i, (part, color) in enumerate(parts.items()):
        lengths = [row[i] for row in rows.values()]
        axes.barh(range(len(lengths)), lengths, left=left, color=color, label=part)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    forms = labels_of(rows)
    axes.set_yticks(range(len(rows)), [f"{forms[name]}  {digits(sum(lengths))}" for name, lengths in rows.items()])
    axes.invert_yaxis()
    axes.set_xlabel(x)
    if end:
        axes.set_xlim(0, min(end, 1.02 * max(left)) or 1)
    _draw_marks(axes.axvline, along)


def height_of_bars(*panels: Sized) -> float:
    """Return the height in inches of panels with so many bars."""
    return 0.26 * max(map(len, panels), default=0) + 0.8


def lines(
    axes: Axes,
    x: str,
    y: str,
    series: Series,
    looks: Mapping[str, Look],
    log: str = "",
    linestyle: str = "-",
    across: Marks = NO_MARKS,
    along: Marks = NO_MARKS,
    ylim: tuple[float, float] | None = None,
) -> None:
    """Draw lines; axes in ``log``, as "xy", are logarithmic. Lines without a style are points alone."""
    forms = labels_of(looks)  # of all panels, which have one legend
    for name, points in series.items():
        if points:
            label = forms[name]
            axes.plot(*zip(*sorted(points), strict=True), **looks[name], linestyle=linestyle, markersize=4, label=label)
    axes.set(xlabel=x, ylabel=clean(y), **{f"{axis}scale": "log" for axis in log})
    for axis in [{"x": axes.xaxis, "y": axes.yaxis}[name] for name in log]:
        axis.set_major_formatter(LogFormatter())  # matplotlib's own would write formulas
        axis.set_minor_formatter(LogFormatter())
    _draw_marks(axes.axhline, across)
    _draw_marks(axes.axvline, along)
    if ylim is not None:
        axes.set_ylim(*ylim)


def _draw_marks(line: Callable[..., object], marks: Marks) -> None:
    for style, place in marks.items():
        if place is not None:
            line(place, color="black", linewidth=1, linestyle=style)


@dataclasses.dataclass(frozen=True)
class Figure:
    """Panels under one heading, by their titles, each ``height`` inches high."""

    title: str
    caption: str
    panels: Mapping[str, Panel]
    height: float = 3.6

    def html(self) -> str:
        """Return the figure as HTML that holds its picture."""
        columns = min(2, len(self.panels))
        rows = -(-len(self.panels) // columns)
        with rc_context(STYLE):
            drawing = Drawing(figsize=(6 * columns, rows * self.height + 0.8), layout="constrained")
            all_axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
            for axes in all_axes[len(self.panels) :]:  # an odd number of panels leaves a place empty
                axes.remove()
            names = dict[str, Artist]()
            for axes, (title, draw) in zip(all_axes, self.panels.items(), strict=False):
                draw(axes)
                axes.set_title(clean(title))
                handles, labels = axes.get_legend_handles_labels()
                names |= dict(zip(labels, handles, strict=True))
            if names:
                drawing.legend(names.values(), names, loc="outside lower center", ncols=2 * columns, frameon=False)
            file = io.BytesIO()
            drawing.savefig(file, format="svg", metadata={"Date": None})  # no date: equal results, equal bytes
        picture = base64.b64encode(file.getvalue()).decode()
        title, caption = (html.escape(clean(text)) for text in (self.title, self.caption))
        image = f'<img alt="{title}: {caption}" src="data:image/svg+xml;base64,{picture}">'
        return f"<h3>{title}</h3><figure>{image}<figcaption>{caption}</figcaption></figure>"


def figures(results: Results, looks: Mapping[str, Look]) -> list[Figure]:
    """Return all figures that the rows of results allow."""
    draw = {"step": _step, "train": _train, "kernels": _kernels}[results.kind]
    return [figure for figure in draw(results, looks) if figure.panels]


def looks_of(methods: Iterable[str], baselines: Iterable[str] = ()) -> dict[str, Look]:
    """Return one look for each name: baselines are grey, ``none`` is black.

    >>> looks_of(["none", "topk"], ["DDP"])["topk"]
    {'color': 'C1', 'marker': 'o'}
    """
    grey = [{"color": "grey", "marker": marker} for marker in MARKERS]
    colours = [{"color": f"C{i}", "marker": marker} for marker in MARKERS for i in range(10)]
    found = dict(zip(dict.fromkeys(baselines), cycle(grey), strict=False))
    others = (name for name in dict.fromkeys(methods) if name not in found)
    found |= dict(zip(list(others), cycle(colours), strict=False))
    if "none" in found:
        found["none"] = {**found["none"], "color": "black"}
    return found


def series_of(rows: Sequence[Row], x: str, y: str, log: str = "") -> dict[str, list[tuple[float, float]]]:
    """Return the points of the rows that have both figures, by the rows' names; on a logarithmic axis above 0 only."""
    found = dict[str, list[tuple[float, float]]]()
    for row in rows:
        across, up = number(row.get(x)), number(row.get(y))
        if across is None or up is None:
            continue
        drawable = all(value > 0 for axis, value in (("x", across), ("y", up)) if axis in log)
        if drawable:
            found.setdefault(identity(row), []).append((across, up))
    return found


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return a short form of each name, or the whole one where two would be alike.

    >>> list(labels_of(["topk(ratio=0.01)", "a method whose first name is long"]).values())
    ['topk(ratio=0.01)', 'a method whose… name is long']
    >>> list(labels_of(["a method whose first name is long", "a method whose other name is long"]).values())
    ['a method whose first name is long', 'a method whose other name is long']
    """
    forms = {name: short(name) for name in names}
    count = Counter(forms.values())
    return {name: form if count[form] == 1 else clean(name) for name, form in forms.items()}


# -- steps -----------------------------------------------------------------------------------------------------------


def _step(results: Results, looks: Mapping[str, Look]) -> list[Figure]:
    rows = one_bound([row for row in results.rows if number(row.get("step_ms"))])
    parts = {"compute": "lightgrey", "codec": "C1", "communication that nothing hides": "C0"}
    times, most = dict[str, Panel](), height_of_bars(*cases(rows, "ranks", "bandwidth").values())
    for (ranks, rate), some in cases(rows, "ranks", "bandwidth").items():
        plain = plain_row(some)
        some = sorted(some, key=lambda row: (row["kind"] == "grace", row["kind"] == "bound", row["step_ms"]))
        slowest = max((row["step_ms"] for row in some if row["kind"] != "grace"), default=0.0)
        # one slow method would make all other bars too short to be compared
        end = CLIP * (slowest or some[len(some) // 2]["step_ms"])
        marks = {"--": plain, ":": next((row for row in some if row["kind"] == "bound"), None)}
        along = {style: None if row is None else row["step_ms"] for style, row in marks.items()}
        split = {row["name"]: _parts(row) for row in some}
        panel = partial(bars, x="ms of a step", rows=split, parts=parts, end=end, along=along)
        times[f"{of_ranks(ranks)}, {of_rate(rate)}"] = panel
    speedups, throughput = dict[str, Panel](), dict[str, Panel]()
    link, gain = "bit/s of the emulated link", "speedup over plain training"
    samples = "samples per second, all ranks together"
    for (ranks,), some in cases(rows, "ranks").items():
        series = series_of(some, "bandwidth", "speedup", "x")
        if _several(series):
            panel = partial(lines, x=link, y=gain, series=series, looks=looks, log="xy", across={"--": 1})
            speedups[of_ranks(ranks)] = panel
    for (rate,), some in cases(rows, "bandwidth").items():
        series = series_of(some, "ranks", "samples_per_s", "y")
        if _several(series):
            throughput[of_rate(rate)] = partial(lines, x="ranks", y=samples, series=series, looks=looks, log="xy")
    return [
        Figure(
            "Where the time of a step goes",
            "One bar is the median time of a step; baselines stand above. A method pays where its bar ends left of the "
            "dashed line, plain training's time; nothing can end left of the dotted line, the same step without any "
            "communication. Longer bars are cut; the number behind the name counts.",
            times,
            most,
        ),
        Figure(
            "Speedup against bandwidth",
            "Plain training's time of a step, divided by the method's. Above the dashed line the method makes a step "
            "faster, below it slower.",
            speedups,
        ),
        Figure(
            "Throughput against the number of ranks",
            "Every rank has a batch of its own, so twice the ranks are at best twice the samples per second.",
            throughput,
        ),
    ]


def _several(series: Series) -> bool:
    """Return True if any line has more than one point."""
    return any(len(points) > 1 for points in series.values())


def _parts(row: Row) -> list[float]:
    compute, codec, exposed = (number(row.get(key)) for key in ("compute_ms", "codec_ms", "exposed_ms"))
    if compute is None or exposed is None:
        return [0.0, 0.0, row["step_ms"]]
    return [compute, codec or 0.0, exposed]


# -- training --------------------------------------------------------------------------------------------------------


def _train(results: Results, looks: Mapping[str, Look]) -> list[Figure]:
    found = []
    rows = [row for row in results.rows if number(row.get("quality")) is not None]
    by_optimizer = cases(rows, "optimizer")
    for (optimizer,), some in by_optimizer.items():
        where = f", {optimizer}" if len(by_optimizer) > 1 else ""
        found += _of_optimizer(some, results.settings, looks, where)
    return found


def _of_optimizer(rows: Sequence[Row], task: Settings, looks: Mapping[str, Look], where: str) -> list[Figure]:
    metric, unit = task.get("metric", "quality"), task.get("unit")
    quality = f"test {metric}" + (f" ({unit})" if unit else "")
    rows = [{**row, "shown": row["quality"] * scale(task)} for row in rows]
    ylim = window([row["shown"] for row in rows], better(task))
    target = number(task.get("target"))
    goal = {":": None if target is None else target * scale(task)}
    draw_lines = partial(lines, y=quality, looks=looks, ylim=ylim)
    finals, curves = dict[str, Panel](), dict[str, Panel]()
    places = {of_rate(rate): some for (rate,), some in cases(rows, "bandwidth").items()}
    for over, some in places.items():
        none = {"--": next((row["shown"] for row in some if row["method"] == "none"), None)}
        for key, x, log in (
            ("sent_bytes_per_step", "bytes of a step", "x"),
            ("samples_per_s", "samples per second", ""),
        ):
            final = series_of(some, key, "shown", log)
            finals[f"against {x}, {over}"] = partial(draw_lines, x=x, series=final, log=log, linestyle="", across=none)
        for i, (x, log) in enumerate((("epochs", ""), ("bytes", "x"), ("seconds", ""))):
            series = {row["method"]: _curve(row, i, task, log) for row in some}
            again = x != "seconds" and over != next(iter(places))  # it is the same over any network
            if any(series.values()) and not again:
                curves[f"against {x}, {over}"] = partial(draw_lines, x=x, series=series, log=log, across=goal)
    return [
        Figure(
            f"Final {metric} against bytes and against speed{where}",
            f"One point is a method. {'Up' if better(task) > 0 else 'Down'} is better; a method is of use where it is "
            "level with none (the dashed line) and left of it in bytes, or right of it in speed.",
            finals,
        ),
        Figure(
            f"{str(metric).capitalize()} while training{where}",
            "Means over seeds. The line farthest left learns most from its epochs, bytes or seconds; the dotted "
            "line is the target.",
            curves,
        ),
    ]


def _curve(row: Row, column: int, task: Settings, log: str) -> list[tuple[float, float]]:
    """Return the points of a curve that are known: epochs, bytes or seconds, and the quality as it is shown."""
    known = [point for point in row.get("curve") or [] if all(number(value) is not None for value in point)]
    return [(point[column], point[3] * scale(task)) for point in known if point[column] > 0 or not log]


def window(finals: Sequence[float], sign: int) -> tuple[float, float]:
    """Return the limits of an axis of qualities: room for all that did not diverge, and for the way there.

    >>> window([96.0, 90.0], 1)
    (72.0, 97.2)
    """
    # One diverged run would press all other curves into a line.
    best = max(finals) if sign > 0 else min(finals)
    gaps = sorted(abs(best - value) for value in finals)
    usual = gaps[len(gaps) // 2]
    reach = max(gap for gap in gaps if gap <= 8 * usual) or 0.01 * abs(best) or 0.01
    low, high = sorted((best - 4 * sign * reach, best + 0.2 * sign * reach))
    return low, high


# -- kernels ---------------------------------------------------------------------------------------------------------


def _kernels(results: Results, looks: Mapping[str, Look]) -> list[Figure]:
    colors = {"encode": "C0", "decode": "C1", "memory": "C2"}
    x, y, marks = "bits per element", "vNMSE of one rank", {"--": 1.0}
    draw_errors = partial(lines, x=x, y=y, looks=looks, log="xy", linestyle="", across=marks)
    errors, times, most = dict[str, Panel](), dict[str, Panel](), 0.0
    for (tensor,), some in cases(results.rows, "tensor").items():
        series = series_of(some, "bits_per_element", "vnmse", "xy")
        if series:
            errors[f"{tensor} tensor"] = partial(draw_errors, series=series)
        parts = {row["method"]: [number(row.get(f"{part}_copies")) or 0.0 for part in colors] for row in some}
        lengths = sorted(sum(each) for each in parts.values() if any(each))
        if lengths:
            taken = {method: each for method, each in sorted(parts.items(), key=lambda one: sum(one[1])) if any(each)}
            end = 2 * CLIP * lengths[len(lengths) // 2]
            times[f"{tensor} tensor"] = partial(
                bars, x="multiples of the time of one copy", rows=taken, parts=colors, end=end
            )
            most = max(most, height_of_bars(taken))
    return [
        Figure(
            "Error against bits",
            "Left is smaller, down is more exact. At the dashed line the error is as large as the gradient; what lies "
            "near it relies on error feedback, or on the mean over many ranks. Exact methods are not drawn.",
            errors,
        ),
        Figure(
            "Time of encoding and decoding",
            "How long a rank computes, as multiples of the time in which the same machine copies the tensor once. "
            "Longer bars are cut; the number behind the name counts.",
            times,
            most,
        ),
    ]
