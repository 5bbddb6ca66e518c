"""What encoding, decoding and error feedback cost: multiples of the time of one ``copy_`` of the same tensor.

The floor is memory traffic: a ``copy_`` reads and writes every element once. Encoding reads it at least once; decoding
onto a dense tensor reads and writes that, or only writes it.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from grace.bench.common.clocks import HostClock
from grace.bench.kernels.fidelity import NAME, communicator_of, sent_bytes
from grace.bench.kernels.peak_memory import peak_bytes
from grace.core.communicator import Communicator

STEPS = 2
"""After which a memory has all that it keeps: memory is measured over so many from a fresh start."""


def times_ms(works: dict[str, Callable[[], Any]], repeats: int, clock: HostClock | None = None) -> dict[str, float]:
    """Median times of several functions, in ms, after one call of each that warms up.

    They take turns, so that what the machine does meanwhile hits all alike. What they return is dropped within their
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
    """The costs of one method on one tensor, as a row of the results file.

    - ``encode``: ``compress``, all rounds of a method that has several; ``decode``: adding the decoded payload to a
      dense tensor; ``memory``: the memory's ``compensate`` and ``update`` (which decodes, too), with a residual kept.
    - ``*_ms``: medians over ``repeats``; ``*_copies``: the same over ``copy_ms``, the time of one ``copy_`` of x, which
      is taken in turns with them.
    - ``encode_gbps``, ``decode_gbps``: bytes of x per second, over 10^9.
    - ``bits_per_element``: of the payload that travels, measured; all rounds together.
    - ``peak_extra_bytes``: see :func:`extra_bytes`.

    Args:
        method: a compressor's spec.
        x: float32, contiguous; where it lies is where is measured.
        repeats: measurements of each.
        memory: a memory's spec; the method's default if left out.

    Raises:
        ConfigError: method and memory do not go together.
    """
    works, communicator = works_of(method, x, memory)
    nbytes, elements = x.nbytes, max(1, x.numel())
    taken = times_ms(works, repeats)
    copy = taken["copy"]
    row: dict[str, Any] = {"method": method, "elements": x.numel(), "device": x.device.type}
    row["memory"] = communicator.memory.spec
    row |= {f"{name}_ms": taken[name] for name in works}
    row |= {f"{name}_copies": taken[name] / copy for name in works if name != "copy"}
    row |= {f"{name}_gbps": nbytes / taken[name] / 1e6 for name in ("encode", "decode")}
    row["bits_per_element"] = 8 * sent_bytes(method, x) / elements
    row["peak_extra_bytes"] = extra_bytes(method, x, memory)
    return row


def works_of(
    method: str, x: torch.Tensor, memory: str | None = None, out: torch.Tensor | None = None
) -> tuple[dict[str, Callable[[], Any]], Communicator]:
    """What is timed of a method: a copy of x, ``encode``, ``decode`` into ``out``, ``memory``; and its parts."""
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
    """The most memory that two steps from a fresh start hold at once, beyond the gradient and its aggregate, in bytes.

    That is payload, scratch, and what compressor and memory keep; the buffer that an exchange packs payloads in, and
    what arrives from other ranks, come on top. None where the system does not count (see
    :func:`~grace.bench.kernels.peak_memory.peak_bytes`).

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
