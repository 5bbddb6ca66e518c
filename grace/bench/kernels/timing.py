"""Costs of encoding, decoding and error feedback: multiples of the time of one ``copy_`` of the same tensor.

The floor is memory traffic: a ``copy_`` reads and writes every element once. Encoding reads it at least once; decoding
onto a dense tensor reads and writes that, or only writes it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grace.bench.common.clocks import HostClock
from grace.bench.kernels.fidelity import NAME, communicator_of, sent_bytes
from grace.bench.kernels.peak_memory import peak_bytes
from grace.core.communicator import Communicator

STEPS = 2
"""Steps after which a memory has all that it keeps: memory is measured over so many from a fresh start."""


def times_ms(works: dict[str, Callable[[], Any]], repeats: int, clock: HostClock | None = None) -> dict[str, float]:
    """Return median times of several functions, in ms, after one call of each that warms up.

    Functions take turns, so that other work of the machine disturbs all alike. Results are dropped within the measured
    time. On a GPU its own clock tells the time, and its cache is flushed before each.

    >>> import time
    >>> sorted(times_ms({"sleep": lambda: time.sleep(0.001), "nothing": int}, repeats=3))
    ['nothing', 'sleep']
    """
    clock = clock or HostClock()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            clock.synchronize()
            clock.flush()
            began = clock.now()
            work()
            ended = clock.now()
            clock.synchronize()
            if turn:
                taken[name].append(clock.ms(began, ended))
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(method: str, x: torch.Tensor, repeats: int, memory: str | None = None) -> dict[str, Any]:
    """Return the costs of one method on one tensor (float32, contiguous), as a row of the results file.

    - ``encode``: ``compress``, all rounds of a method that has several; ``decode``: adding the decoded payload to a
      dense tensor; ``memory``: the memory's ``compensate`` and ``update`` (which decodes, too), with a residual kept.
    - ``*_ms``: medians over ``repeats``; ``*_copies``: the same over ``copy_ms``, the time of one ``copy_`` of x, which
      is taken in turns with them.
    - ``encode_gbps``, ``decode_gbps``: bytes of x per second, over 10^9.
    - ``bits_per_element``: of the payload that travels, measured; all rounds together.
    - ``peak_extra_bytes``: see :func:`extra_bytes`.
    """
    works, communicator = works_of(method, x, memory)
    bits = 8 * sent_bytes(method, x) / max(1, x.numel())
    return {
        **cost_row(method, times_ms(works, repeats), x.numel(), bits),
        "device": x.device.type,
        "memory": communicator.memory.spec,
        "peak_extra_bytes": extra_bytes(method, x, memory),
    }


def cost_row(
    method: str,
    taken: Mapping[str, float],
    elements: int,
    bits: float | None,
    parts: Sequence[str] = ("encode", "decode", "memory"),
) -> dict[str, Any]:
    """Return a row of the results file from the times of a method's parts, in ms; a part that was not timed is None.

    >>> row = cost_row("qsgd", {"copy": 1.0, "encode": 2.0}, 1000, 8.0)
    >>> row["encode_copies"], row["encode_gbps"], row["decode_ms"]
    (2.0, 0.002, None)
    """
    copy = taken["copy"]
    row: dict[str, Any] = {"method": method, "elements": elements, "bits_per_element": bits, "copy_ms": copy}
    for part in parts:
        ms = taken.get(part)
        row |= {f"{part}_ms": ms, f"{part}_copies": None if ms is None else ms / copy}
        if part in ("encode", "decode"):
            row[f"{part}_gbps"] = None if ms is None else 4 * elements / ms / 1e6
    return row


def works_of(
    method: str, x: torch.Tensor, memory: str | None = None, out: torch.Tensor | None = None
) -> tuple[dict[str, Callable[[], Any]], Communicator]:
    """Return the timed functions of a method, a copy of x, ``encode``, ``decode`` into ``out`` and ``memory``, and its
    communicator."""
    communicator, out = communicator_of(method, memory), torch.zeros_like(x) if out is None else out
    compressor = communicator.compressor
    payload, ctx = compressor.compress(x, NAME)

    def encode() -> None:
        compressor.compress(x, NAME)
        compressor.state.commit()

    works: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(x),
        "encode": encode,
        "decode": lambda: compressor.accumulate(payload, ctx, out, 0.5),
        "memory": lambda: _remember(communicator, x, payload, ctx),
    }
    return works, communicator


def extra_bytes(method: str, x: torch.Tensor, memory: str | None = None) -> int | None:
    """Return the largest memory in bytes that two steps from a fresh start hold, beyond the gradient and its aggregate:
    payload, scratch, and the state of compressor and memory. None where the system does not count.

    >>> peak = extra_bytes("signsgd", torch.ones(1000, 1000))  # a bit per element
    >>> peak is None or peak < 1e6
    True
    """
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


def _remember(communicator: Communicator, x: torch.Tensor, payload: Any, ctx: Any) -> None:
    memory = communicator.memory
    memory.update(memory.compensate(x, NAME), NAME, communicator.compressor, payload, ctx)
    memory.state.commit()
