"""Step times of Grace's methods and of what people use without Grace, side by side over the same network."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grace
from grace.bench import verdicts
from grace.bench.engines import ENGINES, check_engine, has_horovod, launcher
from grace.bench.figures.numbers import of_ranks
from grace.bench.follow import Follower
from grace.bench.functions import load_function
from grace.bench.launch import run_ranks
from grace.bench.link import Link
from grace.bench.rates import show_rate
from grace.bench.record import Results
from grace.errors import ConfigError

METHODS = (
    "none", "fp16", "qsgd", "natural", "terngrad", "efsignsgd", "topk(ratio=0.01)", "dgc(ratio=0.01)",
    "powersgd(rank=4)", "topk(ratio=0.01) | qsgd(levels=7, bucket_size=64, norm=max)",
)  # fmt: skip
QUICK_METHODS = ("none", "qsgd", "topk(ratio=0.01)", "powersgd(rank=4)")
ROUNDS, QUICK_ROUNDS = 8, 3
BASELINES = ("ddp", "horovod")
BOUND = "no communication"
"""The contestant whose ranks train alone: what no exchange can be faster than."""

MODELS = ("transformer", "resnet", "lstm", "ncf", "mlp")
"""Functions of :mod:`grace.bench.models`."""

Event = dict[str, Any]


@dataclasses.dataclass
class Settings:
    """What to run.

    Args:
        model: a name of :mod:`grace.bench.models`, or ``module:function``.
        methods: compressor specs; memory and communicator are each method's defaults.
        strategies: files' paths, or builders' specs.
        engine: what moves Grace's payloads: "torch", "horovod" or "mpi".
        baselines: of "ddp" and "horovod", those that are compared with; what is not installed is left out.
        ranks: numbers of processes on this machine, one scenario each.
        bandwidths: bits per second of emulated links, one scenario each; None for loopback.
        rounds: blocks of steps per row; the rows take turns.
        ddp_hook: whether the methods are measured as hooks of DistributedDataParallel too.

    Raises:
        ConfigError: a value cannot work.
        MissingExtraError: the engine is not installed.

    >>> Settings(methods=["topk"], bandwidths=[1e9]).scenarios
    [(2, 1000000000.0)]
    >>> Settings(rounds=0)
    Traceback (most recent call last):
    grace.errors.ConfigError: --rounds must be at least 1, not 0
    """

    model: str = "transformer"
    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    strategies: list[str] = dataclasses.field(default_factory=list)
    engine: str = "torch"
    baselines: list[str] = dataclasses.field(default_factory=lambda: list(BASELINES))
    ranks: list[int] = dataclasses.field(default_factory=lambda: [2])
    bandwidths: list[float | None] = dataclasses.field(default_factory=lambda: [None])
    rounds: int = ROUNDS
    ddp_hook: bool = False

    def __post_init__(self) -> None:
        from grace.communicators.base import build_communicator

        check_engine(self.engine)
        for key in ("methods", "strategies", "baselines", "ranks", "bandwidths"):
            setattr(self, key, list(dict.fromkeys(getattr(self, key))))
        for method in self.methods:
            build_communicator(method, None, None)
        for name in self.baselines:
            if name not in BASELINES:
                raise ConfigError(f"unknown baseline {name!r}; known: {', '.join(BASELINES)}, or none")
        if not (self.methods or self.strategies or self.baselines):
            raise ConfigError("nothing is to be compared: --methods, --strategy and --baselines are empty")
        for ranks in self.ranks:
            if not 1 <= ranks <= 1000:
                raise ConfigError(f"--ranks must be between 1 and 1000, not {ranks}")
            for rate in self.bandwidths:
                if rate is not None:
                    Link(ranks, rate)
        if self.ddp_hook and self.engine != "torch":
            raise ConfigError("--ddp-hook is for --engine torch: DistributedDataParallel has no other engine")
        if self.model not in MODELS:
            load_function(self.model, "model", MODELS)
        if self.rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, not {self.rounds}")

    @property
    def scenarios(self) -> list[tuple[int, float | None]]:
        """Numbers of ranks, and bandwidths."""
        return [(ranks, rate) for ranks in self.ranks for rate in self.bandwidths]

    @property
    def groups(self) -> list[str]:
        """The engines whose ranks are started for a scenario, one after the other: that of the methods first."""
        wanted = {"torch": "ddp" in self.baselines, "horovod": "horovod" in self.baselines and has_horovod("torch")}
        return [self.engine, *(name for name in ENGINES if name != self.engine and wanted.get(name))]


def run(settings: Settings, results: Results, watch: Callable[[str, Event], None]) -> None:
    """Measure every scenario; what is measured is added to the results when it is there.

    Args:
        settings: what to run.
        results: of kind "step"; its rows and settings are filled in, the verdicts at each scenario's end.
        watch: called with a scenario's name and each event of its ranks, see :mod:`grace.bench.step_worker`.

    Raises:
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    for ranks, rate in settings.scenarios:
        _scenario(settings, results, ranks, rate, watch)


def _scenario(
    settings: Settings, results: Results, ranks: int, rate: float | None, watch: Callable[[str, Event], None]
) -> None:
    before = list(results.rows)
    tables = [Table(engine, ranks, rate) for engine in settings.groups]

    def take(table: Table, event: Event) -> None:
        table.take(event)
        results.settings.update(table.facts)
        results.rows = [*before, *judged([row for each in tables for row in each.rows()], settings.engine)]
        watch(scenario(ranks, rate), event)

    for table in tables:
        watch(scenario(ranks, rate), {"engine": table.engine})
        _measure(settings, table.engine, ranks, rate, partial(take, table))
    conclude(results, len(before), ranks, rate, settings.engine)


def _measure(settings: Settings, engine: str, ranks: int, rate: float | None, take: Callable[[Event], None]) -> None:
    """Start the ranks, and hand on what rank 0 tells."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grace-bench-")))
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
        follower = Follower(folder / "events.jsonl")

        def watch() -> None:
            for event in follower.new():
                take(event)

        link = None if rate is None else stack.enter_context(Link(ranks, rate))
        start = stack.enter_context(launcher(engine, ranks, link))
        run_ranks(start, ["-m", "grace.bench.step_worker", str(folder), engine], folder, watch)


class Table:
    """What rank 0 of a group of ranks has told so far, as rows.

    Args:
        engine: what joins them.
        ranks: how many.
        rate: bits per second of their link, or None.
    """

    def __init__(self, engine: str, ranks: int, rate: float | None):
        self.engine, self.ranks, self.rate = engine, ranks, rate
        self.facts: dict[str, Any] = {}
        self.blocks: dict[str, list[Event]] = {}
        self.about: dict[str, Event] = {}

    def take(self, event: Event) -> None:
        """An event of rank 0's."""
        if "facts" in event:
            self.facts.update(event["facts"])
        elif "times_ms" in event:
            self.about.setdefault(event["name"], event)
            self.blocks.setdefault(event["name"], []).append(event)

    def rows(self) -> list[dict[str, Any]]:
        """One row per contestant that has been measured; compute is the time of a step without communication."""
        alone = self.blocks.get(BOUND, [])
        if not alone:
            return []
        compute = statistics.median(_times(alone))
        return [self._row(name, blocks, compute) for name, blocks in self.blocks.items()]

    def _row(self, name: str, blocks: list[Event], compute: float) -> dict[str, Any]:
        times, about, rate = _times(blocks), self.about[name], self.rate
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
    results.settings.setdefault("verdict", {})[scenario(ranks, rate)] = verdicts.words(results.rows[first:], engine)


def about(settings: Settings) -> dict[str, Any]:
    """The settings as they are recorded; the ranks tell the rest."""
    return {**dataclasses.asdict(settings), "verdict": {}}


def run_here(settings: Settings, results: Results, watch: Callable[[str, Event], None]) -> bool:
    """Measure on the ranks that a launcher has started, of which this process is one, over the network between them.

    Args:
        settings: what to run; engine, ranks and bandwidths are those that there are.
        results: of kind "step"; filled in on rank 0.
        watch: called on rank 0 with the scenario's name and each event.

    Returns:
        Whether this is rank 0.
    """
    from grace.bench.step_worker import measure

    backend = grace.init()
    settings = dataclasses.replace(settings, engine=backend.name, ranks=[backend.size], bandwidths=[None])
    results.settings = about(settings)
    table = Table(backend.name, backend.size, None)
    name = scenario(backend.size, None)

    def take(event: Event) -> None:
        table.take(event)
        results.settings.update(table.facts)
        results.rows = judged(table.rows(), backend.name)
        watch(name, event)

    if backend.rank == 0:
        watch(name, {"engine": backend.name})
    measure(settings, backend, backend.name, take if backend.rank == 0 else lambda event: None)
    if backend.rank == 0:
        conclude(results, 0, backend.size, None, backend.name)
    return backend.rank == 0


def judged(rows: list[dict[str, Any]], engine: str) -> list[dict[str, Any]]:
    """The rows of a scenario, compared with its plain baseline: ``speedup`` and ``pays`` are filled in."""
    plain = verdicts.plain_row(rows, engine)
    for row in rows:
        row["speedup"] = plain["step_ms"] / row["step_ms"] if plain else None
        judge = plain is not None and row["kind"] != "bound" and row is not plain
        row["pays"] = verdicts.pays(row, plain) if judge and plain else None
    return rows


def scenario(ranks: int, rate: float | None) -> str:
    """What it is called.

    >>> scenario(2, 1e9), scenario(4, None)
    ('2 ranks at 1gbit', '4 ranks on loopback')
    """
    return of_ranks(ranks) + (" on loopback" if rate is None else f" at {show_rate(rate)}")


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The first, the median and the third.

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
