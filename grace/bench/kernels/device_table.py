"""The tables of ``grace bench kernels --device cuda``, and how to read them."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.clocks import facts_line
from grace.bench.common.results import Results
from grace.bench.common.tables import figures_table

HOW_TO_READ = (
    "ms: the median. of copy: the bytes that the part cannot do without, over its time, as a fraction of what a copy_ "
    "of the same tensor moves in the same run; 100 % is as fast as the device's memory. Floors in bytes an element: "
    "encode reads 4 (again in each round) and writes what is sent; with memory 8 more for the residual; decode reads "
    "what was sent, and reads and writes 8 of each element that it touches. exchange: a whole bucket as the optimizer "
    "encodes and decodes it, without a network: means are written, 4. round trip: encode and decode; of torch's hooks "
    "the whole call.\n"
    "Times are CUDA's events around replays of CUDA graphs, the L2 cache flushed before each. *: it waits for the host "
    "and was timed as it runs."
)
PARTS = {"encode": "encode", "memory": "encode, memory", "decode": "decode", "exchange": "exchange"}


def show(console: Console, results: Results) -> None:
    """A table for each tensor, what was left out, and how to read it."""
    settings = results.settings
    console.print(facts_line(settings, results.versions), markup=False)
    for tensor in dict.fromkeys(row["tensor"] for row in results.rows):
        console.print(table([row for row in results.rows if row["tensor"] == tensor]))
    for why in settings.get("skipped", {}).values():
        console.print(f"Left out: {why}", markup=False)
    if results.rows:
        console.print(HOW_TO_READ, markup=False, style="dim")


def table(rows: list[dict[str, Any]]) -> Table:
    """Of one tensor; rows of rivals have no floors."""
    copied = 8 * rows[0]["elements"] / rows[0]["copy_ms"] / 1e6
    headers = ["bits /\nelement", *(head for part in PARTS.values() for head in (f"{part}\nms", "of\ncopy"))]
    title = f"{rows[0]['tensor']}: a copy moves {copied:,.0f} GB/s"
    looks: Any = {"title": title, "title_justify": "left", "padding": (0, 1, 0, 0)}
    made = figures_table("method", [*headers, "round\ntrip ms"], **looks)
    for row in rows:
        eager, cells = str(row["eager"]).split(", "), list[str]()
        for part in PARTS:
            both = row["encode_ms"] if part == "memory" and row["memory_ms"] is not None else 0.0
            cells += [time(row[f"{part}_ms"], part in eager, both or 0.0), share(row.get(f"{part}_fraction"))]
        bits = row["bits_per_element"]
        trip = time(row["round_trip_ms"], "round_trip" in eager)
        made.add_row(escape(row["method"]), "" if bits is None else f"{bits:.2f}", *cells, trip)
    return made


def time(ms: float | None, eager: bool, more: float = 0.0) -> str:
    """Milliseconds, marked where the host takes part.

    >>> time(0.1234, False), time(12.3, True, more=1.0), time(None, False)
    ('0.123', '13.3*', '')
    """
    return "" if ms is None else f"{ms + more:.3g}{'*' if eager else ''}"


def share(fraction: float | None) -> str:
    """Of what a copy moves.

    >>> share(0.8765), share(None)
    ('88 %', '')
    """
    return "" if fraction is None else f"{100 * fraction:.0f} %"
