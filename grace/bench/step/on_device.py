"""``grace bench step --device cuda``: steps on one GPU, with the exchange over a simulated wire.

One process trains, and pretends that others send what it sends. A step's time is split by differences: compute is a
step without any exchange; codec is what the exchange adds where bytes arrive at once; exposed is what a wire of a
bandwidth adds to that. All take turns.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

import grace
from grace.bench.common.clocks import DeviceClock, HostClock, device_facts, facts_line
from grace.bench.common.results import Results
from grace.bench.common.text import scenario
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.step.contestants import Contestant, Stepper, Trained, bound
from grace.bench.step.rows import Table, conclude, judged
from grace.bench.step.settings import BOUND, Event, Settings
from grace.bench.step.simulated import Lane, Simulated
from grace.bench.workloads.models import Workload, workload

ENGINE = "simulated"
WARM_UP, BLOCK = 5, 10
"""Steps before anything is timed, and of a block."""
TRACED = 5
"""Steps that torch's profiler looks at."""
WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
"""The ends of what drivers' functions are called that wait: cudaStreamSynchronize, hipStreamSynchronize."""
READS = ("Memcpy DtoH", "CopyDeviceToHost")
SAID = (
    "The wire is simulated: one process, whose exchange waits for a kernel that sleeps as long as its bytes take; what "
    "arrives are copies. Nothing has travelled."
)


def on_wire(spec: str, wire: Simulated) -> Contestant:
    """A method, exchanged over a simulated wire."""

    def build(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        made = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=spec, backend=wire)
        return model, made, made

    return Contestant(spec, "grace", build, spec)


class Contest:
    """All that is measured: steps alone, and each method's behind a wire of its own, whose bandwidth is set.

    Args:
        work: what is trained, on the device that is measured.
        settings: methods, ranks, bandwidths and rounds.
        lane: what the wires' collectives travel on.
    """

    def __init__(self, work: Workload, settings: Settings, lane: Any):
        self.work, self.settings = work, settings
        self.alone = Stepper(bound(), work.model, work.loss)
        self.wires = {method: Simulated(settings.ranks[0], lane, None) for method in settings.methods}
        self.steppers = {name: Stepper(on_wire(name, wire), work.model, work.loss) for name, wire in self.wires.items()}
        for stepper in (self.alone, *self.steppers.values()):
            for _ in range(WARM_UP):
                stepper()

    def measure(self, clock: HostClock, emit: Callable[[float | None, Event], None]) -> None:
        """Let all take turns; ``emit`` gets a bandwidth and an event, as ranks tell them."""
        for _ in range(self.settings.rounds):
            times = block(self.alone, clock)
            compute = statistics.median(times)
            event = {"name": BOUND, "kind": "bound", "method": None, "codec_ms": 0.0, "sent_bytes": 0.0}
            for rate in self.settings.bandwidths:
                emit(rate, {**event, "received_bytes": 0.0, "samples": self.work.samples, "times_ms": times})
            for method, stepper in self.steppers.items():
                wire = self.wires[method]
                wire.rate, sent = None, wire.sent_bytes
                codec = max(0.0, statistics.median(block(stepper, clock)) - compute)
                event = {"name": method, "kind": "grace", "method": method, "codec_ms": codec}
                moved = (wire.sent_bytes - sent) / BLOCK  # a rank receives what it sends
                event |= {"samples": self.work.samples, "sent_bytes": moved, "received_bytes": moved}
                for rate in self.settings.bandwidths:
                    wire.rate = rate
                    emit(rate, {**event, "times_ms": block(stepper, clock)})

    def waits(self) -> dict[str, dict[str, float]]:
        """How often the host waits in a step: of each, by name."""
        return {name: traced(stepper) for name, stepper in {BOUND: self.alone, **self.steppers}.items()}


def block(stepper: Callable[[], Any], clock: HostClock) -> list[float]:
    """Times of steps that follow each other, so that the host may be ahead of the device as in training."""
    clock.settle()
    moments = [clock.now()]
    for _ in range(BLOCK):
        stepper()
        moments.append(clock.now())
    clock.settle()
    return [clock.ms(began, ended) for began, ended in itertools.pairwise(moments)]


def counted(names: Iterable[str], steps: int) -> dict[str, float]:
    """From the names of a trace's events: how often the host waited for the device, and read from it, a step.

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
    """How often the host waits for the device in a step, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            stepper()
    torch.cuda.synchronize()
    return counted((event.name for event in trace.events() or ()), TRACED)


def run(running: BenchmarkRun, settings: Settings, told: Callable[[str], Any]) -> None:
    """Measure on this GPU; rows are saved after each method."""
    torch.manual_seed(0)
    told(f"{settings.model}: building")
    work, results = workload(settings.model, 0, "cuda"), running.results
    parameters = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
    results.settings |= {"device": "cuda", "parameters": parameters, "batch": work.samples, "optimizer": "SGD"}
    results.settings |= {"engine": ENGINE, "about": SAID, **device_facts()}
    contest = Contest(work, settings, Lane())
    tables = {rate: Table(ENGINE, settings.ranks[0], rate) for rate in settings.bandwidths}

    def take(rate: float | None, event: Event) -> None:
        told(f"{event['name']} at {scenario(settings.ranks[0], rate)}")
        tables[rate].take(event)
        results.rows = [row for table in tables.values() for row in judged(table.rows(), ENGINE)]
        running.save()

    contest.measure(DeviceClock(), take)
    told("tracing")
    conclude_all(results, contest.waits(), settings.ranks[0])


def conclude_all(results: Results, waits: dict[str, dict[str, float]], ranks: int) -> None:
    """Write how often the host waited into the rows, and a verdict for each bandwidth into the settings."""
    rows = results.rows
    for row in rows:
        row.update(waits[row["name"]])
    for rate in dict.fromkeys(row["bandwidth"] for row in rows):
        results.rows = [row for row in rows if row["bandwidth"] == rate]
        conclude(results, 0, ranks, rate, ENGINE)
    results.rows = rows


def said(results: Results) -> list[str]:
    """What is said under the tables: the device, how the wire is simulated, and how often the host waited."""
    known = {row["name"]: row for row in results.rows if row.get("waits_per_step") is not None}
    counts = [f"{name} {row['waits_per_step']:g} and {row['reads_per_step']:g}" for name, row in known.items()]
    waited = [f"Waits of the host for the device, and reads from it, in a step: {'; '.join(counts)}."] if counts else []
    return [facts_line(results.settings, results.versions), SAID, *waited]
