"""Tables and verdicts of ``grace bench step``."""

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from grace.bench.common.results import Results, Row
from grace.bench.common.tables import figures_table
from grace.bench.common.text import of_bytes, scenario

ROOMY = 100
"""Width of the terminal, in characters, from which on all columns are shown."""
HOW_TO_READ = (
    "step: the median; ±: half of the quartiles' distance; codec: Grace's encoding and decoding; exposed: the "
    "communication that the step waits for, of baselines with their codec; sent, received: in a step, of the rank that "
    "moved most; wire: those bytes over the bandwidth."
)
OF_SHARDS = (
    "Of shard groups: bytes are those that left or entered a group, of the one that moved most, where links are "
    "emulated or nodes have addresses of their own; codec: of what replicas exchange. Shard groups alone exchange "
    "within each group only, and exposed is what the exchange between groups adds to that."
)


def show(console: Console, results: Results) -> None:
    """Show a table and a verdict per scenario."""
    measured = dict.fromkeys((row["ranks"], row["bandwidth"]) for row in results.rows)
    sharded = results.settings.get("sharded", 0)
    for ranks, rate in measured:
        rows = [row for row in results.rows if (row["ranks"], row["bandwidth"]) == (ranks, rate)]
        name = scenario(ranks, rate)
        groups = f", in shard groups of {sharded}" if sharded else ""
        console.print(f"\n[bold]{results.settings['model']}, {name}{groups}[/]", soft_wrap=True)
        console.print(table(rows, console.width, "group" if sharded else "rank"))
        console.print(results.settings.get("verdict", {}).get(name, "Interrupted before the verdict."))
    if measured:
        console.print(HOW_TO_READ, style="dim")
    if measured and sharded:
        console.print(OF_SHARDS, style="dim")
    for name, reason in results.settings.get("skipped", {}).items():
        console.print(f"Left out: {name}: {reason}", markup=False, style="dim")


def table(rows: list[Row], width: int = 80, whose: str = "rank") -> Table:
    """Return the table of one scenario's rows; a wide one has bytes received and samples per second too."""
    plain = next((row["name"] for row in rows if row["speedup"] == 1.0), None)
    columns: dict[str, Callable[[Row], str]] = {
        "step\nms": lambda row: number(row["step_ms"]),
        "±": lambda row: number((row["step_high_ms"] - row["step_low_ms"]) / 2),
        f"against\n{plain or 'plain'}": lambda row: f"{row['speedup']:.2f}x" if row["speedup"] else "",
        "codec\nms": lambda row: number(row["codec_ms"]),
        "exposed\nms": lambda row: number(row["exposed_ms"]),
        f"sent\n/ {whose}": lambda row: amount(row["sent_bytes"]),
        f"received\n/ {whose}": lambda row: amount(row["received_bytes"]),
        "wire\nms": lambda row: number(row["wire_ms"]),
        "samples\n/ s": lambda row: number(row["samples_per_s"]),
    }
    if width < ROOMY:
        del columns[f"received\n/ {whose}"], columns["samples\n/ s"]
    made = figures_table("", list(columns))
    engines = dict.fromkeys(row["engine"] for row in rows)
    for row in rows:
        label = row["name"] + (f" ({row['engine']}'s ranks)" if row["kind"] == "bound" and len(engines) > 1 else "")
        style = {"grace": "", "baseline": "cyan", "bound": "dim"}[row["kind"]]
        paying = row["pays"] and row["kind"] == "grace"
        made.add_row(label, *(cell(row) for cell in columns.values()), style="bold" if paying else style)
    return made


def amount(count: float | None) -> str:
    """Format bytes, if they are known."""
    return "" if count is None else of_bytes(count)


def number(value: float | None) -> str:
    """Format a number with three digits, and no more than needed; empty if it is unknown.

    >>> [number(x) for x in (None, 0.1234, 5.678, 56.78, 5678.9)]
    ['', '0.12', '5.68', '56.8', '5679']
    """
    return "" if value is None else f"{value:.{max(0, 3 - len(str(int(value))))}f}"
