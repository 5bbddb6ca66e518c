"""The demo's table, and how to read it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from grace.bench.demo import Settings


def human_bytes(count: float, digits: int = 3) -> str:
    """A number of bytes with a decimal unit; ``digits`` significant ones, or 0 for a round number.

    >>> human_bytes(1_204_264), human_bytes(77_812), human_bytes(0), human_bytes(1e7, digits=0)
    ('1.20 MB', '77.8 kB', '0 B', '10 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    if units[0] == "B" or not digits:
        return f"{count:.0f} {units[0]}"
    decimals = max(0, digits - len(str(int(count))))
    return f"{count:.{decimals}f} {units[0]}"


def results_table(results: list[dict[str, Any]], settings: Settings) -> Table:
    """One row per method."""
    seeds = len(settings.seeds)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=None)
    table.add_column("method", no_wrap=True)
    for header in ("sent per\nstep + rank", "wire bits\n/ element", "codec\n/ step", "step\ntime", "test\naccuracy"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        accuracy = f"{100 * result['accuracy']:.1f} %"
        if seeds > 1:
            accuracy = f"{100 * result['accuracy']:.1f} ± {100 * result['accuracy_spread']:.1f} %"
        table.add_row(
            result["method"],
            human_bytes(result["sent_bytes_per_step"]),
            f"{result['bits_per_element']:.2f}",
            f"{result['codec_ms']:.2f} ms",
            f"{result['step_ms']:.2f} ms",
            accuracy,
        )
    return table
