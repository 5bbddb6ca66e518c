"""Tables of a report, as HTML."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.bench.common.quality import shown
from grace.bench.common.text import UNKNOWN, clean, digits, format_count, number, of_bytes, of_rate, of_seconds
from grace.bench.report.figures.style import Look, escaped, themed
from grace.bench.report.rows import Row, identity

NO_LINK = 1e30
"""Sort key of a bandwidth without an emulated link: the fastest."""
PAYS = {True: "yes", False: "no"}
CLASSES = {"yes": "good", "no": "bad", "taken": "good"}
"""CSS classes of cells with these texts."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        key: the key that rows have its values under.
        title: the header, plain text.
        unit: the text below the title; may be empty.
        show: formats a number.
        words: True if the values are texts, which are aligned at the left.
        text: returns the text of a row's cell, where the value alone does not say it.
        missing: the sort key of rows without a value.
    """

    key: str
    title: str
    unit: str = ""
    show: Callable[[Any], str] = digits
    words: bool = False
    text: Callable[[Row], str] | None = None
    missing: float | None = None

    def sort_key(self, row: Row) -> str:
        """Return the value that the column is sorted by; empty if it is unknown."""
        value = row.get(self.key)
        if self.words:
            return clean(value) if isinstance(value, str) else ""
        known = number(value)
        found = self.missing if known is None else known
        return "" if found is None else f"{found:.9g}"

    def cell(self, row: Row) -> tuple[str, str]:
        """Return the sort key and the text of a row's cell."""
        key = self.sort_key(row)
        if self.text is not None:
            return key, clean(self.text(row))
        return key, key if self.words else clean(self.show(row.get(self.key)))


def figure_of(key: str, title: str, unit: str = "", show: Callable[[Any], str] = digits) -> Column:
    """Return a column of numbers that rows have under a key."""
    return Column(key, title, unit, show)


def words_of(key: str, title: str) -> Column:
    """Return a column of texts that rows have under a key."""
    return Column(key, title, words=True)


def table(rows: Sequence[Row], columns: Sequence[Column], looks: Mapping[str, Look], name: str) -> str:
    """Return a table whose columns can be sorted; a column that no row has a value for is left out. The first column
    names the row, and has a dot of its look's colour; screen readers read the table's name."""
    columns = [column for column in columns if any(column.sort_key(row) for row in rows)]
    heads = "".join(
        f'<th scope="col"{_class("text" if column.words else "")}><button type="button">{escaped(column.title)}'
        + (f"<small>{escaped(column.unit)}</small>" if column.unit else "")
        + "</button></th>"
        for column in columns
    )
    lines = []
    for row in rows:
        look = looks.get(identity(row))
        dot = f'<b style="background:{themed(look.color)}"></b>' if look else ""
        cells = list[str]()
        for column in columns:
            key, text = column.cell(row)
            css = " ".join(filter(None, ["text" if column.words else "", CLASSES.get(text, "")]))
            sort = "" if key == text else f' data-value="{escaped(key)}"'
            cells.append(f"<td{_class(css)}{sort}>{'' if cells else dot}{escaped(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(name)}"><table><thead><tr>{heads}</tr>'
        f"</thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


BANDWIDTH = Column("bandwidth", "bandwidth", show=of_rate, missing=NO_LINK)


def step_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of results of kind "step"."""

    def quartiles(row: Row) -> str:
        low, high = number(row.get("step_low_ms")), number(row.get("step_high_ms"))
        return UNKNOWN if low is None or high is None else f"{digits(low)} \u2013 {digits(high)}"

    def speedup(value: Any) -> str:
        return UNKNOWN if number(value) is None else f"{value:.2f}\u00d7"

    return [
        words_of("name", "method"),
        *([words_of("engine", "engine")] if len({row.get("engine") for row in rows}) > 1 else []),
        figure_of("ranks", "ranks", show=format_count),
        BANDWIDTH,
        figure_of("step_ms", "step", "ms, median"),
        Column("step_low_ms", "quartiles", "ms", text=quartiles),
        figure_of("speedup", "speedup", "over plain", speedup),
        words_of("pays", "pays"),
        figure_of("compute_ms", "compute", "ms"),
        figure_of("codec_ms", "codec", "ms"),
        figure_of("exposed_ms", "exposed", "ms"),
        figure_of("wire_ms", "on the wire", "ms"),
        figure_of("sent_bytes", "sent", "per rank, step", of_bytes),
        figure_of("received_bytes", "received", "per rank, step", of_bytes),
        figure_of("samples_per_s", "throughput", "samples/s"),
        figure_of("steps", "steps", "measured", format_count),
    ]


def step_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows of kind "step", which say in words whether a method pays."""
    return [{**row, "pays": PAYS.get(row.get("pays"), "")} for row in rows]  # type: ignore[arg-type]


def train_columns(settings: Mapping[str, Any]) -> list[Column]:
    """Return the columns of results of kind "train"."""
    seeds = len(settings.get("seeds") or []) or 1

    def quality(row: Row) -> str:
        text = shown(row.get("quality"), settings)
        spread = number(row.get("quality_spread"))
        return text if seeds == 1 or spread is None else f"{text} ± {shown(spread, settings)}"

    def percent(value: Any) -> str:
        return UNKNOWN if number(value) is None else f"{100 * value:.1f}"

    def reached(value: Any) -> str:
        return UNKNOWN if number(value) is None else f"{value:.0f} of {seeds}"

    return [
        words_of("method", "method"),
        *([words_of("optimizer", "optimizer")] if len(settings.get("optimizers") or []) > 1 else []),
        BANDWIDTH,
        Column("quality", str(settings.get("metric", "quality")), "test, final", text=quality),
        figure_of("shortfall", "gain lacking", "% of none's", percent),
        figure_of("bits_per_element", "bits", "per element"),
        figure_of("sent_bytes_per_step", "sent", "per rank, step", of_bytes),
        figure_of("step_ms", "step", "ms"),
        figure_of("codec_ms", "codec", "ms"),
        figure_of("samples_per_s", "throughput", "samples/s"),
        figure_of("relative_throughput", "speedup", "over none"),
        figure_of("train_seconds", "training", "without evaluation", of_seconds),
        figure_of("reached", "target reached", "seeds", reached),
        figure_of("epochs_to_target", "epochs", "to target"),
        figure_of("bytes_to_target", "bytes", "to target", of_bytes),
        figure_of("seconds_to_target", "time", "to target", of_seconds),
        figure_of("lr", "learning rate"),
    ]


KERNELS = [
    words_of("method", "method"),
    words_of("tensor", "tensor"),
    figure_of("bits_per_element", "bits", "per element"),
    figure_of("vnmse", "vNMSE", "one rank"),
    figure_of("aggregate_vnmse", "vNMSE of mean"),
    figure_of("bias", "bias", "relative"),
    *(figure_of(f"{key}_copies", key, "copies") for key in ("encode", "decode", "memory")),
    *(figure_of(f"{key}_ms", f"{key} time", "ms") for key in ("encode", "decode", "memory")),
    figure_of("copy_ms", "one copy", "ms"),
    *(figure_of(f"{key}_gbps", f"{key} rate", "GB/s") for key in ("encode", "decode")),
    figure_of("peak_extra_bytes", "extra memory", "peak", of_bytes),
    figure_of("elements", "elements", show=format_count),
    words_of("device", "device"),
]
"""Columns of results of kind "kernels"."""
