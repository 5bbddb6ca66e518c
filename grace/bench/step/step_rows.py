"""Rows of ``grace bench step``, made of the events of ranks; and the verdict on a scenario: does compression pay?"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grace.bench.common.events import Event
from grace.bench.common.progress import ScenarioBars
from grace.bench.common.results import Results, Row
from grace.bench.common.text import scenario as scenario_name
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.report.rows import plain_row
from grace.bench.step.step_settings import SHARDS_ALONE

LEAST_GAIN = 1.05
"""Speedup over plain averaging that a method must have to pay."""
LARGEST_SHORTFALL = 0.03
"""Part of what uncompressed training gains that a recommended method may lack."""
LONGEST_LIST = 4


@dataclasses.dataclass
class EngineRows:
    """Rows of the ranks that an engine joins over a link of a rate, made of the events of their rank 0."""

    engine: str
    ranks: int
    rate: float | None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    blocks: dict[str, list[Event]] = dataclasses.field(default_factory=dict)
    """Blocks of steps by the contestant's name."""

    def add(self, event: Event) -> None:
        """Add an event of rank 0's."""
        if "facts" in event:
            self.facts.update(event["facts"])
        elif "times_ms" in event:
            self.blocks.setdefault(event["name"], []).append(event)

    def rows(self) -> list[Row]:
        """Return one row per contestant that has been measured; compute is the time of the bound's steps."""
        alone = next((blocks for blocks in self.blocks.values() if blocks[0]["kind"] == "bound"), [])
        if not alone:
            return []
        compute = statistics.median(_times(alone))
        return [self._row(blocks, compute) for blocks in self.blocks.values()]

    def _row(self, blocks: list[Event], compute: float) -> Row:
        times, about, rate = _times(blocks), blocks[0], self.rate
        low, step, high = map(float, np.quantile(times, (0.25, 0.5, 0.75)))
        codecs = [block["codec_ms"] for block in blocks if block["codec_ms"] is not None]
        codec = statistics.median(codecs) if len(codecs) == len(blocks) else None
        sent = _largest(block["sent_bytes"] for block in blocks)
        received = _largest(block["received_bytes"] for block in blocks)
        # 8 bits in a byte, 1,000 ms in a second; both directions at once
        wire = None if rate is None or sent is None or received is None else 8e3 * max(sent, received) / rate
        # noise may make a contestant faster than the bound: its parts still add up to its step
        compute = step if about["kind"] == "bound" else min(compute, step)
        row: Row = {"name": about["name"], "kind": about["kind"], "method": about["method"]}
        row |= {"engine": self.engine, "ranks": self.ranks, "bandwidth": rate}
        row |= {"step_ms": step, "step_low_ms": low, "step_high_ms": high, "compute_ms": compute, "codec_ms": codec}
        row |= {"exposed_ms": max(0.0, step - compute - (codec or 0.0)), "sent_bytes": sent, "received_bytes": received}
        row |= {"wire_ms": wire, "samples_per_s": 1e3 * about["samples"] * self.ranks / step, "speedup": None}
        return {**row, "steps": len(times), "pays": None, "times_ms": times}


class ScenarioRows:
    """Rows of a scenario, added to a benchmark's results, and saved, as its ranks' events come in."""

    def __init__(
        self, running: BenchmarkRun, bars: ScenarioBars, ranks: int, rate: float | None, engines: Sequence[str]
    ):
        self.running, self.bars, self.name = running, bars, scenario_name(ranks, rate)
        self.rows_before = list(running.results.rows)
        self.by_engine = {engine: EngineRows(engine, ranks, rate) for engine in engines}

    def add(self, engine: str, event: Event) -> None:
        """Add an event of the ranks of an engine."""
        results = self.running.results
        self.by_engine[engine].add(event)
        left_out = results.settings.get("skipped", {}) | self.by_engine[engine].facts.get("skipped", {})
        results.settings |= {**self.by_engine[engine].facts, **({"skipped": left_out} if left_out else {})}
        rows = [row for each in self.by_engine.values() for row in each.rows()]
        results.rows = [*self.rows_before, *compare_with_plain(rows)]
        self.bars.show(self.name, event)
        if "times_ms" in event:
            self.running.save()

    def conclude(self) -> None:
        """Write the verdict on the scenario into the settings."""
        results = self.running.results
        conclude(results, results.rows[len(self.rows_before) :])


def _times(blocks: list[Event]) -> list[float]:
    return [time for block in blocks for time in block["times_ms"]]


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


# -- verdicts --------------------------------------------------------------------------------------------------------


def compare_with_plain(rows: list[Row]) -> list[Row]:
    """Return the rows of a scenario, compared with its plain baseline: ``speedup`` and ``pays`` are filled in."""
    plain = plain_row(rows)
    for row in rows:
        row["speedup"] = None if plain is None else plain["step_ms"] / row["step_ms"]
        row["pays"] = None if plain is None or row["kind"] == "bound" or row is plain else pays(row, plain)
    return rows


def conclude(results: Results, rows: list[Row]) -> None:
    """Write the verdict on the rows of a scenario into the settings, by the settings' ``shortfalls`` if there are."""
    name = scenario_name(rows[0]["ranks"], rows[0]["bandwidth"])
    results.settings.setdefault("verdict", {})[name] = verdict_text(rows, results.settings.get("shortfalls"))


def pays(row: Row, plain: Row) -> bool:
    """Return True if a row is clearly faster than the plain one: by 5 %, and their middle halves do not overlap.

    >>> plain = {"step_ms": 100.0, "step_low_ms": 95.0}
    >>> [pays({"step_ms": step, "step_high_ms": step + 3}, plain) for step in (50.0, 93.0, 96.0)]
    [True, False, False]
    """
    return row["step_high_ms"] < plain["step_low_ms"] and plain["step_ms"] >= LEAST_GAIN * row["step_ms"]


def verdict_text(rows: list[Row], shortfalls: Mapping[str, float | None] | None = None) -> str:
    """Return the verdict on a scenario's rows, which were compared with the plain one, in a few sentences; of methods
    with ``shortfalls`` it recommends those that learn."""
    plain = plain_row(rows)
    bound = next((row for row in rows if row["kind"] == "bound"), None)
    if rows and all(row.get("ranks") == 1 for row in rows):
        return "One rank has nobody to send to: nothing can be gained."
    if plain is None or bound is None:
        return "There is no uncompressed exchange to compare with."
    others = [row for row in rows if row is not plain and row["kind"] != "bound"]
    paying = sorted((row for row in others if row["pays"]), key=lambda row: row["step_ms"])
    slower = [row["name"] for row in others if row["step_low_ms"] > plain["step_high_ms"]]
    good = [row for row in paying if shortfalls is None or learns(row, shortfalls)]
    own = [row for row in good if row["kind"] == "grace" and row.get("method", row["name"]) != "none"]
    sentences = []
    if own:
        gain = f"{own[0]['name']} makes a step {_speedup(own[0])} as fast as {plain['name']}"
        sentences.append(f"Compress: {gain} ({_ms(own[0])} instead of {_ms(plain)}).")
        if good[0] is not own[0]:
            sentences.append(f"Faster still: {', '.join(_gain(row) for row in good[: good.index(own[0])])}.")
        rest = good[good.index(own[0]) + 1 :]
        if rest:
            sentences.append(f"It pays too with {_listed([_gain(row) for row in rest])}.")
    else:
        such = "method" if len(good) == len(paying) else "method that learns as well"
        sentences.append(f"Do not compress: no {such} is clearly faster than {plain['name']} ({_ms(plain)} a step).")
        if good:
            sentences.append(f"But {', '.join(_gain(row) for row in good)} would be.")
    if shortfalls is not None and len(good) < len(paying):
        bad = [_fast_but(row, shortfalls) for row in paying if not learns(row, shortfalls)]
        sentences.append(f"Fast, but not recommended: {', '.join(bad)}.")
    if slower:
        sentences.append(f"Slower than {plain['name']}: {_listed(slower)}.")
    without = "Without an exchange between replicas" if bound["name"] == SHARDS_ALONE else "Without any communication"
    sentences.append(f"{without} it would be {_speedup(bound)}{'' if own else ' as fast'}.")
    return " ".join(sentences)


def learns(row: Row, shortfalls: Mapping[str, float | None]) -> bool:
    """Return True if a row's method was trained, and lacks at most 3 % of what training gains without compression."""
    lacks = _lacks(row, shortfalls)
    return lacks is not None and lacks <= LARGEST_SHORTFALL


def _lacks(row: Row, shortfalls: Mapping[str, float | None]) -> float | None:
    method = row.get("method", row["name"])
    return None if method is None else shortfalls.get(method)


def _fast_but(row: Row, shortfalls: Mapping[str, float | None]) -> str:
    """Return a row's name, its speedup, and why it is not recommended."""
    lacks = _lacks(row, shortfalls)
    if lacks is None:
        trained = row.get("method", row["name"]) in shortfalls
        why = "training gains nothing without compression either" if trained else "not trained here"
    elif math.isfinite(lacks):
        why = f"lacks {100 * lacks:.0f} % of what training gains without compression"
    else:
        why = "diverged"
    return f"{row['name']} ({_speedup(row)}; {why})"


def _listed(names: list[str]) -> str:
    """Return the first few names as a list in words.

    >>> _listed(["a", "b", "c", "d"]), _listed(["a", "b", "c", "d", "e", "f"])
    ('a, b, c, d', 'a, b, c and 3 others')
    """
    return ", ".join(names) if len(names) <= LONGEST_LIST else f"{', '.join(names[:3])} and {len(names) - 3} others"


def _gain(row: Row) -> str:
    return f"{row['name']} ({_speedup(row)})"


def _speedup(row: Row) -> str:
    return f"{row['speedup']:.1f}x"


def _ms(row: Row) -> str:
    return f"{row['step_ms']:.3g} ms" if row["step_ms"] < 1000 else f"{row['step_ms'] / 1000:.2f} s"
