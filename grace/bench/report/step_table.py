"""Tables and verdicts of ``grace bench step``."""

from rich.console import Console
from rich.table import Table

from grace.bench.common.results import Results, Row
from grace.bench.common.tables import Columns, grouped, table
from grace.bench.common.text import UNKNOWN, digits, number, of_bytes, scenario
from grace.bench.report.rows import plain_row

ROOMY = 100
"""Width of the terminal, in characters, from which on all columns are shown."""
STYLES = {"grace": "", "baseline": "cyan", "bound": "dim"}
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
    """Show a table and a verdict for each scenario, and how to read them."""
    settings, scenarios = results.settings, grouped(results.rows, "ranks", "bandwidth")
    sharded = settings.get("sharded", 0)
    for (ranks, rate), rows in scenarios.items():
        name = scenario(ranks, rate)
        groups = f", in shard groups of {sharded}" if sharded else ""
        console.print(
            f"\n{settings.get('model', 'a model')}, {name}{groups}", style="bold", markup=False, soft_wrap=True
        )
        console.print(scenario_table(rows, console.width, "group" if sharded else "rank"))
        words = settings.get("verdict", {}).get(name, "" if results.complete else "Interrupted before the verdict.")
        console.print(f"\n{words}", markup=False)
    if scenarios:
        console.print(f"\n{HOW_TO_READ}", style="dim")
    if scenarios and sharded:
        console.print(OF_SHARDS, style="dim")
    for name, reason in settings.get("skipped", {}).items():
        console.print(f"Left out: {name}: {reason}", markup=False, style="dim")
    if settings.get("about"):  # a simulated wire's
        counts = {
            row["name"]: (number(row.get("waits_per_step")), number(row.get("reads_per_step"))) for row in results.rows
        }
        waits = [
            f"{name} {waits:g} and {reads:g}"
            for name, (waits, reads) in counts.items()
            if waits is not None and reads is not None
        ]
        console.print(f"{results.gpu}\n{settings['about']}", markup=False)
        if waits:
            said = f"Waits of the host for the device, and reads from it, in a step: {'; '.join(waits)}."
            console.print(said, markup=False)


def scenario_table(rows: list[Row], width: int = 80, whose: str = "rank") -> Table:
    """Return the table of one scenario's rows; a wide one has bytes received and samples per second too."""
    plain = (plain_row(rows) or {"name": "plain"})["name"]
    engines = {row["engine"] for row in rows}

    def name(row: Row) -> str:
        several = row["kind"] == "bound" and len(engines) > 1
        return row["name"] + (f" ({row['engine']}'s ranks)" if several else "")

    def spread(row: Row) -> str:
        low, high = number(row.get("step_low_ms")), number(row.get("step_high_ms"))
        return UNKNOWN if low is None or high is None else digits((high - low) / 2)

    def speedup(row: Row) -> str:
        known = number(row.get("speedup"))
        return "" if known is None else f"{known:.2f}x"

    columns: Columns[Row] = {
        "": name,
        "step\nms": lambda row: digits(row["step_ms"]),
        "±": spread,
        f"against\n{plain}": speedup,
        "codec\nms": lambda row: digits(row.get("codec_ms")),
        "exposed\nms": lambda row: digits(row.get("exposed_ms")),
        f"sent\n/ {whose}": lambda row: of_bytes(row.get("sent_bytes")),
        "wire\nms": lambda row: digits(row.get("wire_ms")),
    }
    if width >= ROOMY:
        columns |= {
            f"received\n/ {whose}": lambda row: of_bytes(row.get("received_bytes")),
            "samples\n/ s": lambda row: digits(row.get("samples_per_s")),
        }

    def style(row: Row) -> str:
        return "bold" if row.get("pays") and row["kind"] == "grace" else STYLES.get(row["kind"], "")

    return table(rows, columns, style=style)
