"""Measurement of bandwidth and latency: collectives are timed on the very links, by all ranks together."""

import math
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from grace.core.backend import Backend, Handle, Tensor
from grace.kernels import kernels_of
from grace.planner.costs import Curve
from grace.planner.network import KINDS, MeasuredNetwork
from grace.planner.step_timer import undisturbed
from grace.session.agreement import failing_together, gather_or_raise

SIZES = tuple(1024 * 4**i for i in range(10))
"""1 kB to 256 MB."""
FIRST, ENOUGH = 3, 1 << 20
"""Calls of a size before these passes, and bytes up to which a kind is measured unless that takes very long."""
MOST_BYTES = 1 << 30
"""Bytes that a collective may need on a rank."""
BESIDE, MOST_CONTENTION = 0.01, 0.9
"""Seconds of a collective, if a size takes as long, beside which computing is timed; and the largest share of it."""
REPEATS, LEAST = 12, 3
"""Measurements of a size, if time allows, and in any case; in so many passes over all sizes and kinds."""
T = TypeVar("T")


def measure_network(
    backend: Backend,
    seconds: float = 5.0,
    tensor_of: Callable[[np.ndarray], Tensor] | None = None,
    crowded: bool = False,
) -> MeasuredNetwork | None:
    """Time each kind of collective at rising sizes; return None for one rank. Every rank must call it, alike.

    Sums are of float32 and of float16, all else is bytes, as exchanges send them. Of every call the slowest rank's time
    counts, and of all calls of a size the lower quartile, because what else a machine does makes them longer only; or
    the median where ranks share cores, since they wait for those in steps too. Several passes go through all sizes and
    kinds, so that what disturbs for a while is a minority of each. A kind goes up to 1 MB, and on until one more size
    would take more than its share of the time. Beside one size of each kind some computing is timed. What
    is sent is not counted as training's.

    Args:
        seconds: about how long all may take.
        tensor_of: makes an array the tensor that is sent, on the device of gradients; the backend's own if left out.
        crowded: True if ranks share cores.

    >>> from grace.core.backend import LocalBackend
    >>> measure_network(LocalBackend()) is None
    True
    """
    if backend.size == 1:  # there is no link
        return None
    timing, sent = _Timing(backend, tensor_of or backend.tensor_of), backend.sent_bytes
    share, took = seconds / len(KINDS), dict[tuple[str, int], list[float]]()
    try:
        for kind in KINDS:
            for nbytes in SIZES:
                if timing.memory(kind, nbytes) > MOST_BYTES and (kind, SIZES[0]) in took:
                    break
                _, *found = timing.seconds(kind, nbytes, FIRST)  # the first may have opened connections
                took[kind, nbytes] = found
                room = share / 2 if nbytes >= ENOUGH else 4 * share
                if min(found) * 4 * (LEAST + FIRST) > room:
                    break
        for _ in range(LEAST):
            for (kind, nbytes), found in took.items():
                found += timing.seconds(kind, nbytes, max(1, int(min(REPEATS, share / 16 / min(found)) / LEAST)))
        sizes = dict[str, int]()
        for kind, nbytes in took:
            if kind not in sizes or min(took[kind, sizes[kind]]) < BESIDE:
                sizes[kind] = nbytes
        beside = {
            kind: timing.measure_contention(kind, nbytes, min(took[kind, nbytes])) for kind, nbytes in sizes.items()
        }
    finally:
        backend.sent_bytes = sent  # what was sent here is no traffic of training
    typical, points = median if crowded else undisturbed, dict[str, list[tuple[float, float]]]()
    for (kind, nbytes), found in took.items():
        points.setdefault(kind, []).append((nbytes, typical(found)))
    curves = {kind: Curve.through(measured) for kind, measured in points.items()}
    return MeasuredNetwork(curves, backend.size, beside)


def oversubscription(backend: Backend, nodes: Sequence[str]) -> float:
    """Return the factor by which a codec, which computes in one thread, takes longer when all ranks of a node are at
    theirs than when one is alone: ranks per core, of the node that has most; 1 where every rank has a core. Every rank
    must call it, with the name of each rank's node.

    >>> from grace.core.backend import LocalBackend
    >>> oversubscription(LocalBackend(), ["here"])
    1.0
    """
    told = gather_or_raise(backend, "cores", cores())
    found = 1.0
    for node in set(nodes):
        here = [mine for name, mine in zip(nodes, told, strict=True) if name == node]
        found = max(found, len(here) / max(1, len(set().union(*here))))
    return found


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class _Timing:
    """Collectives that are timed. All that ranks decide on was gathered from all of them."""

    def __init__(self, backend: Backend, tensor_of: Callable[[np.ndarray], Tensor]):
        self.backend, self.tensor_of = backend, tensor_of
        self.small = tensor_of(np.zeros(1, np.float32))

    def memory(self, kind: str, nbytes: int) -> int:
        """Return the bytes of memory that a collective needs."""
        return nbytes * (1 + self.backend.size) if kind in ("allgather", "gather") else 2 * nbytes

    def seconds(self, kind: str, nbytes: int, count: int) -> list[float]:
        """Return the seconds of collectives of this size, one after the other, on the slowest rank."""
        tensor = self._allocate(kind, nbytes)
        took = self._gather([self._time(kind, tensor) for _ in range(count)])
        return [max(*each, 1e-9) for each in zip(*took, strict=True)]

    def measure_contention(self, kind: str, nbytes: int, seconds: float) -> float:
        """Return the share of computing that a collective of so many seconds takes, on the rank that it slows most: 0
        where it has a core, or a device, for itself. Computing of half as long is timed alone and beside it."""
        tensor = self._allocate(kind, nbytes)
        if "cpu" not in str(getattr(tensor, "device", "cpu")).lower():
            return 0.0
        calls = min(self._gather(math.ceil(50 * seconds / self._compute(100))))  # the same work on all ranks
        alone, beside = [], []
        for _ in range(LEAST):
            self._start("allreduce", self.small).wait()
            alone.append(self._compute(calls))
            self._start("allreduce", self.small).wait()
            handle = self._start(kind, tensor)
            beside.append(self._compute(calls))
            handle.wait()
        return max(0.0, min(MOST_CONTENTION, 1 - min(self._gather(median(alone) / median(beside)))))

    def _compute(self, calls: int) -> float:
        """Return the seconds of so many small computations."""
        block, began = np.ones(1 << 12, np.float32), time.perf_counter()
        for _ in range(calls):
            np.sqrt(block, out=block)
        return max(1e-6 * calls, time.perf_counter() - began)

    def _time(self, kind: str, tensor: Tensor) -> float:
        """Return the seconds of one collective on this rank, from when all are there."""
        wait_for = kernels_of(self.small).wait_for  # a device's collectives are awaited by its stream alone
        self._start("allreduce", self.small).wait()
        wait_for(self.small)
        began = time.perf_counter()
        self._start(kind, tensor).wait()
        wait_for(self.small)
        return time.perf_counter() - began

    def _start(self, kind: str, tensor: Tensor) -> Handle:
        collective = getattr(self.backend, kind.removesuffix("16"))
        self.backend.label = f"grace.links.{kind}.{tensor.shape[0]}"  # engines that pair by name know those they saw
        try:
            started: Handle = collective(tensor, 0) if kind in ("broadcast", "gather") else collective(tensor)
        finally:
            self.backend.label = ""
        return started

    def _allocate(self, kind: str, nbytes: int) -> Tensor:
        """Return a buffer of zeros, if all ranks have room for theirs."""
        dtype = {"allreduce": np.float32, "allreduce16": np.float16}.get(kind, np.uint8)
        parts = self.backend.size if kind == "alltoall" else 1
        # a rank without room must not leave the others in the collective
        with failing_together(self.backend, "room for collectives", "could not measure the network"):
            return self.tensor_of(np.zeros(max(1, nbytes // np.dtype(dtype).itemsize // parts) * parts, dtype))

    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        return gather_or_raise(self.backend, "times of collectives", value)
