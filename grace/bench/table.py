"""The table of a training benchmark, and how to read it."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from grace.bench.task import task_class
from grace.bench.training import Settings


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
    """One row per method; its quality relative to that of "none", if that is there."""
    task = task_class(settings.task)
    plain = _plain(results)
    others = len(results) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    headers = ["bytes sent\n/ step", "bits /\nelement", "codec\nms", "step\nms"]
    for header in [
        *headers,
        f"{task.metric}\n{task.unit}".strip(),
        *(["against\nnone"] if plain is not None and others else []),
    ]:
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        quality = f"{task.scale * result['quality']:.{1 if task.unit else 2}f}"
        if len(settings.seeds) > 1:
            quality += f" ± {task.scale * result['quality_spread']:.{1 if task.unit else 2}f}"
        row = [
            result["method"],
            human_bytes(result["sent_bytes_per_step"]),
            f"{result['bits_per_element']:.2f}",
            f"{result['codec_ms']:.2f}",
            f"{result['step_ms']:.2f}",
            quality,
        ]
        if plain is not None and others:
            row.append(difference(task, result["quality"], plain) if result["method"] != "none" else "")
        table.add_row(*row)
    return table


def difference(task: Any, quality: float, plain: float) -> str:
    """How a quality differs from the uncompressed one: in points where it is in percent, else relatively.

    >>> difference(task_class("digits"), 0.95, 0.97), difference(task_class("charlm"), 5.5, 5.0)
    ('-2.0', '+10.0 %')
    """
    if task.unit == "%":
        return f"{100 * (quality - plain):+.1f}"
    return f"{100 * (quality / plain - 1):+.1f} %"


def _plain(results: list[dict[str, Any]]) -> float | None:
    return next((result["quality"] for result in results if result["method"] == "none"), None)


def advice(results: list[dict[str, Any]], settings: Settings) -> str:
    """How to read the table, for someone who sees it for the first time."""
    if settings.ranks == 1:
        return "One rank has nobody to send to: use --ranks 2 to compare bytes."
    task = task_class(settings.task)
    text = (
        "How to read it: bytes sent are those that left each rank in a step, counted, and bits those of one number of "
        "the gradient; codec is the time to encode and decode them, a part of the step. Within one machine bytes are "
        "almost free, so compression does not make the step faster; over a slow network the step waits for its bytes, "
        "and there sending fewer pays."
    )
    if settings.epochs is not None and settings.epochs < task.epochs:
        return f"{text} After so few epochs ({settings.epochs}) the {task.metric} says little yet."
    plain = _plain(results)
    if plain is None or len(results) == 1:
        return text
    sign = -1 if task.higher_is_better else 1
    worst = max((r for r in results if r["method"] != "none"), key=lambda r: sign * r["quality"])
    if sign * (worst["quality"] - plain) <= 0:
        return f"{text} Here no method's {task.metric} is worse than that of none."
    lost = difference(task, worst["quality"], plain) + (" points" if task.unit == "%" else "")
    return f"{text} Here the {task.metric} that is worst against none is {worst['method']}'s ({lost})."
