"""``grace bench step --device cuda``: steps on one GPU, with the exchange over a simulated wire.

One process trains, and pretends that other ranks send the same. A step's time is split by differences: compute is a
step without any exchange; codec is the time that the exchange adds where bytes arrive at once; exposed is the time that
a wire of a bandwidth adds to that. All take turns.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from rich.markup import escape

from grace.backends.simulated import SimulatedRanks
from grace.bench.common.clocks import DeviceClock, HostClock, device_facts
from grace.bench.common.events import Event
from grace.bench.common.results import Results
from grace.bench.common.tables import grouped
from grace.bench.common.text import scenario
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.step.contestants import Contestant, Stepper, bound, in_optimizer
from grace.bench.step.step_rows import EngineRows, compare_with_plain, conclude
from grace.bench.step.step_settings import BOUND, StepSettings
from grace.bench.workloads.models import Workload, workload
from grace.core.backend import Handle

ENGINE = "simulated"
CALIBRATION = 20_000_000
"""Cycles that a kernel sleeps, to measure the cycles of a second."""
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


class Lane:
    """Stream on which a kernel sleeps as long as bytes would travel."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one wakes the device up
            began.record()
            torch.cuda._sleep(CALIBRATION)
            ended.record()
            ended.synchronize()
        self.cycles = 1e3 * CALIBRATION / began.elapsed_time(ended)

    def carry(self, move: Callable[[], Handle], seconds: Callable[[], float], sent: torch.Tensor) -> Handle:
        """Start a collective after all work so far; its handle lets later work wait, and not the host. ``move`` makes
        the received tensors of the sent one; ``seconds`` returns the seconds on the wire afterwards."""
        self.stream.wait_stream(torch.cuda.current_stream())  # what is sent is computed there
        with torch.cuda.stream(self.stream):
            handle = move()
            torch.cuda._sleep(round(seconds() * self.cycles))
            done = self.stream.record_event()
        sent.record_stream(self.stream)  # else the allocator may give its memory away before it was read

        def wait() -> None:
            here = torch.cuda.current_stream()
            here.wait_event(done)
            result = handle.result()
            for tensor in result if isinstance(result, list) else [result]:
                tensor.record_stream(here)

        return Handle(wait, later=handle.result)


class Simulated(SimulatedRanks):
    """Ranks that one process pretends, behind a wire: a collective takes its bytes over the rate, in bits per second;
    None lets them arrive at once.

    Received tensors are copies, made on the lane's stream, as NCCL would write them; collectives travel one after the
    other.
    """

    def __init__(self, size: int, lane: Lane, rate: float | None):
        super().__init__(size)
        self.lane = lane
        self.rate = rate

    def _carried(self, move: Callable[[], Handle], sent: torch.Tensor) -> Handle:
        before = self.sent_bytes

        def seconds() -> float:
            return 0.0 if self.rate is None else 8 * (self.sent_bytes - before) / self.rate

        return self.lane.carry(move, seconds, sent)

    def allreduce(self, tensor: torch.Tensor) -> Handle:
        return self._carried(partial(super().allreduce, tensor), tensor)

    def allgather(self, tensor: torch.Tensor) -> Handle:
        return self._carried(partial(super().allgather, tensor), tensor)

    def alltoall(self, tensor: torch.Tensor) -> Handle:
        return self._carried(partial(super().alltoall, tensor), tensor)

    def gather(self, tensor: torch.Tensor, root: int) -> Handle:
        return self._carried(partial(super().gather, tensor, root), tensor)


def on_wire(spec: str, wire: Simulated, bucket_bytes: int | None = None) -> Contestant:
    """Return the contestant of a method that is exchanged over a simulated wire."""
    return in_optimizer(spec, spec, compressor=spec, backend=wire, bucket_bytes=bucket_bytes)


class Contest:
    """All steppers: steps alone, and each method's behind a wire of its own, whose bandwidth is set.

    The collectives of all wires travel on one lane, one after the other.
    """

    def __init__(self, work: Workload, settings: StepSettings, lane: Lane):
        self.work = work
        self.settings = settings
        self.alone = Stepper(bound(), work.model, work.loss)
        self.wires = {method: Simulated(settings.ranks[0], lane, None) for method in settings.methods}
        self.steppers = {
            method: Stepper(on_wire(method, wire, settings.bucket_bytes), work.model, work.loss)
            for method, wire in self.wires.items()
        }
        for stepper in (self.alone, *self.steppers.values()):
            for _ in range(WARM_UP):
                stepper()

    def measure(self, clock: HostClock, emit: Callable[[float | None, Event], None]) -> None:
        """Let all steppers take turns; ``emit`` gets a bandwidth and an event, as ranks write them."""
        for _ in range(self.settings.rounds):
            times = block(self.alone, clock)
            compute = statistics.median(times)
            event: Event = {"name": BOUND, "kind": "bound", "method": None, "samples": self.work.samples}
            event |= {"codec_ms": 0.0, "sent_bytes": 0.0, "received_bytes": 0.0}
            for rate in self.settings.bandwidths:
                emit(rate, {**event, "times_ms": times})
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


def block(stepper: Callable[[], object], clock: HostClock) -> list[float]:
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


def traced(stepper: Callable[[], object]) -> dict[str, float]:
    """Return the host's waits for the device, and reads from it, per step, by torch's profiler, which itself waits
    once or twice a trace: as often as in a trace of nothing."""
    own, found = (counted(_names(work), TRACED) for work in (int, stepper))
    return {key: max(0.0, round(value - own[key], 2)) for key, value in found.items()}


def _names(work: Callable[[], object]) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(TRACED):
            work()
    torch.cuda.synchronize()
    return [event.name for event in trace.events() or ()]


def run(running: BenchmarkRun, settings: StepSettings) -> None:
    """Measure on this GPU; rows are saved after each method."""
    with running.console.status("") as status:
        _measure(running, settings, lambda what: status.update(escape(what)))


def _measure(running: BenchmarkRun, settings: StepSettings, show_status: Callable[[str], object]) -> None:
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
        results.rows = [row for table in tables.values() for row in compare_with_plain(table.rows())]
        running.save()

    contest.measure(DeviceClock(), add_event)
    show_status("tracing")
    conclude_all(results, contest.waits())


def conclude_all(results: Results, waits: dict[str, dict[str, float]]) -> None:
    """Write the host's waits into the rows, and a verdict for each bandwidth into the settings."""
    for row in results.rows:
        row.update(waits[row["name"]])
    for rows in grouped(results.rows, "bandwidth").values():
        conclude(results, rows)
