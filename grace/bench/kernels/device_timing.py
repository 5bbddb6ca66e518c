"""``grace bench kernels --device cuda``: times on a GPU, against what its memory allows.

A method's floor is the bytes that it cannot do without, for each element of the gradient: what it reads, sends, and
writes. Floors over times are fractions of what a ``copy_`` of the same tensor moves in the same run, which reads and
writes it: 1 is as fast as the device's memory.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grace.bench.common.clocks import WARM_UP, HostClock
from grace.bench.kernels import rivals
from grace.bench.kernels.fidelity import NAME, sent_bytes
from grace.bench.kernels.timing import cost_row, times_ms, works_of
from grace.core.backend import LocalBackend
from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.fused_codec import FusedCodec
from grace.session.bucketing import Limits
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner

PARTS = ("encode", "decode", "memory", "exchange", "round_trip")
RESIDUAL = 8.0
"""Bytes per element that error feedback adds: a residual is read and written."""
HELD = 40
"""Multiple of a tensor's bytes that its measurements hold, roughly."""


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


def row_of(
    method: str, taken: Mapping[str, float], elements: int, bits: float | None, floor: Mapping[str, float]
) -> dict[str, Any]:
    """Return a row of the results file from the times of a method's parts, with the floors of those that have one.

    >>> row = row_of("qsgd", {"copy": 1.0, "encode": 2.0, "memory": 2.0}, 1000, 8.0, floors(8.0))
    >>> row["encode_copies"], row["encode_fraction"], row["memory_fraction"], row["decode_ms"]
    (2.0, 0.3125, 0.40625, None)
    """
    if {"encode", "decode"} <= taken.keys():
        taken = {**taken, "round_trip": taken["encode"] + taken["decode"]}
    row = cost_row(method, taken, elements, bits, PARTS)
    for part in [part for part in floor if part in taken]:
        ms = taken[part]
        if part == "memory":  # compensating comes with encoding
            ms += taken["encode"]
        row[f"{part}_floor_bytes"] = floor[part]
        row[f"{part}_fraction"] = fraction(floor[part], elements, ms, taken["copy"])
    return row


class Exchanged:
    """Steps of gradients as the optimizer makes them, without a network: whole buckets are encoded and decoded.

    Headers stay unread, since reading makes the host wait at the end of a step. Means are written to ``outs``.
    """

    def __init__(self, method: str, memory: str | None, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]):
        found = [Variable(f"{NAME}{i}", tuple(x.shape), device=str(x.device)) for i, x in enumerate(xs)]
        plan = UniformPlan(method, memory, None, Limits())
        self.runner = build_step_runner(lambda: found, lambda: plan, LocalBackend(), Context())
        self.runner.resolve = leave_unread
        self.tensors = {variable.name: pair for variable, pair in zip(found, zip(xs, outs, strict=True), strict=True)}

    @property
    def at_once(self) -> bool:
        """True if every bucket is encoded as a whole, as is known from the second step on."""
        codecs = [bucket.program.codec for bucket in self.runner.buckets if bucket.program is not None]
        return all(isinstance(codec, FusedCodec) for codec in codecs)

    def encode(self) -> None:
        """Encode the first payloads of a step, and abandon the step."""
        self._start()
        self.runner.abandon()

    def __call__(self) -> None:
        """Make a step."""
        self._start()
        try:
            self.runner.finish_step(lambda bucket: [self.tensors[variable.name][1] for variable in bucket.variables])
        except RuntimeError:  # it was to be captured, and cannot
            self.runner.abandon()
            raise

    def _start(self) -> None:
        try:
            for bucket in self.runner.buckets:
                mine = [self.tensors[variable.name][0] for variable in bucket.variables]
                self.runner.start(bucket, mine, [True] * len(mine))
        except RuntimeError:
            self.runner.abandon()
            raise


def leave_unread(trips: Sequence[Any]) -> None:
    """Forget the headers that round trips have left on a device to be read."""
    for trip in trips:
        trip.header.deferred_reads = []


def measure(
    methods: list[str], x: torch.Tensor, repeats: int, memory: str | None, clock: HostClock, show: Callable[[str], Any]
) -> list[dict[str, Any]]:
    """Return the rows of one tensor, float32 and contiguous: all methods and rivals take turns, so that the device's
    clock rate is that of all.

    Medians over ``repeats`` count; ``show`` gets the part that is prepared or measured next.
    """
    out, works, eager = torch.zeros_like(x), dict[tuple[str, str], Callable[[], Any]](), dict[str, list[str]]()
    about: dict[str, tuple[float | None, dict[str, float], str]] = {}

    def add(name: str, part: str, work: Callable[[], Any]) -> None:
        show(f"{name}: {part}")
        if part == "round_trip":  # DDP calls hooks eagerly; torch's PowerSGD compresses from the third call on
            for _ in range(WARM_UP):
                work()
        works[name, part], replayed = (work, False) if part == "round_trip" else clock.prepared(work)
        if not replayed:
            eager.setdefault(name, []).append(part)

    add("", "copy", functools.partial(out.copy_, x))
    for method in methods:
        own, communicator = works_of(method, x, memory, out)
        compressor, bits = communicator.compressor, 8 * sent_bytes(method, x) / x.numel()
        payload, _ = compressor.compress(x, NAME)
        about[method] = bits, floors_of(compressor, bits, payload[0].numel() / x.numel()), communicator.memory.spec
        del own["copy"]
        if not communicator.stateful:
            del own["memory"]
        own["exchange"] = Exchanged(method, memory, [x], [out])
        for part, work in own.items():
            add(method, part, work)
    with rivals.alone(x.device.type) as group:
        for name, own in {**rivals.formulas(x), **rivals.hooks(x, group)}.items():
            about[name] = rivals.sent_bits(name, tuple(x.shape)), {}, ""
            for part, work in own.items():
                add(name, part, work)
        show("measuring")
        times = times_ms({f"{name}\0{part}": work for (name, part), work in works.items()}, repeats, clock)
    rows = []
    for name, (sent, floor, kept) in about.items():
        taken = {part: times[f"{owner}\0{part}"] for owner, part in works if owner in ("", name)}
        row = row_of(name, taken, x.numel(), sent, floor)
        rows.append({**row, "device": x.device.type, "memory": kept, "eager": ", ".join(eager.get(name, []))})
    return rows
