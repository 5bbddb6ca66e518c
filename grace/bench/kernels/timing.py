"""Costs of encoding, decoding and error feedback: multiples of the time of one ``copy_`` of the same tensor.

The floor is memory traffic: a ``copy_`` reads and writes every element once. A method's floor is the bytes that it
cannot do without, for each element of the gradient: what it reads, sends, and writes. Floors over times are fractions
of what the copy moves in the same run: 1 is as fast as the memory.
"""

import functools
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from grace.bench.common.clocks import HostClock
from grace.bench.common.results import Row
from grace.bench.kernels.fidelity import NAME, communicator_of, sent_bytes
from grace.bench.kernels.peak_memory import peak_bytes
from grace.core.backend import LocalBackend
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.fused_codec import FusedCodec
from grace.exchange.round_trip import AnyRoundTrip
from grace.session.bucket_limits import Limits
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner

STEPS = 2
"""Steps after which a memory has all that it keeps: memory is measured over so many from a fresh start."""
PARTS = ("encode", "decode", "memory", "exchange", "round_trip")
RESIDUAL = 8.0
"""Bytes per element that error feedback adds: a residual is read and written."""
HELD = 40
"""Multiple of a tensor's bytes that its measurements on a GPU hold, roughly."""
Works = dict[str, Callable[[], object]]
WorkName = TypeVar("WorkName", bound=Hashable)


def measure(
    methods: Sequence[str],
    x: torch.Tensor,
    repeats: int,
    memory: str | None,
    clock: HostClock,
    show: Callable[[str], object],
    whole: bool = False,
) -> list[Row]:
    """Return the costs of methods on one tensor (float32, contiguous), as rows of the results file.

    All take turns, so that other work of the machine, and the clock rate of a device, are those of all. ``show`` is
    called with the part that is prepared or measured next. ``whole`` measures exchanges too.

    - ``encode``: ``compress``, all rounds of a method that has several; ``decode``: adding the decoded payload to a
      dense tensor; ``memory``: the memory's ``compensate`` and ``update`` (which decodes, too), with a residual kept;
      ``exchange``: a step of the optimizer without a network; ``round_trip``: encode and decode.
    - ``*_ms``: medians over ``repeats``; ``*_copies``: the same over ``copy_ms``, the time of one ``copy_`` of x;
      ``*_fraction``: the part's floor over its time, as a fraction of what a copy moves.
    - ``encode_gbps``, ``decode_gbps``: bytes of x per second, over 10^9.
    - ``bits_per_element``: of the payload that travels, measured; all rounds together.
    - ``eager``: the parts that wait for the host.
    """
    out, about = torch.zeros_like(x), dict[str, tuple[float, dict[str, float], str]]()
    works: dict[tuple[str, str], Callable[[], object]] = {("", "copy"): functools.partial(out.copy_, x)}
    for method in methods:
        own, communicator = works_of(method, x, memory, out)
        compressor, bits = communicator.compressor, 8 * sent_bytes(method, x) / x.numel()
        payload, _ = compressor.compress(x, NAME)
        about[method] = bits, floors_of(compressor, bits, payload[0].numel() / x.numel()), communicator.memory.spec
        if whole:
            own["exchange"] = Exchanged(method, memory, [x], [out])
        works |= {(method, part): work for part, work in own.items()}
    eager = dict[str, list[str]]()
    for (method, part), work in works.items():
        show(f"{method}: {part}")
        works[method, part], replayed = clock.prepared(work)
        if not replayed:
            eager.setdefault(method, []).append(part)
    show("measuring")
    times = times_ms(works, repeats, clock)
    rows = []
    for method, (bits, floor, kept) in about.items():
        taken = {part: times[owner, part] for owner, part in works if owner in ("", method)}
        row = row_of(method, taken, x.numel(), bits, floor)
        rows.append({**row, "device": x.device.type, "memory": kept, "eager": ", ".join(eager.get(method, []))})
    return rows


def times_ms(
    works: Mapping[WorkName, Callable[[], object]], repeats: int, clock: HostClock | None = None
) -> dict[WorkName, float]:
    """Return median times of several functions, in ms, after one call of each that warms up.

    Functions take turns, so that other work of the machine disturbs all alike. Results are dropped within the measured
    time. On a GPU its own clock tells the time, and its cache is flushed before each.
    """
    clock = clock or HostClock()
    taken: dict[WorkName, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            clock.synchronize()
            clock.flush()
            began = clock.now()
            work()
            ended = clock.now()
            clock.synchronize()
            if turn:  # the first turn warms up
                taken[name].append(clock.ms(began, ended))
    return {name: statistics.median(times) for name, times in taken.items()}


def floors(bits: float, kept: float = 1.0, reads: float = 1.0) -> dict[str, float]:
    """Return the bytes per element that each part must move: a payload is added to a tensor; an exchange writes means.

    ``bits`` per element are sent; decoding touches the part ``kept`` of the elements; encoding reads each so many
    times.

    >>> floors(8.0), floors(0.64, kept=0.01)["decode"]
    ({'encode': 5.0, 'decode': 9.0, 'memory': 13.0, 'means': 5.0, 'exchange': 18.0}, 0.16)
    """
    sent = bits / 8
    encode, memory, means = 4 * reads + sent, 4 * reads + sent + RESIDUAL, sent + 4
    return {"encode": encode, "decode": sent + 8 * kept, "memory": memory, "means": means, "exchange": memory + means}


def floors_of(compressor: Compressor, bits: float, kept: float) -> dict[str, float]:
    """Return the floors of a method that sends so many bits per element, and values of the part ``kept`` of them.

    >>> from grace.core.registry import make
    >>> floors_of(make("compressor", "powersgd(rank=4)"), 0.1, 1.0)["encode"]
    8.0125
    """
    traits = compressor.traits
    sparse = traits.category == "sparsification"
    reads = kept if sparse and traits.summable else float(traits.rounds)  # whose positions are known before
    found = floors(bits, kept if sparse else 1.0, reads)
    if traits.memory == "none":
        found["exchange"] -= RESIDUAL
    return found


def fraction(floor: float, elements: int, ms: float, copy_ms: float) -> float:
    """Return the speed of a part, floor over time, as a fraction of a copy's, 8 bytes an element over its time.

    >>> fraction(5.0, 1000, ms=1.0, copy_ms=1.0), fraction(9.0, 1000, ms=1.5, copy_ms=1.0)
    (0.625, 0.75)
    """
    return floor * elements / ms / (8 * elements / copy_ms)


def row_of(method: str, taken: Mapping[str, float], elements: int, bits: float, floor: Mapping[str, float]) -> Row:
    """Return a row of the results file from the times of a method's parts, in ms, with the floors of those that have
    one; a part that was not timed is None.

    >>> row = row_of("qsgd", {"copy": 1.0, "encode": 2.0, "memory": 2.0}, 1000, 8.0, floors(8.0))
    >>> row["encode_copies"], row["encode_gbps"], row["encode_fraction"], row["memory_fraction"], row["decode_ms"]
    (2.0, 0.002, 0.3125, 0.40625, None)
    """
    copy = taken["copy"]
    if {"encode", "decode"} <= taken.keys():
        taken = {**taken, "round_trip": taken["encode"] + taken["decode"]}
    row: Row = {"method": method, "elements": elements, "bits_per_element": bits, "copy_ms": copy}
    for part in PARTS:
        ms = taken.get(part)
        row |= {f"{part}_ms": ms, f"{part}_copies": None if ms is None else ms / copy}
        if part in ("encode", "decode"):
            row[f"{part}_gbps"] = None if ms is None else 4 * elements / ms / 1e6
        if ms is not None and part in floor:
            both = ms + taken["encode"] if part == "memory" else ms  # compensating comes with encoding
            row[f"{part}_floor_bytes"] = floor[part]
            row[f"{part}_fraction"] = fraction(floor[part], elements, both, copy)
    return row


def works_of(
    method: str, x: torch.Tensor, memory: str | None = None, out: torch.Tensor | None = None
) -> tuple[Works, Communicator]:
    """Return the timed functions of a method, ``encode``, ``decode`` into ``out`` and, if it keeps anything,
    ``memory``; and its communicator."""
    communicator, out = communicator_of(method, memory), torch.zeros_like(x) if out is None else out
    compressor = communicator.compressor
    payload, ctx = compressor.compress(x, NAME)

    def encode() -> None:
        compressor.compress(x, NAME)
        compressor.state.commit()  # a warm start (PowerSGD's Q) is taken from the former call

    def remember() -> None:
        kept = communicator.memory
        kept.update(kept.compensate(x, NAME), NAME, compressor, payload, ctx)
        kept.state.commit()  # as at the end of a step: the next call reads what this one has kept

    works: Works = {"encode": encode, "decode": lambda: compressor.accumulate(payload, ctx, out, 0.5)}
    if communicator.stateful:
        works["memory"] = remember
    return works, communicator


class Exchanged:
    """Steps of gradients as the optimizer makes them, without a network: whole buckets are encoded and decoded.

    Headers stay unread, since reading makes the host wait at the end of a step. Means are written to ``outs``.
    """

    def __init__(self, method: str, memory: str | None, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]):
        found = [Variable(f"{NAME}{i}", tuple(x.shape), device=str(x.device)) for i, x in enumerate(xs)]
        plan = UniformPlan(method, memory, None, Limits())
        self.runner = build_step_runner(lambda: found, lambda: plan, LocalBackend(), Context())
        self.runner.resolve_headers = skip_reading_headers
        self.tensors = {variable.name: pair for variable, pair in zip(found, zip(xs, outs, strict=True), strict=True)}

    @property
    def at_once(self) -> bool:
        """True if every bucket is encoded as a whole, as is known from the second step on."""
        codecs = [bucket.program.codec for bucket in self.runner.buckets if bucket.program is not None]
        return all(isinstance(codec, FusedCodec) for codec in codecs)

    def encode(self) -> None:
        """Encode the first payloads of a step, and abort the step."""
        self.start()
        self.runner.abort()

    def __call__(self) -> None:
        """Make a step."""
        self.start()
        self.finish()

    def finish(self) -> None:
        """Decode, and end the step."""
        try:
            self.runner.finish_step(lambda bucket: [self.tensors[variable.name][1] for variable in bucket.variables])
        except RuntimeError:  # it was to be captured, and cannot
            self.runner.abort()
            raise

    def start(self) -> None:
        """Begin a step: encode the first payloads of all buckets."""
        try:
            for bucket in self.runner.buckets:
                mine = [self.tensors[variable.name][0] for variable in bucket.variables]
                self.runner.start_round_trip(bucket, mine, [True] * len(mine))
        except RuntimeError:
            self.runner.abort()
            raise


def skip_reading_headers(trips: Sequence[AnyRoundTrip]) -> None:
    """Forget the headers that round trips have left on a device to be read."""
    for trip in trips:
        trip.header.deferred_reads = []


def extra_bytes(method: str, x: torch.Tensor, memory: str | None = None) -> int | None:
    """Return the largest memory in bytes that two steps from a fresh start hold, beyond the gradient and its aggregate:
    payload, scratch, and the state of compressor and memory. None where the system does not count."""
    out = torch.ones_like(x)

    def steps() -> None:
        communicator = communicator_of(method, memory)
        compressor = communicator.compressor
        for _ in range(STEPS):
            compensated = communicator.memory.compensate(x, NAME)
            payload, ctx = compressor.compress(compensated, NAME)
            communicator.memory.update(compensated, NAME, compressor, payload, ctx)
            compressor.accumulate(payload, ctx, out, 0.5)
            compressor.state.commit()
            communicator.memory.state.commit()
            del compensated, payload, ctx

    steps()  # compiles, loads and fills caches
    return peak_bytes(steps, x.device.type)
