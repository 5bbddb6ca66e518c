"""The demo's picture: test accuracy against bytes sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grace.bench.demo import Settings
from grace.bench.table import human_bytes

COLORS = ("#333333", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""


def draw(path: Path, results: list[dict[str, Any]], settings: Settings) -> None:
    """One line per method; bytes on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, result in enumerate(results):
        sent, accuracy = zip(*result["curve"], strict=True)
        color = COLORS[i % len(COLORS)]
        axes.plot(sent, [100 * a for a in accuracy], color=color, linewidth=1.8, label=_label(result))
        axes.plot(sent[-1], 100 * accuracy[-1], "o", color=color, markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value, digits=0))
    axes.set_ylim(0, 102)
    axes.set_xlabel("bytes sent per rank, cumulative (log scale)")
    axes.set_ylabel("test accuracy (%)")
    seeds = f", mean of {len(settings.seeds)} seeds" if len(settings.seeds) > 1 else ""
    about = f"scikit-learn's digits, {settings.ranks} ranks, {settings.epochs} epochs{seeds}"
    axes.set_title("Test accuracy against bytes sent", loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, about, transform=axes.transAxes, fontsize=9, color="#555555")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=9, frameon=True, framealpha=0.95, edgecolor="#dddddd")
    figure.savefig(path)


def _label(result: dict[str, Any]) -> str:
    return f"{result['method']}: {100 * result['accuracy']:.1f} %, {human_bytes(result['curve'][-1][0])}"
