"""``grace bench step --device cuda``: steps on one GPU, with the exchange over a simulated wire.

One process trains, and pretends that other ranks send the same. A step's time is split by differences: compute is a
step without any exchange; codec is the time that the exchange adds where bytes arrive at once; exposed is the time that
a wire of a bandwidth adds to that. All take turns.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from grace.bench.common.clocks import DeviceClock, HostClock, device_facts
from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.ranks.rank_program import Event
from grace.bench.step.contestants import Contestant, Stepper, bound, in_optimizer
from grace.bench.step.simulated import Lane, Simulated
from grace.bench.step.step_rows import EngineRows, compare_with_plain, conclude
from grace.bench.step.step_settings import BOUND, StepSettings
from grace.bench.workloads.models import Workload, workload

ENGINE = "simulated"
WARM_UP, BLOCK = 5, 10
"""Numbers of steps before anything is timed, and of a block."""
TRACED = 5
"""Number of steps that torch's profiler traces."""
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
"""Suffixes of the names of drivers' functions that wait: cudaStreamSynchronize, hipStreamSynchronize."""
READS = ("Memcpy DtoH", "CopyDeviceToHost")
SIMULATED_NOTE = (
    "The wire is simulated: one process, whose exchange waits for a kernel that sleeps as long as its bytes take; what "
    "arrives are copies. Nothing has travelled."
)


def on_wire(spec: str, wire: Simulated) -> Contestant:
    """Return the contestant of a method that is exchanged over a simulated wire."""
    return in_optimizer(spec, spec, compressor=spec, backend=wire)


class Contest:
    """All steppers: steps alone, and each method's behind a wire of its own, whose bandwidth is set.

    The collectives of all wires travel on one lane, one after the other.
    """

    def __init__(self, work: Workload, settings: StepSettings, lane: Lane):
        self.work = work
        self.settings = settings
        self.alone = Stepper(bound(), work.model, work.loss)
        self.wires = {method: Simulated(settings.ranks[0], lane, None) for method in settings.methods}
        self.steppers = {name: Stepper(on_wire(name, wire), work.model, work.loss) for name, wire in self.wires.items()}
        for stepper in (self.alone, *self.steppers.values()):
            for _ in range(WARM_UP):
                stepper()

    def measure(self, clock: HostClock, emit: Callable[[float | None, Event], None]) -> None:
        """Let all steppers take turns; ``emit`` gets a bandwidth and an event, as ranks write them."""
        for _ in range(self.settings.rounds):
            times = block(self.alone, clock)
            compute = statistics.median(times)
            event = {"name": BOUND, "kind": "bound", "method": None, "codec_ms": 0.0, "sent_bytes": 0.0}
            for rate in self.settings.bandwidths:
                emit(rate, {**event, "received_bytes": 0.0, "samples": self.work.samples, "times_ms": times})
            for method, stepper in self.steppers.items():
                wire = self.wires[method]
                wire.rate = None
                sent = wire.sent_bytes
                codec = max(0.0, statistics.median(block(stepper, clock)) - compute)
                event = {"name": method, "kind": "grace", "method": method, "codec_ms": codec}
                moved = (wire.sent_bytes - sent) / BLOCK  # a rank receives what it sends
                event |= {"samples": self.work.samples, "sent_bytes": moved, "received_bytes": moved}
                for rate in self.settings.bandwidths:
                    wire.rate = rate
                    emit(rate, {**event, "times_ms": block(stepper, clock)})

    def waits(self) -> dict[str, dict[str, float]]:
        """Return the host's waits in a step, by the contestant's name."""
        return {name: traced(stepper) for name, stepper in {BOUND: self.alone, **self.steppers}.items()}


def block(stepper: Callable[[], Any], clock: HostClock) -> list[float]:
    """Return the times of consecutive steps, between which the host may be ahead of the device as in training."""
    clock.synchronize()
    moments = [clock.now()]
    for _ in range(BLOCK):
        stepper()
        moments.append(clock.now())
    clock.synchronize()
    return [clock.ms(began, ended) for began, ended in itertools.pairwise(moments)]


def counted(names: Iterable[str], steps: int) -> dict[str, float]:
    """Return the host's waits for the device, and reads from it, per step, from the names of a trace's events.

    >>> names = ["cudaStreamSynchronize", "aten::mm", "Memcpy DtoH (Device -> Pinned)", "cudaLaunchKernel"]
    >>> counted([*names, "cudaStreamSynchronize"], 2)
    {'waits_per_step': 1.0, 'reads_per_step': 0.5}
    """
    found: Counter[str] = Counter()
    for name in names:
        found["waits"] += name.endswith(WAITS)
        found["reads"] += name.startswith(READS)
    return {f"{what}_per_step": found[what] / steps for what in ("waits", "reads")}


def traced(stepper: Callable[[], Any]) -> dict[str, float]:
    """Return the host's waits for the device, and reads from it, per step, by torch's profiler, which itself waits
    once or twice a trace: as often as in a trace of nothing."""
    own, found = (counted(_names(work), TRACED) for work in (int, stepper))
    return {key: max(0.0, round(value - own[key], 2)) for key, value in found.items()}


def _names(work: Callable[[], Any]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            work()
    torch.cuda.synchronize()
    return [event.name for event in trace.events() or ()]


def run(running: BenchmarkRun, settings: StepSettings, show_status: Callable[[str], Any]) -> None:
    """Measure on this GPU; rows are saved after each method."""
    torch.manual_seed(0)
    show_status(f"{settings.model}: building")
    work, results = workload(settings.model, 0, "cuda"), running.results
    parameters = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
    results.settings |= {"device": "cuda", "parameters": parameters, "batch": work.samples, "optimizer": "SGD"}
    results.settings |= {"engine": ENGINE, "about": SIMULATED_NOTE, **device_facts()}
    contest = Contest(work, settings, Lane())
    tables = {rate: EngineRows(ENGINE, settings.ranks[0], rate) for rate in settings.bandwidths}

    def add_event(rate: float | None, event: Event) -> None:
        show_status(f"{event['name']} at {scenario(settings.ranks[0], rate)}")
        tables[rate].add(event)
        results.rows = [row for table in tables.values() for row in compare_with_plain(table.rows(), ENGINE)]
        running.save()

    contest.measure(DeviceClock(), add_event)
    show_status("tracing")
    conclude_all(results, contest.waits(), settings.ranks[0])


def conclude_all(results: Results, waits: dict[str, dict[str, float]], ranks: int) -> None:
    """Write the host's waits into the rows, and a verdict for each bandwidth into the settings."""
    for row in results.rows:
        row.update(waits[row["name"]])
    for rate in dict.fromkeys(row["bandwidth"] for row in results.rows):
        conclude(results, [row for row in results.rows if row["bandwidth"] == rate], ranks, rate, ENGINE)
