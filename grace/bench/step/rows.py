"""Rows of a table, made of the events of ranks."""

import statistics
from collections.abc import Iterable
from typing import Any

from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.step import verdicts
from grace.bench.step.settings import Event


class Table:
    """Events of rank 0 of a group of ranks, as rows.

    Args:
        engine: the engine that joins them.
        ranks: the number of ranks.
        rate: bits per second of their link, or None.
    """

    def __init__(self, engine: str, ranks: int, rate: float | None):
        self.engine = engine
        self.ranks = ranks
        self.rate = rate
        self.facts: dict[str, Any] = {}
        self.blocks: dict[str, list[Event]] = {}
        self.about: dict[str, Event] = {}

    def add(self, event: Event) -> None:
        """Add an event of rank 0's."""
        if "facts" in event:
            self.facts.update(event["facts"])
        elif "times_ms" in event:
            self.about.setdefault(event["name"], event)
            self.blocks.setdefault(event["name"], []).append(event)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per contestant that has been measured; compute is the time of the bound's steps."""
        alone = next((blocks for name, blocks in self.blocks.items() if self.about[name]["kind"] == "bound"), [])
        if not alone:
            return []
        compute = statistics.median(_times(alone))
        return [self._row(name, blocks, compute) for name, blocks in self.blocks.items()]

    def _row(self, name: str, blocks: list[Event], compute: float) -> dict[str, Any]:
        times = _times(blocks)
        about = self.about[name]
        rate = self.rate
        low, step, high = quartiles(times)
        codecs = [block["codec_ms"] for block in blocks]
        codec = None if None in codecs else statistics.median(codecs)
        sent, received = (_largest(block[key] for block in blocks) for key in ("sent_bytes", "received_bytes"))
        wire = None if rate is None or sent is None or received is None else 8e3 * max(sent, received) / rate
        compute = step if about["kind"] == "bound" else min(compute, step)
        return {
            "name": name,
            "kind": about["kind"],
            "method": about["method"],
            "engine": self.engine,
            "ranks": self.ranks,
            "bandwidth": rate,
            "step_ms": step,
            "step_low_ms": low,
            "step_high_ms": high,
            "compute_ms": compute,
            "codec_ms": codec,
            "exposed_ms": max(0.0, step - compute - (codec or 0.0)),
            "sent_bytes": sent,
            "received_bytes": received,
            "wire_ms": wire,
            "samples_per_s": 1e3 * about["samples"] * self.ranks / step,
            "speedup": None,
            "steps": len(times),
            "pays": None,
            "times_ms": times,
        }


def conclude(results: Results, first: int, ranks: int, rate: float | None, engine: str) -> None:
    """Write the verdict on the rows from ``first`` on into the settings."""
    results.settings.setdefault("verdict", {})[scenario(ranks, rate)] = verdicts.verdict_text(
        results.rows[first:], engine
    )


def add_verdicts(rows: list[dict[str, Any]], engine: str) -> list[dict[str, Any]]:
    """Return the rows of a scenario, compared with its plain baseline: ``speedup`` and ``pays`` are filled in."""
    plain = verdicts.plain_row(rows, engine)
    for row in rows:
        row["speedup"] = plain["step_ms"] / row["step_ms"] if plain else None
        judge = plain is not None and row["kind"] != "bound" and row is not plain
        row["pays"] = verdicts.pays(row, plain) if judge and plain else None
    return rows


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile.

    >>> quartiles([4.0, 1.0, 2.0, 3.0, 5.0]), quartiles([7.0])
    ((2.0, 3.0, 4.0), (7.0, 7.0, 7.0))
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high


def _times(blocks: list[Event]) -> list[float]:
    return [time for block in blocks for time in block["times_ms"]]


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)
