"""Tables of ``grace bench kernels``, and how to read them."""

from functools import partial

from rich.console import Console
from rich.table import Table

from grace.bench.common.results import Results, Row
from grace.bench.common.tables import Columns, grouped, table
from grace.bench.common.text import UNKNOWN, digits, number, of_bytes
from grace.core.registry import make
from grace.errors import ConfigError

SLACK = 500_000
"""Bytes by which a process's peak may be off."""
LITTLE = 0.05
"""Copies: in less, most of the tensor cannot be touched."""
HOW_TO_READ = (
    "copies: multiples of the time of one copy_ of the tensor{copy} (GB/s: the whole tensor's bytes, once; {unknown} "
    "where next to nothing of it is touched). The floor is memory traffic: 0.5 copies for encoding, which reads the "
    "tensor once, and 1 to 1.5 for decoding, which adds to a dense one; less where only a part is touched.\n"
    "memory copies: error feedback's compensate and update, which decodes, too.\n"
    "extra memory: the most held at once in two steps, beyond the gradient and its aggregate.\n"
    "vNMSE: E|C(x) - x|^2 / |x|^2, of one rank's gradient, and of the aggregate of simulated ranks against their mean. "
    "bias: |E[aggregate] - mean| / |mean|; '< b': none was seen, and one of b would have been."
)
VOTES = "*: the aggregate is a vote, not a mean: neither it nor its error is on a gradient's scale."
ON_DEVICE = (
    "ms: the median. of copy: the bytes that the part cannot do without, over its time, as a fraction of what a copy_ "
    "of the same tensor moves in the same run; 100 % is as fast as the device's memory. Floors in bytes an element: "
    "encode reads 4 (again in each round) and writes what is sent; with memory 8 more for the residual; decode reads "
    "what was sent, and reads and writes 8 of each element that it touches. exchange: a whole bucket as the optimizer "
    "encodes and decodes it, without a network: means are written, 4. round trip: encode and decode.\n"
    "Times are CUDA's events around replays of CUDA graphs, the L2 cache flushed before each. *: it waits for the host "
    "and was timed as it runs."
)


def show(console: Console, results: Results) -> None:
    """Show the tables of times, on a CPU also one of errors, what was left out, and how to read them."""
    settings, tensors = results.settings, grouped(results.rows, "tensor")
    on_device = settings.get("device") == "cuda"
    if on_device:
        console.print(results.gpu, markup=False)
    for (kind,), rows in tensors.items():
        console.print(_times_on_device(kind, rows) if on_device else _times(kind, rows), "")
    for why in settings.get("skipped", {}).values():
        console.print(f"Left out: {why}", markup=False)
    if not tensors:
        return
    if on_device:
        console.print(ON_DEVICE, markup=False, style="dim")
        return
    console.print(_errors(results.rows), "")
    gbps = number(settings.get("copy_gbps"))
    copy = "" if gbps is None else f", which moves {digits(gbps)} GB/s"
    console.print(HOW_TO_READ.format(copy=copy, unknown=UNKNOWN), markup=False, style="dim")
    if any(_votes(row["method"]) for row in results.rows):
        console.print(VOTES, markup=False, style="dim")


def _times(kind: str, rows: list[Row]) -> Table:
    columns: Columns[Row] = {
        "method": lambda row: row["method"],
        "bits /\nelement": lambda row: digits(row.get("bits_per_element")),
        "encode\ncopies": lambda row: digits(row.get("encode_copies")),
        "decode\ncopies": lambda row: digits(row.get("decode_copies")),
        "memory\ncopies": lambda row: "" if row.get("memory") == "none" else digits(row.get("memory_copies")),
        "encode\nGB/s": lambda row: _rate(row, "encode"),
        "decode\nGB/s": lambda row: _rate(row, "decode"),
        "extra\nmemory": lambda row: extra(row.get("peak_extra_bytes")),
    }
    return table(rows, columns, title=f"Time and memory: {kind}", between=1)


def _errors(rows: list[Row]) -> Table:
    columns: Columns[Row] = {
        "method": lambda row: row["method"] + ("*" if _votes(row["method"]) else ""),
        "tensor": lambda row: row["tensor"],
        "vNMSE\none rank": lambda row: digits(row.get("vnmse")),
        "vNMSE\naggregate": lambda row: digits(row.get("aggregate_vnmse")),
        "bias\naggregate": lambda row: bias(row.get("bias"), row.get("bias_floor")),
    }
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ordered = sorted(rows, key=lambda row: methods.index(row["method"]))
    return table(ordered, columns, words=["tensor"], title="Errors")


def _times_on_device(kind: str, rows: list[Row]) -> Table:
    """Return a table of one tensor."""

    def taken(part: str, row: Row) -> str:
        ms = number(row.get(f"{part}_ms"))
        if ms is None:
            return ""
        more = number(row.get("encode_ms")) if part == "memory" else 0.0  # compensating comes with encoding
        return digits(ms + (more or 0.0)) + ("*" if part in str(row.get("eager")).split(", ") else "")

    def fraction(part: str, row: Row) -> str:
        known = number(row.get(f"{part}_fraction"))
        return "" if known is None else f"{100 * known:.0f} %"

    columns: Columns[Row] = {
        "method": lambda row: row["method"],
        "bits /\nelement": lambda row: digits(row.get("bits_per_element")),
    }
    for part, title in {
        "encode": "encode",
        "memory": "encode,\nmemory",
        "decode": "decode",
        "exchange": "exchange",
    }.items():
        columns |= {
            f"{title}\nms": partial(taken, part),
            f"{title}\nof copy": partial(fraction, part),
        }
    columns |= {"round\ntrip ms": partial(taken, "round_trip")}
    elements, copy_ms = number(rows[0].get("elements")), number(rows[0].get("copy_ms"))
    copied = digits(8 * elements / copy_ms / 1e6 if elements and copy_ms else None)
    return table(rows, columns, title=f"{kind}: a copy moves {copied} GB/s", between=1)


def _rate(row: Row, part: str) -> str:
    copies = number(row.get(f"{part}_copies"))
    return UNKNOWN if copies is None or copies < LITTLE else digits(row.get(f"{part}_gbps"))


def _votes(method: str) -> bool:
    """Return True if the aggregate of a method is a vote; False for methods that this Grace does not know."""
    try:
        return bool(make("compressor", method).votes)
    except ConfigError:
        return False


def extra(nbytes: int | None) -> str:
    """Format an amount of memory, as well as it is known: that of a process is counted with a slack.

    >>> extra(2_000_000), extra(4096), extra(None)
    ('2.00 MB', '< 0.5 MB', '–')
    """
    return f"< {SLACK / 1e6:g} MB" if nbytes is not None and nbytes < SLACK else of_bytes(nbytes)


def bias(value: float | None, floor: float | None) -> str:
    """Format a bias, or the bound that it is below if none was seen.

    >>> bias(0.957, 0.001), bias(0.0, 0.0412), bias(0.0, 0.0)
    ('0.957', '< 0.0412', '0')
    """
    return f"< {digits(floor)}" if value == 0 and floor else digits(value)
