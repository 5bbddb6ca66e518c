"""The tables of ``grace bench kernels``, and how to read them."""

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from grace.bench.common.results import Results
from grace.bench.common.text import of_bytes
from grace.core.registry import make

VOTES = "*"
"""Marks methods whose aggregate is not on the scale of a gradient."""
SLACK = 500_000
"""Bytes by which a process's peak may be off."""
LITTLE = 0.05
"""Copies: in less, most of the tensor cannot be touched."""


def tables(results: Results) -> list[Table]:
    """One table of times for each tensor, and one of errors."""
    kinds = list(dict.fromkeys(row["tensor"] for row in results.rows))
    return [*(_times(results.rows, kind) for kind in kinds), _errors(results.rows, kinds)]


def _times(rows: list[dict[str, Any]], kind: str) -> Table:
    table = _table(f"Time and memory: {kind}", [])
    headers = ["bits /\nelement", "encode\ncopies", "decode\ncopies", "memory\ncopies"]
    for header in [*headers, "encode\nGB/s", "decode\nGB/s", "extra\nmemory"]:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row["tensor"] == kind:
            table.add_row(
                escape(row["method"]),
                f"{row['bits_per_element']:.2f}",
                *(copies(row[f"{part}_copies"]) for part in ("encode", "decode")),
                "-" if row["memory"] == "none" else copies(row["memory_copies"]),
                *(rate(row[f"{part}_gbps"], row[f"{part}_copies"]) for part in ("encode", "decode")),
                extra(row["peak_extra_bytes"], row["device"]),
            )
    return table


def _errors(rows: list[dict[str, Any]], kinds: list[str]) -> Table:
    table = _table("Errors", ["tensor"])
    for header in ("vNMSE\none rank", "vNMSE\naggregate", "bias\naggregate"):
        table.add_column(header, justify="right", no_wrap=True)
    for method in dict.fromkeys(row["method"] for row in rows):
        name = escape(method) + (VOTES if votes(method) else "")
        for kind in kinds:
            for row in rows:
                if (row["method"], row["tensor"]) == (method, kind):
                    cells = (error(row["vnmse"]), error(row["aggregate_vnmse"]), bias(row["bias"], row["bias_floor"]))
                    table.add_row(name, kind, *cells, end_section=kind == kinds[-1] and len(kinds) > 1)
                    name = ""
    return table


def _table(title: str, more: list[str]) -> Table:
    looks: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", title_style="bold", **looks)
    table.add_column("method", overflow="fold")
    for header in more:
        table.add_column(header, no_wrap=True)
    return table


def votes(method: str) -> bool:
    """Whether the aggregate of a method is a vote.

    >>> votes("signum"), votes("efsignsgd")
    (True, False)
    """
    return bool(make("compressor", method).votes)


def copies(value: float) -> str:
    """A time in copies.

    >>> copies(0.532), copies(12.34), copies(0.00001)
    ('0.53', '12.3', '0.00')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def rate(gbps: float, taken: float) -> str:
    """A rate, unless next to nothing of the tensor was touched.

    >>> rate(3.14159, 4.0), rate(41.62, 0.9), rate(123.4, 0.1), rate(99999.0, 0.0001)
    ('3.14', '41.6', '123', '-')
    """
    return "-" if taken < LITTLE else f"{gbps:.{max(0, 3 - len(str(int(gbps))))}f}"


def extra(nbytes: int | None, device: str) -> str:
    """An amount of memory, as well as it is known: that of a process is counted with a slack.

    >>> extra(2_000_000, "cpu"), extra(4096, "cpu"), extra(4096, "cuda"), extra(None, "cpu")
    ('2.00 MB', '< 0.5 MB', '4.10 kB', '?')
    """
    if nbytes is None:
        return "?"
    return f"< {SLACK / 1e6:g} MB" if device == "cpu" and nbytes < SLACK else of_bytes(nbytes)


def error(value: float | None) -> str:
    """An error of three digits.

    >>> error(0.0), error(0.91557), error(1424556.0), error(4.2e-08), error(None)
    ('0', '0.916', '1.42e+06', '4.2e-08', '?')
    """
    return "?" if value is None else f"{value:.3g}"


def bias(value: float | None, floor: float | None) -> str:
    """A bias, or what it must be below if none was seen.

    >>> bias(0.957, 0.001), bias(0.0, 0.0412), bias(0.0, 0.0)
    ('0.957', '< 0.041', '0')
    """
    return f"< {floor:.2g}" if value == 0 and floor else error(value)


def explanation(results: Results) -> str:
    """What the columns mean, and what their floors are."""
    settings, rows = results.settings, results.rows
    rows_, columns = settings["error_shape"]
    memories = f"{settings['memory']} for all" if settings["memory"] else "each method's own, '-' where it has none"
    said = [
        "copies: multiples of the time of one copy_ of the tensor, which moves "
        f"{settings['copy_gbps']:.3g} GB/s (GB/s: the whole tensor's bytes, once; '-' where next to nothing of it is "
        "touched). The floor is memory traffic: 0.5 copies for encoding, which reads the tensor once, and 1 to 1.5 for "
        "decoding, which adds to a dense one; less where only a part is touched.",
        f"memory copies: error feedback's compensate and update, which decodes, too ({memories}).",
        "extra memory: the most held at once in two steps, beyond the gradient and its aggregate"
        + (" ('?': this system does not count it)." if any(row["peak_extra_bytes"] is None for row in rows) else "."),
        f"vNMSE: E|C(x) - x|^2 / |x|^2, of one rank's gradient ({rows_ * columns:,} elements), and of the aggregate of "
        f"{settings['ranks']} ranks against their mean. bias: |E[aggregate] - mean| / |mean|; '< b': none was seen, "
        "and one of b would have been.",
    ]
    if any(votes(row["method"]) for row in rows):
        said.append(f"{VOTES} the aggregate is a vote, not a mean: neither it nor its error is on a gradient's scale.")
    return "\n".join(said)
