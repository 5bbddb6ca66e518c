"""Figures of training: GRACE's two (quality against volume and against throughput), curves, time to the target."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.quality import Settings, better, quality_axis, scale, shown
from grace.bench.common.text import clean, digits, labels, number, of_bytes, of_rate
from grace.bench.report.figures import style
from grace.bench.report.figures.bars import Bar, Mark, bars_panel
from grace.bench.report.figures.style import DASHED, INK, MUTED, Drawing, Figure, Look, Panel
from grace.bench.report.rows import Rows, cases

FAR = 8
"""Ratio of throughputs from which on their axis is logarithmic."""
CURVES = {
    "epochs": "epochs",
    "bytes": "bytes sent per rank so far (log scale)",
    "seconds": "seconds of training so far",
}
"""Labels of the axes of curves, in the order of a curve's points."""
Curve = list[tuple[float, float, float, float]]
"""Points of a curve: epochs, bytes, seconds, quality as it is shown."""


def figures(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> list[Figure]:
    """Return all figures that the rows allow, for each optimizer; ``name`` is the prefix of their elements' ids."""
    rows = [row for row in rows if number(row.get("quality")) is not None]
    found: list[Figure] = []
    by_optimizer = cases(rows, "optimizer")
    for i, ((optimizer,), some) in enumerate(by_optimizer.items()):
        for draw in (_trade, _curves, _target):
            figure = draw(some, settings, looks, f"{name}-{i}")
            title = f"{figure.title}, {clean(optimizer)}" if len(by_optimizer) > 1 else figure.title
            found.append(dataclasses.replace(figure, title=title))
    return [figure for figure in found if figure.panels]


def window(finals: Sequence[float], others: Sequence[float], sign: int) -> tuple[float, float]:
    """Return the limits of an axis: all of ``finals`` that did not diverge, and as much of ``others`` as leaves them
    room.

    >>> window([96.0, 90.0], [10.0, 50.0], 1)
    (70.8, 97.2)
    >>> low, high = window([5.0, 6.0, 1e30], [], -1); high < 50
    True
    """
    best = max(finals) if sign > 0 else min(finals)
    gaps = sorted(abs(best - value) for value in finals)
    usual = gaps[len(gaps) // 2]
    reach = max([gap for gap in gaps if gap <= max(8 * usual, 0.02 * abs(best))] + [0.01 * abs(best) or 0.01])
    if others:
        reach = max(reach, min(4 * reach, max(abs(best - value) for value in others)))
    low, high = sorted((best - sign * 1.05 * reach, best + sign * 0.05 * reach))
    margin = 0.0 if others else 0.12 * reach
    return low - margin, high + margin


def _trade(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> Figure:
    found = cases(rows, "bandwidth")
    finals = [row["quality"] * scale(settings) for row in rows]
    spread = max([number(row.get("quality_spread")) or 0 for row in rows], default=0) * scale(settings)
    low, high = window(finals, [], better(settings)) if finals else (0.0, 1.0)
    limits = (low - min(spread, high - low), high + min(spread, high - low))
    volume = ("sent_bytes_per_step", "bytes sent per rank and step (log scale)")
    if any(number(row.get("relative_volume")) for row in rows):
        volume = ("relative_volume", "bytes sent, relative to none (log scale)")
    speed = ("samples_per_s", "samples per second, all ranks together")
    if any(number(row.get("relative_throughput")) for row in rows):
        speed = ("relative_throughput", "samples per second, relative to none")
    drawn = [("against bytes", "volume", "", volume, next(iter(found.values()), []))]
    for i, ((rate,), some) in enumerate(found.items()):
        drawn.append((f"against throughput, {of_rate(rate)}", f"speed{i}", f", {of_rate(rate)}", speed, some))
    panels = []
    for title, ident, where, (key, x), some in drawn:
        drawing = _scatter(some, key, settings, looks, limits, x)
        if drawing is not None:
            points = "; ".join(
                f"{row['method']} {shown(row['quality'], settings)} at {digits(row.get(key))}" for row in some
            )
            about = f"Points of {quality_axis(settings)}, against {x}{where}: {points}"
            panels.append(Panel.of(title, drawing, f"{name}-{ident}", about))
    seeds = len(settings.get("seeds") or [])
    mean = f"the mean of {seeds} seeds, with half their range as the bar" if seeds > 1 else "of one seed"
    caption = (
        f"One point is a method's final {settings.get('metric', 'quality')}, {mean}. Left: the further left, the "
        "fewer bytes. Right: the further right, the faster it trains, codec included. "
        f"{'Up' if better(settings) > 0 else 'Down'} is better in both; a method is of use where it is "
        "level with none (the dashed line) and left of it, or right of it."
    )
    return Figure(f"Final {settings.get('metric', 'quality')} against bytes and against speed", caption, panels)


def _scatter(
    rows: Rows, key: str, settings: Settings, looks: Mapping[str, Look], limits: tuple[float, float], x: str
) -> Drawing | None:
    """Return a panel of final qualities against the figure under a key; None if no row has it."""
    known = [row for row in rows if (number(row.get(key)) or 0) > 0]
    if not known:
        return None
    values = [row[key] for row in known]
    log = key in ("relative_volume", "sent_bytes_per_step")
    if not log and max(values) > FAR * min(values):
        log, x = True, f"{x} (log scale)"
    drawing, axes = style.panel(300, names=len(known))
    if log:
        show = (lambda value: of_bytes(value, 1)) if key == "sent_bytes_per_step" else None
        style.log_scale(axes, "x", min(values) / 1.6, max(values) * 1.6, show)
    else:
        axes.set_xlim(0, max(values) * 1.08)
        style.plain_ticks(axes)
    low, high = limits
    axes.set_ylim(low, high)
    names = labels(str(row["method"]) for row in known)
    for row in known:
        value, spread = row["quality"] * scale(settings), (number(row.get("quality_spread")) or 0) * scale(settings)
        look = looks[str(row["method"])]
        outside = not low <= value <= high
        at = min(max(value, low), high)
        label = names[str(row["method"])] + (f" ({shown(row['quality'], settings)})" if outside else "")
        marker = ("v" if value < low else "^") if outside else look.marker
        whisker: dict[str, Any] = {"yerr": None if outside or not spread else spread, "elinewidth": 1.4, "capsize": 3}
        form: dict[str, Any] = {"color": look.color, "marker": marker, "markersize": 7, "linestyle": ""}
        axes.errorbar(row[key], at, **whisker, **form, clip_on=False, zorder=3, label=label)
        if row["method"] == "none":
            axes.axhline(at, color=INK, linewidth=1, linestyle=DASHED, zorder=1)
    style.legend(drawing, axes)
    style.label_axes(axes, x, quality_axis(settings))
    return drawing


def _curves(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    for i, ((rate,), some) in enumerate(cases(rows, "bandwidth").items()):
        curves = {str(row["method"]): _curve(row, settings) for row in some}
        curves = {method: curve for method, curve in curves.items() if curve}
        finals = "; ".join(
            f"{method} ends at {shown(curve[-1][3] / scale(settings), settings)}" for method, curve in curves.items()
        )
        for column, (key, x) in enumerate(CURVES.items()):
            if i and key != "seconds":
                continue  # the same whatever the bandwidth
            drawing = _curve_panel(curves, column, settings, looks, x)
            if drawing is not None:
                title = f"against {key}" + (f", {of_rate(rate)}" if key == "seconds" else "")
                about = f"Lines of {quality_axis(settings)}, against {x}: {finals}"
                panels.append(Panel.of(title, drawing, f"{name}-{key}{i}", about))
    metric = settings.get("metric", "quality")
    means = ", means over seeds" if len(settings.get("seeds") or []) > 1 else ""
    caption = (
        f"The test {metric} while training{means}. Against epochs, methods that lie below each other lose "
        "quality; against bytes, the line furthest left learns most from what it sends; against seconds, the line "
        "furthest left is the one to use. Early parts far from the final values are left out; the dotted "
        "line is the target."
    )
    return Figure(f"{str(metric).capitalize()} while training", caption, panels)


def _curve(row: Mapping[str, Any], settings: Settings) -> Curve:
    found = []
    for point in row.get("curve") or []:
        values = [value for value in map(number, point) if value is not None]
        if len(values) == 4:
            found.append((values[0], values[1], values[2], values[3] * scale(settings)))
    return found


def _curve_panel(
    curves: Mapping[str, Curve], column: int, settings: Settings, looks: Mapping[str, Look], x: str
) -> Drawing | None:
    """Return a panel of qualities against a column of the curves' points; None if no curve has points."""
    log = "log" in x
    lines = {
        method: [(point[column], point[3]) for point in curve if point[column] > 0 or not log]
        for method, curve in curves.items()
    }
    lines = {method: points for method, points in lines.items() if points}
    if not lines:
        return None
    drawing, axes = style.panel(300, names=len(lines))
    finals = [points[-1][1] for points in lines.values()]
    low, high = window(finals, [point[3] for curve in curves.values() for point in curve], better(settings))
    names = labels(lines)
    for method, points in lines.items():
        look = looks[method]
        form: dict[str, Any] = {"color": look.color, "linestyle": look.dash, "marker": look.marker, "markersize": 5}
        axes.plot(*zip(*points, strict=True), **form, linewidth=1.6, markevery=[-1], label=names[method])
    target = number(settings.get("target"))
    if target is not None and low < target * scale(settings) < high:
        axes.axhline(target * scale(settings), color=MUTED, linewidth=1.2, linestyle=":", zorder=1)
    axes.set_ylim(low, high)
    if log:
        xs = [at for points in lines.values() for at, _ in points]
        style.log_scale(axes, "x", min(xs) / 1.1, max(xs) * 1.1, lambda value: of_bytes(value, 1))
    else:
        axes.set_xlim(left=0)
        style.plain_ticks(axes)
    style.legend(drawing, axes)
    style.label_axes(axes, x, quality_axis(settings))
    return drawing


def _target(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    target = settings.get("target")
    seeds = len(settings.get("seeds") or []) or 1
    for i, ((rate,), some) in enumerate(cases(rows, "bandwidth").items()):
        if number(target) is None or not any(number(row.get("seconds_to_target")) for row in some):
            continue
        some = sorted(some, key=lambda row: number(row.get("seconds_to_target")) or math.inf)
        bars = []
        for row in some:
            seconds, look = number(row.get("seconds_to_target")), looks[str(row["method"])]
            missed = f"not reached ({row.get('reached') or 0} of {seeds} seeds)" if seeds > 1 else "not reached"
            text = missed if seconds is None else f"{digits(seconds)} s"
            bars.append(Bar(str(row["method"]), [(seconds or 0.0, "full")], text, look, group=int(seconds is None)))
        none = next((row for row in some if row["method"] == "none" and row.get("seconds_to_target")), None)
        marks: list[Mark] = [("none", none["seconds_to_target"], DASHED)] if none else []
        x, what = "seconds of training until the target was reached", f"the time to {shown(target, settings)}"
        what += f", {of_rate(rate)}"
        panels.append(bars_panel(of_rate(rate), bars, x, f"{name}-target{i}", what, marks=marks))
    caption = (
        f"Seconds of training, evaluation left out, until the test {settings.get('metric', 'quality')} was "
        f"{shown(target, settings)} or better for the first time; means over seeds, "
        "of methods that reached it with all seeds. The dashed line is none's time: a method pays "
        "where its bar ends left of it."
    )
    return Figure(f"Time to {shown(target, settings)}", caption, panels)
