"""The table of a training benchmark, and how to read it."""

from rich.table import Table

from grace.bench.common.quality import against_none, shown
from grace.bench.common.results import Results, Row
from grace.bench.common.tables import figures_table
from grace.bench.common.text import of_bytes


def results_table(rows: list[Row], results: Results) -> Table:
    """Return the table of one network, a row for each method; its quality is compared with that of ``none``."""
    task = results.settings
    plain = _plain(rows)
    headers = ["sent\n/ step", "bits /\nelement", "step\nms", f"{task['metric']}\n{task['unit']}".strip()]
    if plain is not None and len(rows) > 1:
        headers.append("against\nnone" if task["unit"] == "%" else "gain\nlacking")
    headers += [f"s until\n{shown(task['target'], task)}"] if task["target"] is not None else []
    table = figures_table("method", headers)
    for row in rows:
        quality = shown(row["quality"], task, unit=False)
        if len(task["seeds"]) > 1:
            quality += f" ± {shown(row['quality_spread'], task, unit=False)}"
        cells = [
            row["method"],
            of_bytes(row["sent_bytes_per_step"]),
            f"{row['bits_per_element']:.2f}",
            f"{row['step_ms']:.2f}",
            quality,
        ]
        if plain is not None and len(rows) > 1:
            own = row["method"] == "none"
            cells.append("" if own else against_none(task, row["quality"], plain, row["shortfall"]))
        if task["target"] is not None:
            seconds, missed = row["seconds_to_target"], f"{row['reached']} of {len(row['runs'])}"
            cells.append(missed if seconds is None else f"{seconds:.2f}")
        table.add_row(*cells)
    return table


def _plain(rows: list[Row]) -> float | None:
    return next((row["quality"] for row in rows if row["method"] == "none"), None)


def advice(rows: list[Row], results: Results) -> str:
    """Return an explanation of the table, for someone who sees it for the first time."""
    task = results.settings
    if task["ranks"] == 1:
        return "One rank has nobody to send to: use --ranks 2 to compare bytes."
    text = (
        "How to read it: bytes sent are those that left each rank in a step, counted, and bits those of one number of "
        "the gradient."
    )
    if task["bandwidths"] == [None]:
        text += (
            " Within one machine bytes are almost free, so compression does not make the step faster; over a slow "
            "network the step waits for its bytes, and there sending fewer pays."
        )
    plain = _plain(rows)
    if plain is None or len(rows) == 1:
        return text
    points = task["unit"] == "%"
    if not points:
        text += " Gain lacking: the part of none's gain that the method does not reach."
    sign = -1 if task["higher_is_better"] else 1
    worst = max((row for row in rows if row["method"] != "none"), key=lambda row: sign * row["quality"])
    if sign * (worst["quality"] - plain) <= 0:
        return f"{text} Here no method's {task['metric']} is worse than that of none."
    lost = against_none(task, worst["quality"], plain, worst["shortfall"]) + (" points" if points else " lacking")
    return f"{text} Here the {task['metric']} that is worst against none is {worst['method']}'s ({lost})."
