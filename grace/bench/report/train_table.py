"""Tables of ``grace bench train``, and how to read them."""

from rich.console import Console
from rich.table import Table

from grace.bench.common.quality import against_none, shown
from grace.bench.common.results import Results, Row, Settings
from grace.bench.common.tables import Columns, grouped, table
from grace.bench.common.text import digits, number, of_bytes, show_rate


def show(console: Console, results: Results) -> None:
    """Show a table for each network and optimizer, and how to read them."""
    tables = grouped(results.rows, "bandwidth", "optimizer")
    rates, optimizers = {rate for rate, _ in tables}, {optimizer for _, optimizer in tables}
    for (rate, optimizer), rows in tables.items():
        where = ["loopback" if rate is None else show_rate(rate)] if rate is not None or len(rates) > 1 else []
        where += [optimizer] if len(optimizers) > 1 else []
        if where:
            console.print(f"\n{', '.join(where)}", style="bold", markup=False)
        console.print(results_table(rows, results.settings))
    if tables:
        console.print(f"\n{advice(results.settings)}", markup=False)
    for name, reason in results.settings.get("skipped", {}).items():
        console.print(f"Left out: {name}: {reason}", markup=False, style="dim")


def results_table(rows: list[Row], task: Settings) -> Table:
    """Return the table of one network, a row for each method; its quality is compared with that of ``none``."""
    plain = next((number(row["quality"]) for row in rows if row["method"] == "none"), None)
    seeds = len(task.get("seeds") or [])

    def quality(row: Row) -> str:
        text = shown(row["quality"], task, unit=False)
        return text if seeds < 2 else f"{text} ± {shown(row.get('quality_spread'), task, unit=False)}"

    def against(row: Row) -> str:
        if plain is None or row["method"] == "none" or number(row["quality"]) is None:
            return ""
        return against_none(task, row["quality"], plain, number(row.get("shortfall")))

    def until(row: Row) -> str:
        seconds = number(row.get("seconds_to_target"))
        return f"{row.get('reached') or 0} of {max(1, seeds)}" if seconds is None else digits(seconds)

    columns: Columns[Row] = {
        "method": lambda row: row["method"],
        "sent\n/ step": lambda row: of_bytes(row.get("sent_bytes_per_step")),
        "bits /\nelement": lambda row: digits(row.get("bits_per_element")),
        "step\nms": lambda row: digits(row.get("step_ms")),
        f"{task.get('metric', 'quality')}\n{task.get('unit') or ''}".strip(): quality,
        "against\nnone" if task.get("unit") == "%" else "gain\nlacking": against,
    }
    if task.get("target") is not None:
        columns |= {f"s until\n{shown(task['target'], task)}": until}
    return table(rows, columns)


def advice(task: Settings) -> str:
    """Return an explanation of the tables, for someone who sees them for the first time."""
    if task.get("ranks") == 1:
        return "One rank has nobody to send to: use --ranks 2 to compare bytes."
    text = (
        "How to read it: bytes sent are those that left each rank in a step, counted, and bits those of one number of "
        "the gradient."
    )
    if task.get("unit") != "%":
        text += " Gain lacking: the part of none's gain that the method does not reach."
    if task.get("bandwidths") == [None]:
        text += (
            " Within one machine bytes are almost free, so compression does not make the step faster; over a slow "
            "network the step waits for its bytes, and there sending fewer pays."
        )
    return text
