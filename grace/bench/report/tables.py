"""Tables of a report, as HTML."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grace.bench.common.quality import shown
from grace.bench.common.text import UNKNOWN, clean, digits, format_count, number, of_bytes, of_rate, of_seconds
from grace.bench.report.figures.style import Look, escaped, themed
from grace.bench.report.rows import identity

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        title: the header, plain text.
        unit: the text below the title; may be empty.
        value: returns a row's sort key: a number, a text, or None.
        text: returns the text of a row's cell.
        css: returns the class of a row's cell.
        words: True if the column holds text, which is aligned at the left.
    """

    title: str
    unit: str
    value: Callable[[Row], Any]
    text: Callable[[Row], str]
    css: Callable[[Row], str] = lambda row: ""
    words: bool = False


def figure_of(key: str, title: str, unit: str = "", show: Callable[[Any], str] = digits) -> Column:
    """Return a column of numbers that rows have under a key."""
    return Column(title, unit, lambda row: number(row.get(key)), lambda row: show(row.get(key)))


def words_of(key: str, title: str) -> Column:
    """Return a column of texts that rows have under a key."""

    def text(row: Row) -> str:
        return clean(row[key]) if isinstance(row.get(key), str) else ""

    return Column(title, "", text, text, words=True)


def bandwidth_column() -> Column:
    """Return the column of the emulated link's rate; no link sorts as the fastest."""
    return Column(
        "bandwidth", "", lambda row: number(row.get("bandwidth")) or 1e30, lambda row: of_rate(row.get("bandwidth"))
    )


def table(rows: Sequence[Row], columns: Sequence[Column], looks: Mapping[str, Look], name: str) -> str:
    """Return a table whose columns can be sorted; a column that no row has a value for is left out.

    Args:
        rows: the rows in their first order.
        columns: the first one names the row, and has a dot of the method's colour.
        looks: the looks of methods.
        name: the name of the table for screen readers.
    """
    columns = [column for column in columns if any(column.value(row) not in (None, "") for row in rows)]
    heads = "".join(
        f'<th scope="col"{_class("text" if column.words else "")}><button type="button">{escaped(column.title)}'
        + (f"<small>{escaped(column.unit)}</small>" if column.unit else "")
        + "</button></th>"
        for column in columns
    )
    lines = []
    for row in rows:
        cells = [_cell(column, row) for column in columns]
        look = looks.get(identity(row))
        dot = f'<b style="background:{themed(look.color)}"></b>' if look else ""
        cells[0] = cells[0].replace(">", f">{dot}", 1)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(name)}"><table><thead><tr>{heads}</tr>'
        f"</thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def _cell(column: Column, row: Row) -> str:
    value = column.value(row)
    css = " ".join(filter(None, ["text" if column.words else "", column.css(row)]))
    text = column.text(row)
    data = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    sort = "" if data == clean(text) else f' data-value="{escaped(data)}"'
    return f"<td{_class(css)}{sort}>{escaped(text)}</td>"


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def step_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of results of kind "step"."""

    def quartiles(row: Row) -> str:
        low, high = number(row.get("step_low_ms")), number(row.get("step_high_ms"))
        return UNKNOWN if low is None or high is None else f"{digits(low)} \u2013 {digits(high)}"

    def pays(row: Row) -> str:
        return "yes" if row.get("pays") is True else "no" if row.get("pays") is False else ""

    return [
        words_of("name", "method"),
        *([words_of("engine", "engine")] if len({row.get("engine") for row in rows}) > 1 else []),
        figure_of("ranks", "ranks", "", format_count),
        bandwidth_column(),
        figure_of("step_ms", "step", "ms, median"),
        Column("quartiles", "ms", lambda row: number(row.get("step_low_ms")), quartiles),
        Column(
            "speedup",
            "over plain",
            lambda row: number(row.get("speedup")),
            lambda row: UNKNOWN if number(row.get("speedup")) is None else f"{row['speedup']:.2f}\u00d7",
        ),
        Column(
            "pays",
            "",
            lambda row: {"": None}.get(pays(row), pays(row)),
            pays,
            lambda row: {"yes": "good", "no": "bad"}.get(pays(row), ""),
            words=True,
        ),
        figure_of("compute_ms", "compute", "ms"),
        figure_of("codec_ms", "codec", "ms"),
        figure_of("exposed_ms", "exposed", "ms"),
        figure_of("wire_ms", "on the wire", "ms"),
        figure_of("sent_bytes", "sent", "per rank, step", of_bytes),
        figure_of("received_bytes", "received", "per rank, step", of_bytes),
        figure_of("samples_per_s", "throughput", "samples/s"),
        figure_of("steps", "steps", "measured", format_count),
    ]


def train_columns(settings: Mapping[str, Any]) -> list[Column]:
    """Return the columns of results of kind "train"."""
    seeds = len(settings.get("seeds") or []) or 1

    def quality(row: Row) -> str:
        text = shown(row.get("quality"), settings)
        spread = number(row.get("quality_spread"))
        return text if seeds == 1 or spread is None else f"{text} ± {shown(spread, settings)}"

    return [
        words_of("method", "method"),
        *([words_of("optimizer", "optimizer")] if len(settings.get("optimizers") or []) > 1 else []),
        bandwidth_column(),
        Column(str(settings.get("metric", "quality")), "test, final", lambda row: number(row.get("quality")), quality),
        figure_of("bits_per_element", "bits", "per element"),
        figure_of("sent_bytes_per_step", "sent", "per rank, step", of_bytes),
        figure_of("relative_volume", "volume", "relative to none"),
        figure_of("step_ms", "step", "ms"),
        figure_of("codec_ms", "codec", "ms"),
        figure_of("samples_per_s", "throughput", "samples/s"),
        figure_of("relative_throughput", "throughput", "relative to none"),
        figure_of("train_seconds", "training", "without evaluation", of_seconds),
        Column(
            "target reached",
            "seeds",
            lambda row: number(row.get("reached")),
            lambda row: UNKNOWN if number(row.get("reached")) is None else f"{row['reached']:.0f} of {seeds}",
        ),
        figure_of("epochs_to_target", "to target", "epochs"),
        figure_of("bytes_to_target", "to target", "bytes sent", of_bytes),
        figure_of("seconds_to_target", "to target", "time", of_seconds),
        figure_of("lr", "learning rate"),
    ]


def kernels_columns() -> list[Column]:
    """Return the columns of results of kind "kernels"."""
    return [
        words_of("method", "method"),
        words_of("tensor", "tensor"),
        figure_of("bits_per_element", "bits", "per element"),
        figure_of("vnmse", "vNMSE", "one rank"),
        figure_of("aggregate_vnmse", "vNMSE", "of the mean"),
        figure_of("bias", "bias", "relative"),
        *(figure_of(f"{key}_copies", key, "copies") for key in ("encode", "decode", "memory")),
        *(figure_of(f"{key}_ms", key, "ms") for key in ("encode", "decode", "memory")),
        figure_of("copy_ms", "one copy", "ms"),
        figure_of("encode_gbps", "encode", "GB/s"),
        figure_of("decode_gbps", "decode", "GB/s"),
        figure_of("peak_extra_bytes", "extra memory", "peak", of_bytes),
        figure_of("elements", "elements", "", format_count),
        words_of("device", "device"),
    ]
