"""Rows of ``grace bench step``, made of the events of ranks."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grace.bench.common.results import Results, Row
from grace.bench.common.text import scenario as scenario_name
from grace.bench.ranks.rank_program import Event
from grace.bench.step.step_verdicts import pays, plain_row, verdict_text


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
        low, step, high = quartiles(times)
        codecs = [block["codec_ms"] for block in blocks]
        codec = None if None in codecs else statistics.median(codecs)
        sent, received = (_largest(block[key] for block in blocks) for key in ("sent_bytes", "received_bytes"))
        wire = None if rate is None or sent is None or received is None else 8e3 * max(sent, received) / rate
        compute = step if about["kind"] == "bound" else min(compute, step)
        row = {key: about[key] for key in ("name", "kind", "method")}
        row |= {"engine": self.engine, "ranks": self.ranks, "bandwidth": rate}
        row |= {"step_ms": step, "step_low_ms": low, "step_high_ms": high, "compute_ms": compute, "codec_ms": codec}
        row |= {"exposed_ms": max(0.0, step - compute - (codec or 0.0)), "sent_bytes": sent, "received_bytes": received}
        row |= {"wire_ms": wire, "samples_per_s": 1e3 * about["samples"] * self.ranks / step, "speedup": None}
        return {**row, "steps": len(times), "pays": None, "times_ms": times}


@dataclasses.dataclass
class ScenarioRows:
    """Rows of a scenario, which are added to the results as the events of its ranks come in.

    The first engine is that of Grace's methods; ``watch`` is called with the scenario's name and each event.
    """

    results: Results
    ranks: int
    rate: float | None
    engines: Sequence[str]
    watch: Callable[[str, Event], None]

    def __post_init__(self) -> None:
        self.name = scenario_name(self.ranks, self.rate)
        self.rows_before = list(self.results.rows)
        self.by_engine = {engine: EngineRows(engine, self.ranks, self.rate) for engine in self.engines}

    def add(self, engine: str, event: Event) -> None:
        """Add an event of the ranks of an engine."""
        self.by_engine[engine].add(event)
        self.results.settings.update(self.by_engine[engine].facts)
        rows = [row for each in self.by_engine.values() for row in each.rows()]
        self.results.rows = [*self.rows_before, *compare_with_plain(rows, self.engines[0])]
        self.watch(self.name, event)

    def conclude(self) -> None:
        """Write the verdict on the scenario into the settings."""
        rows = self.results.rows[len(self.rows_before) :]
        conclude(self.results, rows, self.ranks, self.rate, self.engines[0])


def conclude(results: Results, rows: list[Row], ranks: int, rate: float | None, engine: str) -> None:
    """Write the verdict on the rows of a scenario into the settings, by the settings' ``shortfalls`` if there are."""
    words = verdict_text(rows, engine, results.settings.get("shortfalls"))
    results.settings.setdefault("verdict", {})[scenario_name(ranks, rate)] = words


def compare_with_plain(rows: list[Row], engine: str) -> list[Row]:
    """Return the rows of a scenario, compared with its plain baseline: ``speedup`` and ``pays`` are filled in."""
    plain = plain_row(rows, engine)
    for row in rows:
        if plain is None:
            row["speedup"] = row["pays"] = None
            continue
        row["speedup"] = plain["step_ms"] / row["step_ms"]
        row["pays"] = None if row["kind"] == "bound" or row is plain else pays(row, plain)
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
    return max((value for value in values if value is not None), default=None)
