"""Tables of ``grace bench kernels``, and how to read them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.clocks import facts_line
from grace.bench.common.results import Results
from grace.bench.common.tables import figures_table
from grace.bench.common.text import of_bytes
from grace.core.registry import make

VOTES = "*"
"""Mark of methods whose aggregate is not on the scale of a gradient."""
SLACK = 500_000
"""Bytes by which a process's peak may be off."""
LITTLE = 0.05
"""Copies: in less, most of the tensor cannot be touched."""
ON_DEVICE = (
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
Row = dict[str, Any]


def show(console: Console, results: Results) -> None:
    """Print a table of times for each tensor and one of errors, and how to read them."""
    rows = results.rows
    if not rows:
        return
    kinds = list(dict.fromkeys(row["tensor"] for row in rows))
    for kind in kinds:
        console.print(_times(kind, [row for row in rows if row["tensor"] == kind]))
    console.print(_errors(rows, kinds))
    console.print(explanation(results), markup=False)


def show_on_device(console: Console, results: Results) -> None:
    """Print a table of a GPU's times for each tensor, what was left out, and how to read them."""
    console.print(facts_line(results.settings, results.versions), markup=False)
    for kind in dict.fromkeys(row["tensor"] for row in results.rows):
        console.print(_times_on_device(kind, [row for row in results.rows if row["tensor"] == kind]))
    for why in results.settings.get("skipped", {}).values():
        console.print(f"Left out: {why}", markup=False)
    if results.rows:
        console.print(ON_DEVICE, markup=False, style="dim")


def _table(title: str, headers: Sequence[str]) -> Table:
    return figures_table("method", headers, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))


def _times(kind: str, rows: Sequence[Row]) -> Table:
    parts = ["encode\ncopies", "decode\ncopies", "memory\ncopies", "encode\nGB/s", "decode\nGB/s"]
    table = _table(f"Time and memory: {kind}", ["bits /\nelement", *parts, "extra\nmemory"])
    for row in rows:
        table.add_row(
            escape(row["method"]),
            f"{row['bits_per_element']:.2f}",
            *(copies(row[f"{part}_copies"]) for part in ("encode", "decode")),
            "-" if row["memory"] == "none" else copies(row["memory_copies"]),
            *(rate(row[f"{part}_gbps"], row[f"{part}_copies"]) for part in ("encode", "decode")),
            extra(row["peak_extra_bytes"], row["device"]),
        )
    return table


def _errors(rows: Sequence[Row], kinds: Sequence[str]) -> Table:
    table = _table("Errors", ["tensor", "vNMSE\none rank", "vNMSE\naggregate", "bias\naggregate"])
    table.columns[1].justify = "left"
    for method in dict.fromkeys(row["method"] for row in rows):
        name = escape(method) + (VOTES if votes(method) else "")
        for row in (row for kind in kinds for row in rows if (row["tensor"], row["method"]) == (kind, method)):
            cells = (error(row["vnmse"]), error(row["aggregate_vnmse"]), bias(row["bias"], row["bias_floor"]))
            last = row["tensor"] == kinds[-1] and len(kinds) > 1
            table.add_row(name, row["tensor"], *cells, end_section=last)
            name = ""
    return table


def _times_on_device(kind: str, rows: Sequence[Row]) -> Table:
    """Return a table of one tensor; rows of rivals have no floors."""
    copied = 8 * rows[0]["elements"] / rows[0]["copy_ms"] / 1e6
    headers = ["bits /\nelement", *(head for part in PARTS.values() for head in (f"{part}\nms", "of\ncopy"))]
    table = _table(f"{kind}: a copy moves {copied:,.0f} GB/s", [*headers, "round\ntrip ms"])
    for row in rows:
        eager, cells = str(row["eager"]).split(", "), list[str]()
        for part in PARTS:
            encoding = row["encode_ms"] if part == "memory" and row["memory_ms"] is not None else 0.0
            fraction = row.get(f"{part}_fraction")
            cells.append(milliseconds(row[f"{part}_ms"], part in eager, encoding or 0.0))
            cells.append("" if fraction is None else f"{100 * fraction:.0f} %")
        bits = row["bits_per_element"]
        trip = milliseconds(row["round_trip_ms"], "round_trip" in eager)
        table.add_row(escape(row["method"]), "" if bits is None else f"{bits:.2f}", *cells, trip)
    return table


def milliseconds(ms: float | None, eager: bool, more: float = 0.0) -> str:
    """Format a time, marked where the host takes part.

    >>> milliseconds(0.1234, False), milliseconds(12.3, True, more=1.0), milliseconds(None, False)
    ('0.123', '13.3*', '')
    """
    return "" if ms is None else f"{ms + more:.3g}{'*' if eager else ''}"


def votes(method: str) -> bool:
    """Return True if the aggregate of a method is a vote."""
    return bool(make("compressor", method).votes)


def copies(value: float) -> str:
    """Format a time in copies."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def rate(gbps: float, taken: float) -> str:
    """Format a rate, unless next to nothing of the tensor was touched.

    >>> rate(3.14159, 4.0), rate(41.62, 0.9), rate(123.4, 0.1), rate(99999.0, 0.0001)
    ('3.14', '41.6', '123', '-')
    """
    return "-" if taken < LITTLE else f"{gbps:.{max(0, 3 - len(str(int(gbps))))}f}"


def extra(nbytes: int | None, device: str) -> str:
    """Format an amount of memory, as well as it is known: that of a process is counted with a slack.

    >>> extra(2_000_000, "cpu"), extra(4096, "cpu"), extra(4096, "cuda"), extra(None, "cpu")
    ('2.00 MB', '< 0.5 MB', '4.10 kB', '?')
    """
    if nbytes is None:
        return "?"
    return f"< {SLACK / 1e6:g} MB" if device == "cpu" and nbytes < SLACK else of_bytes(nbytes)


def error(value: float | None) -> str:
    """Format an error with three digits.

    >>> error(0.0), error(0.91557), error(1424556.0), error(4.2e-08), error(None)
    ('0', '0.916', '1.42e+06', '4.2e-08', '?')
    """
    return "?" if value is None else f"{value:.3g}"


def bias(value: float | None, floor: float | None) -> str:
    """Format a bias, or the bound that it is below if none was seen.

    >>> bias(0.957, 0.001), bias(0.0, 0.0412), bias(0.0, 0.0)
    ('0.957', '< 0.041', '0')
    """
    return f"< {floor:.2g}" if value == 0 and floor else error(value)


def explanation(results: Results) -> str:
    """Return the meanings of the columns, and their floors."""
    settings, rows = results.settings, results.rows
    height, width = settings["error_shape"]
    memories = f"{settings['memory']} for all" if settings["memory"] else "each method's own, '-' where it has none"
    uncounted = any(row["peak_extra_bytes"] is None for row in rows)
    lines = [
        "copies: multiples of the time of one copy_ of the tensor, which moves "
        f"{settings['copy_gbps']:.3g} GB/s (GB/s: the whole tensor's bytes, once; '-' where next to nothing of it is "
        "touched). The floor is memory traffic: 0.5 copies for encoding, which reads the tensor once, and 1 to 1.5 for "
        "decoding, which adds to a dense one; less where only a part is touched.",
        f"memory copies: error feedback's compensate and update, which decodes, too ({memories}).",
        "extra memory: the most held at once in two steps, beyond the gradient and its aggregate"
        + (" ('?': this system does not count it)." if uncounted else "."),
        f"vNMSE: E|C(x) - x|^2 / |x|^2, of one rank's gradient ({height * width:,} elements), and of the aggregate of "
        f"{settings['ranks']} ranks against their mean. bias: |E[aggregate] - mean| / |mean|; '< b': none was seen, "
        "and one of b would have been.",
    ]
    if any(votes(row["method"]) for row in rows):
        lines.append(f"{VOTES} the aggregate is a vote, not a mean: neither it nor its error is on a gradient's scale.")
    return "\n".join(lines)
