"""Figures of training: GRACE's two (quality against volume and against throughput), curves, time to the target."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.quality import Settings, better, quality_axis, scale, shown
from grace.bench.common.text import clean, digits, number, of_bytes, of_rate, power, short
from grace.bench.report.figures.bars import Bar, Mark, horizontal
from grace.bench.report.figures.labels import Box, at_the_right, beside_points, keys_at_the_right, text_width
from grace.bench.report.figures.style import INK, MUTED, Figure, Look, Panel, label_axes, panel, set_margins, svg
from grace.bench.report.rows import cases

FAR = 8
"""Ratio of throughputs from which on their axis is logarithmic."""
Rows = Sequence[Mapping[str, Any]]


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
    limits = sorted((best - sign * 1.05 * reach, best + sign * 0.05 * reach))
    if others:
        return limits[0], limits[1]
    return limits[0] - 0.12 * reach, limits[1] + 0.12 * reach


def _trade(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> Figure:
    panels = []
    found = cases(rows, "bandwidth")
    finals = [row["quality"] * scale(settings) for row in rows]
    spread = max([number(row.get("quality_spread")) or 0 for row in rows], default=0) * scale(settings)
    low, high = window(finals, [], better(settings)) if finals else (0.0, 1.0)
    limits = (low - min(spread, high - low), high + min(spread, high - low))
    relative = any(number(row.get("relative_volume")) for row in rows)
    key, x = (
        ("relative_volume", "bytes sent, relative to none (log scale)")
        if relative
        else ("sent_bytes_per_step", "bytes sent per rank and step (log scale)")
    )
    first = next(iter(found.values()), [])
    drawn = _scatter(first, key, settings, looks, limits, x, log=True)
    if drawn:
        about = f"Points of {quality_axis(settings)}, against {x}: " + _describe(first, key, settings)
        panels.append(Panel("against bytes", svg(drawn, f"{name}-volume", about), about))
    relative = any(number(row.get("relative_throughput")) for row in rows)
    key, x = (
        ("relative_throughput", "samples per second, relative to none")
        if relative
        else ("samples_per_s", "samples per second, all ranks together")
    )
    for i, ((rate,), some) in enumerate(found.items()):
        drawn = _scatter(some, key, settings, looks, limits, x, log=False)
        if drawn:
            about = f"Points of {quality_axis(settings)}, against {x}, {of_rate(rate)}: " + _describe(
                some, key, settings
            )
            panels.append(Panel(f"against throughput, {of_rate(rate)}", svg(drawn, f"{name}-speed{i}", about), about))
    seeds = len(settings.get("seeds") or [])
    mean = f"the mean of {seeds} seeds, with half their range as the bar" if seeds > 1 else "of one seed"
    caption = (
        f"One point is a method's final {settings.get('metric', 'quality')}, {mean}. Left: the further left, the "
        "fewer bytes. Right: the further right, the faster it trains, codec included. "
        f"{'Up' if better(settings) > 0 else 'Down'} is better in both; a method is of use where it is "
        "level with none (the dashed line) and left of it, or right of it."
    )
    return Figure(f"Final {settings.get('metric', 'quality')} against bytes and against speed", caption, panels)


def _scatter(rows: Rows, key: str, settings: Settings, looks: Mapping, limits: Any, x: str, log: bool) -> Any:
    known = [row for row in rows if (number(row.get(key)) or 0) > 0]
    if not known:
        return None
    values = [row[key] for row in known]
    if not log and max(values) > FAR * min(values):
        log, x = True, f"{x} (log scale)"
    drawing, axes = panel(372 + 8 * max(0, len(known) - 10))
    set_margins(drawing, axes, 50, 16, 38, 42)
    if log:
        axes.set_xscale("log")
    low, high = limits
    points, bars, levels = [], [], []
    for row in known:
        value, spread = row["quality"] * scale(settings), (number(row.get("quality_spread")) or 0) * scale(settings)
        look = looks[str(row["method"])]
        outside = not low <= value <= high
        at = min(max(value, low), high)
        label = str(row["method"]) + (f" ({shown(row['quality'], settings)})" if outside else "")
        marker = ("v" if value < low else "^") if outside else look.marker
        whisker = {"yerr": None if outside or not spread else spread, "elinewidth": 1.4, "capsize": 3}
        form = {"color": look.color, "marker": marker, "markersize": 7, "linestyle": ""}
        axes.errorbar(row[key], at, **whisker, **form, clip_on=False, zorder=3)
        points.append((label, row[key], at))
        bars.append((row[key], at - spread, at + spread))
        if row["method"] == "none":
            levels.append(at)
            axes.axhline(at, color=INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
    xs = [point[1] for point in points]
    if log:
        room = max(1.6, (max(xs) / min(xs)) ** 0.08)
        room = max(room, (10 * min(xs) / max(xs)) ** 0.5)  # a decade at least has a tick
        axes.set_xlim(min(xs) / room, max(xs) * room)
        axes.xaxis.set_major_formatter(
            (lambda value, _: of_bytes(value, 1)) if key == "sent_bytes_per_step" else (lambda value, _: power(value))
        )
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    else:
        axes.set_xlim(0, max(xs) * 1.08)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_ylim(low, high)
    label_axes(axes, x, quality_axis(settings))
    obstacles: list[Box] = []
    for at_x, bottom, top in bars:
        (left, base), (_, peak) = axes.transData.transform([(at_x, bottom), (at_x, top)])
        obstacles.append((left - 3, base, left + 3, peak))
    frame = axes.get_window_extent()
    for line in levels:
        at_y = axes.transData.transform((1, line))[1]
        obstacles.append((frame.x0, at_y - 1, frame.x1, at_y + 1))
    beside_points(axes, points, obstacles)
    return drawing


def _curves(rows: Rows, settings: Settings, looks: Mapping[str, Look], name: str) -> Figure:
    kinds = [
        (0, "epochs", "epochs", False),
        (1, "bytes", "bytes sent per rank so far (log scale)", True),
        (2, "seconds", "seconds of training so far", False),
    ]
    panels = []
    for i, ((rate,), some) in enumerate(cases(rows, "bandwidth").items()):
        lines = {str(row["method"]): line for row in some if (line := _curve(row, settings))}
        if not lines:
            continue
        for column, key, x, log in kinds:
            if i and key != "seconds":
                continue  # the same whatever the bandwidth
            drawn = _curve_panel(lines, column, settings, looks, x, log)
            if drawn:
                title = f"against {key}" + (f", {of_rate(rate)}" if key == "seconds" else "")
                about = f"Lines of {quality_axis(settings)}, against {x}: " + "; ".join(
                    f"{who} ends at {shown(line[-1][3] / scale(settings), settings)}" for who, line in lines.items()
                )
                panels.append(Panel(title, svg(drawn, f"{name}-{key}{i}", about), about))
    metric = settings.get("metric", "quality")
    means = ", means over seeds" if len(settings.get("seeds") or []) > 1 else ""
    caption = (
        f"The test {metric} while training{means}. Against epochs, methods that lie below each other lose "
        "quality; against bytes, the line furthest left learns most from what it sends; against seconds, the line "
        "furthest left is the one to use. Early parts far from the final values are left out; the dotted "
        "line is the target."
    )
    return Figure(f"{str(metric).capitalize()} while training", caption, panels)


def _curve(row: Mapping[str, Any], settings: Settings) -> list[tuple[float, float, float, float]]:
    found = []
    for point in row.get("curve") or []:
        values = [value for value in map(number, point) if value is not None]
        if len(values) == 4:
            found.append((values[0], values[1], values[2], values[3] * scale(settings)))
    return found


def _curve_panel(lines: Mapping[str, Any], column: int, settings: Settings, looks: Mapping, x: str, log: bool) -> Any:
    drawing, axes = panel(max(320, 14 * len(lines) + 90))
    right = max(text_width(drawing, short(who, 26)) for who in lines) + (24 if column == 0 else 38)
    set_margins(drawing, axes, 50, min(210, right), 38, 42)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: of_bytes(value, 1))
        axes.xaxis.set_minor_formatter(lambda value, _: "")
    sign = better(settings)
    finals = [line[-1][3] for line in lines.values()]
    low, high = window(finals, [point[3] for line in lines.values() for point in line], sign)
    ends = []
    for who, line in lines.items():
        points = [(point[column], point[3]) for point in line if point[column] > 0 or not log]
        if not points:
            continue
        look = looks[who]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=look.color, linestyle=look.dash, linewidth=1.6)
        end = (xs[-1], min(max(ys[-1], low), high))
        axes.plot(*end, marker=look.marker, color=look.color, markersize=5, clip_on=False)
        ends.append((who, *end, look))
    if not ends:
        return None
    target = number(settings.get("target"))
    if target is not None and low < target * scale(settings) < high:
        axes.axhline(target * scale(settings), color=MUTED, linewidth=1.2, linestyle=":", zorder=1)
    axes.set_ylim(low, high)
    axes.margins(x=0.02)
    if not log:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.locator_params(axis="x", nbins=6)
    label_axes(axes, x, quality_axis(settings))
    if column == 0:
        at_the_right(axes, ends)
    else:
        axes.autoscale(False)
        keys_at_the_right(axes, [(who, look) for who, _, _, look in sorted(ends, key=lambda end: end[1])])
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
            parts = [(0.0, "full")] if seconds is None else [(seconds, "full")]
            bars.append(Bar(str(row["method"]), parts, text, look, group=int(seconds is None)))
        none = next((row for row in some if row["method"] == "none" and row.get("seconds_to_target")), None)
        marks: list[Mark] = [("none", none["seconds_to_target"], (0, (4, 2)))] if none else []
        drawing = horizontal(bars, "seconds of training until the target was reached", marks)
        about = f"Bars of the time to {shown(target, settings)}, {of_rate(rate)}: " + ", ".join(
            f"{bar.name} {bar.text}" for bar in bars
        )
        panels.append(Panel(of_rate(rate), svg(drawing, f"{name}-target{i}", about), about))
    caption = (
        f"Seconds of training, evaluation left out, until the test {settings.get('metric', 'quality')} was "
        f"{shown(target, settings)} or better for the first time; means over seeds, "
        "of methods that reached it with all seeds. The dashed line is none's time: a method pays "
        "where its bar ends left of it."
    )
    return Figure(f"Time to {shown(target, settings)}", caption, panels)


def _describe(rows: Rows, key: str, settings: Settings) -> str:
    return "; ".join(f"{row['method']} {shown(row['quality'], settings)} at {digits(row.get(key))}" for row in rows)
