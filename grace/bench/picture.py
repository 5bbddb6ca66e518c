"""The picture of a training benchmark: quality against bytes sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grace.bench.table import human_bytes
from grace.bench.task import task_class
from grace.bench.training import Settings

COLORS = ("#333333", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""
STYLES = ("-", "--", ":", "-.")


def draw(path: Path, results: list[dict[str, Any]], settings: Settings) -> None:
    """One line per method; bytes on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    task = task_class(settings.task)
    figure = Figure(figsize=(8, 4.8) if len(results) <= len(COLORS) else (12, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, result in enumerate(results):
        sent, quality = zip(*result["curve"], strict=True)
        color, style = COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)]
        line = [task.scale * q for q in quality]
        axes.plot(sent, line, color=color, linestyle=style, linewidth=1.8, label=_label(result, task))
        axes.plot(sent[-1], line[-1], "o", color=color, markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value, digits=0))
    if task.unit == "%":
        axes.set_ylim(0, 102)
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "235" else "")
    axes.set_xlabel("bytes sent per rank, cumulative (log scale)")
    axes.set_ylabel(f"test {task.metric}" + (f" ({task.unit})" if task.unit else ""))
    seeds = f", mean of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    about = f"{task.about}, {settings.ranks} ranks, {settings.epochs or task.epochs} epochs{seeds}"
    axes.set_title(f"Test {task.metric} against bytes sent", loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=9, color="#555555")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    many = len(results) > len(COLORS)
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if many else {"loc": "lower right"}
    if not task.higher_is_better and not many:
        place = {"loc": "lower left"}
    axes.legend(**place, fontsize=9, frameon=True, framealpha=0.95, edgecolor="#dddddd")
    figure.savefig(path)


def _label(result: dict[str, Any], task: Any) -> str:
    return f"{result['method']}: {task.scale * result['quality']:.3g} {task.unit}".rstrip() + (
        f", {human_bytes(result['curve'][-1][0])}"
    )
