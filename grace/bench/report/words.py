"""Meaning of results, in words: the benchmark's own verdict, or a sentence made from its rows."""

from grace.bench.common.quality import better, shown
from grace.bench.common.results import Results
from grace.bench.common.text import digits, number, of_rate
from grace.bench.report.rows import cases


def verdict(results: Results) -> dict[str, str]:
    """Return verdicts by their subject, such as a bandwidth; "" for all results. Empty if there is none.

    >>> verdict(Results("step", {"verdict": {"1gbit": "topk pays."}})), verdict(Results("step", {}))
    ({'1gbit': 'topk pays.'}, {})
    """
    recorded: dict[str, str] = results.settings.get("verdict") or {}
    if recorded or results.kind == "step":
        return {key: words for key, words in recorded.items() if words}
    return _train(results) if results.kind == "train" else _kernels(results)


def _train(results: Results) -> dict[str, str]:
    """Name the methods that send least and train fastest, among those that are no worse than none beyond the seeds'
    spread."""
    settings = results.settings
    sign = better(settings)
    verdicts = {}
    found = cases([row for row in results.rows if number(row.get("quality")) is not None], "bandwidth")
    for (rate,), rows in found.items():
        none = next((row for row in rows if row["method"] == "none"), None)
        others = [row for row in rows if row is not none]
        if none is None or not others:
            continue
        spread = number(none.get("quality_spread")) or 0
        good = [
            row
            for row in others
            if sign * (row["quality"] - none["quality"]) >= -spread - (number(row.get("quality_spread")) or 0)
        ]
        within = "within the spread over seeds" if len(settings.get("seeds") or []) > 1 else "with one seed"
        metric = settings.get("metric", "quality")
        level = f"the {metric} of none ({shown(none['quality'], settings)})"
        text = f"{len(good)} of {len(others)} methods reach {level} {within}"
        small = min(_rows_with(good, "relative_volume"), key=lambda row: row["relative_volume"], default=None)
        fast = max(_rows_with(good, "relative_throughput"), key=lambda row: row["relative_throughput"], default=None)
        if small is not None:
            percent = digits(100 * small["relative_volume"], 2)
            text += f"; of them {small['method']} sends least ({percent} % of none's bytes)"
        if fast is not None and fast["relative_throughput"] > 1:
            text += f"; {fast['method']} is the fastest ({fast['relative_throughput']:.2f}\u00d7 none's throughput)"
        elif fast is not None:
            text += "; no one of them trains faster than none"
        verdicts[of_rate(rate) if len(found) > 1 else ""] = text + "."
    return verdicts


def _kernels(results: Results) -> dict[str, str]:
    """Name the fastest of the methods that shrink a tensor, and the one that sends least."""
    key = "encode_copies"
    rows = [row for row in results.rows if number(row.get(key)) and (number(row.get("bits_per_element")) or 32) < 32]
    if not rows:
        return {}
    fast = min(rows, key=lambda row: row[key] + (number(row.get("decode_copies")) or 0))
    copies = digits(fast[key] + (number(fast.get("decode_copies")) or 0))
    small = min(rows, key=lambda row: row["bits_per_element"])
    return {
        "": f"{fast['method']} is the fastest: it encodes and decodes in the time of {copies} copies of the tensor. "
        f"{small['method']} sends least: {digits(small['bits_per_element'])} bits per element."
    }


def _rows_with(rows: list, key: str) -> list:
    """Return the rows that have a number under a key."""
    return [row for row in rows if number(row.get(key))]
