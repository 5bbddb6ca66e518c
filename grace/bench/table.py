"""The demo's table, and how to read it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from grace.bench.demo import EPOCHS, Settings


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for header in ("bytes sent /\nstep and rank", "wire bits\n/ element", "codec\nms", "step\nms", "accuracy\n%"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        accuracy = f"{100 * result['accuracy']:.1f}"
        if len(settings.seeds) > 1:
            accuracy += f" ± {100 * result['accuracy_spread']:.1f}"
        table.add_row(
            result["method"],
            human_bytes(result["sent_bytes_per_step"]),
            f"{result['bits_per_element']:.2f}",
            f"{result['codec_ms']:.2f}",
            f"{result['step_ms']:.2f}",
            accuracy,
        )
    return table


def advice(results: list[dict[str, Any]], settings: Settings) -> str:
    """How to read the table, for someone who sees it for the first time."""
    if settings.ranks == 1:
        return "One rank has nobody to send to: use --ranks 2 to compare bytes."
    text = (
        "How to read it: bytes sent are those that left each rank in a step, counted; codec is the time to encode and "
        "decode them, a part of the step. Within one machine bytes are almost free, so compression does not make the "
        "step faster; over a slow network the step waits for its bytes, and there sending fewer pays."
    )
    if settings.epochs < EPOCHS:
        return f"{text} After {settings.epochs} epochs the accuracies say little yet."
    plain = next((result["accuracy"] for result in results if result["method"] == "none"), None)
    if plain is None or len(results) == 1:
        return text
    worst = min((r for r in results if r["method"] != "none"), key=lambda r: r["accuracy"])
    lost = 100 * (plain - worst["accuracy"])
    if lost <= 0:
        return f"{text} Here no method lost accuracy against none."
    return f"{text} Here the most accuracy lost against none is {lost:.1f} points ({worst['method']})."
