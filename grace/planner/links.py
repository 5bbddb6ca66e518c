"""What collectives take on the very links, and what they and computing cost each other; all ranks measure together."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from grace.core.backend import Backend, Handle
from grace.errors import ConfigError
from grace.planner.costs import Curve
from grace.planner.step_timer import undisturbed
from grace.session.agreement import gather_or_raise

KINDS = ("allreduce", "allreduce16", "allgather", "alltoall", "broadcast", "gather")
SIZES = tuple(1024 * 4**i for i in range(10))
"""1 kB to 256 MB."""
FIRST, ENOUGH = 3, 1 << 20
"""Calls of a size before these passes, and bytes up to which a kind is measured unless that takes very long."""
MOST_BYTES = 1 << 30
"""That a collective may need on a rank."""
REPEATS, LEAST = 12, 3
"""Of a size, if time allows, and in any case; in so many passes over all sizes and kinds."""
BESIDE_SECONDS = 0.05
"""About how long the collective takes that computing is measured beside."""


@dataclass(frozen=True)
class MeasuredLinks:
    """What was measured, the same on all ranks.

    Attributes:
        curves: seconds by bytes, as :class:`grace.planner.network.Measured` takes them.
        contention: the part by which computing takes longer while a collective is under way; 0 if nothing was computed.
        transfer: by how much a collective takes longer while this rank computes: 0.1 is a tenth.
        seconds: that all of it took.
    """

    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    contention: float = 0.0
    transfer: float = 0.0
    seconds: float = 0.0


def measure_network(
    backend: Backend,
    seconds: float = 5.0,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    compute: Callable[[], Any] | None = None,
    progress: Callable[[str, float], Any] = lambda what, done: None,
    tensor_of: Callable[[np.ndarray], Any] | None = None,
    synchronize: Callable[[], Any] = lambda: None,
    crowded: bool = False,
) -> MeasuredLinks:
    """Time each kind of collective at rising sizes, then computing beside one. Every rank must call it, alike.

    Sums are of float32 and of float16, all else is bytes, as exchanges send them. Of every call the slowest rank's time
    counts, and of all calls of a size the lower quartile, because what else a machine does makes them longer only; or
    the median where ranks share cores, since they wait for those in steps too. Calls are spread over several passes
    through all sizes and kinds, so that what disturbs for a while is a minority of each.
    A kind goes up to 1 MB, and on until one more size would take more than its share of the time. What is sent is not
    counted as training's.

    Args:
        backend: of several ranks; of one there is nothing to measure.
        seconds: about how long all may take.
        sizes: bytes, of the buffers that :class:`grace.planner.network.Network` tells of.
        kinds: of collectives.
        compute: computes something of a few milliseconds, and returns when it is done; for contention.
        progress: called with what is measured and how much of all is done, from 0 to 1.
        tensor_of: makes an array the tensor that is sent, on the device of gradients; the backend's own if left out.
        synchronize: waits until a device has done all that was asked of it.
        crowded: whether ranks share cores.

    Raises:
        ConfigError: sizes, kinds or seconds that cannot be.
        RankError: another rank failed.
        ExchangeError: the engine failed.

    >>> from grace.core.backend import LocalBackend
    >>> measure_network(LocalBackend()).curves
    {}
    """
    if not seconds > 0 or not sizes or min(sizes) < 1:
        raise ConfigError(f"a network is measured for more than 0 s at sizes from 1 byte on, not {seconds}, {sizes}")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"{unknown[0]!r} is no collective that is measured; there are {', '.join(KINDS)}")
    if backend.size == 1:
        return MeasuredLinks()
    began, sent = time.perf_counter(), backend.sent_bytes
    try:
        tests, curves = _Tests(backend, tensor_of or backend.tensor_of, synchronize), dict[str, dict[int, Curve]]()
        share = seconds / (len(kinds) + (compute is not None))
        took: dict[tuple[str, int], list[float]] = {}
        for i, kind in enumerate(kinds):
            for nbytes in sorted(set(sizes)):
                progress(kind, i / len(kinds) / 2)
                if tests.needs(kind, nbytes) > MOST_BYTES and (kind, min(sizes)) in took:
                    break
                _, *found = tests.seconds(kind, nbytes, FIRST)  # the first may have opened connections
                took[kind, nbytes] = found
                room = share / 2 if nbytes >= ENOUGH else 4 * share
                if min(found) * 4 * (LEAST + FIRST) > room:
                    break
        for number in range(LEAST):
            progress("once more", 0.5 + number / LEAST / 3)
            for (kind, nbytes), found in took.items():
                found += tests.seconds(kind, nbytes, max(1, int(min(REPEATS, share / 16 / min(found)) / LEAST)))
        typical = median if crowded else undisturbed
        for kind in kinds:
            points = [(float(nbytes), typical(found)) for (one_kind, nbytes), found in took.items() if one_kind == kind]
            curves[kind] = {backend.size: Curve.through(points)}
        progress("computing beside", 0.9)
        contention, transfer = 0.0, 0.0
        if compute is not None:
            first = curves.get("allreduce")
            contention, transfer = tests.beside(compute, _near(first or next(iter(curves.values())), backend), share)
        progress("done", 1.0)
    finally:
        backend.sent_bytes = sent
    return MeasuredLinks(curves, contention, transfer, tests.agreed(time.perf_counter() - began))


class _Tests:
    """Collectives that are timed. All that ranks decide on is what they have told each other.

    Args:
        backend: their engine.
        tensor_of: makes an array a tensor.
        synchronize: waits for a device.
    """

    def __init__(self, backend: Backend, tensor_of: Callable[[np.ndarray], Any], synchronize: Callable[[], Any]):
        self.backend, self.tensor_of, self.synchronize = backend, tensor_of, synchronize
        self.small = tensor_of(np.zeros(1, np.float32))

    def needs(self, kind: str, nbytes: int) -> int:
        """Bytes of memory."""
        return nbytes * (1 + self.backend.size) if kind in ("allgather", "gather") else 2 * nbytes

    def seconds(self, kind: str, nbytes: int, count: int) -> list[float]:
        """What collectives of this size take, one after the other."""
        tensor = self.room(kind, nbytes)
        took = self.told([self.once(kind, tensor) for _ in range(count)])
        return [max(*each, 1e-9) for each in zip(*took, strict=True)]

    def buffer(self, kind: str, nbytes: int) -> Any:
        """What is sent: zeros."""
        if kind == "allreduce":
            return self.tensor_of(np.zeros(max(1, nbytes // 4), np.float32))
        if kind == "allreduce16":
            return self.tensor_of(np.zeros(max(1, nbytes // 2), np.float16))
        part = self.backend.size if kind == "alltoall" else 1
        return self.tensor_of(np.zeros(max(1, nbytes // part) * part, np.uint8))

    def once(self, kind: str, tensor: Any) -> float:
        """What one takes on this rank, from when all are there."""
        self.together()
        began = time.perf_counter()
        self.start(kind, tensor).wait()
        self.synchronize()
        return time.perf_counter() - began

    def start(self, kind: str, tensor: Any) -> Handle:
        """Begin one."""
        collective = getattr(self.backend, kind.removesuffix("16"))
        self.backend.label = f"grace.links.{kind}.{tensor.shape[0]}"  # engines that pair by name know those they saw
        try:
            started: Handle = collective(tensor, 0) if kind in ("broadcast", "gather") else collective(tensor)
        finally:
            self.backend.label = ""
        return started

    def together(self) -> None:
        """All ranks are here."""
        self.start("allreduce", self.small).wait()
        self.synchronize()

    def room(self, kind: str, nbytes: int) -> Any:
        """A buffer, if all ranks have room for theirs."""
        made, error = None, None
        try:
            made = self.buffer(kind, nbytes)
        except Exception as raised:
            error = raised
        self.told(None, error)
        return made

    def told(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """What all ranks tell; or all raise. (A rank on which a collective fails comes here no more: its end tells.)"""
        return gather_or_raise(self.backend, "times of collectives", value, error, "could not measure the network")

    def agreed(self, value: float) -> float:
        """Rank 0's."""
        return float(self.told(value)[0])

    def beside(self, compute: Callable[[], Any], nbytes: int, share: float) -> tuple[float, float]:
        """By how much computing takes longer while an all-reduce is under way, and the all-reduce beside computing."""
        tensor, task = self.room("allreduce", nbytes), _Task(compute)
        task(1)
        wire = median(self.once("allreduce", tensor) for _ in range(LEAST))
        took = self.told((median(task(1) for _ in range(LEAST)), wire), task.error)
        own, wire = max(each[0] for each in took), max(each[1] for each in took)
        count = max(1, min(1000, int(0.8 * wire / max(own, 1e-9))))
        rounds = int(max(LEAST, min(REPEATS, share / 2 / max(wire + count * own, 1e-9))))
        turns = [self.turn(task, count, tensor) for _ in range(rounds)]
        all_turns = self.told(turns, task.error)
        apart, during, whole = (
            median(max(rank[turn][part] for rank in all_turns) for turn in range(rounds)) for part in (0, 1, 2)
        )
        return max(0.0, during / max(apart, 1e-9) - 1), max(0.0, whole / max(wire, 1e-9) - 1)

    def turn(self, task: "_Task", count: int, tensor: Any) -> list[float]:
        """Computing alone, computing beside an all-reduce, and that."""
        apart = task(count)
        self.together()
        began = time.perf_counter()
        handle = self.start("allreduce", tensor)
        during = task(count)
        handle.wait()
        self.synchronize()
        return [apart, during, time.perf_counter() - began]


class _Task:
    """Computing, which other ranks need not wait for in vain: once it has failed it does nothing any more.

    Args:
        compute: what is computed.
    """

    def __init__(self, compute: Callable[[], Any]):
        self.compute = compute
        self.error: Exception | None = None

    def __call__(self, count: int) -> float:
        """Seconds that it takes so many times."""
        began = time.perf_counter()
        try:
            for _ in range(count if self.error is None else 0):
                self.compute()
        except Exception as error:
            self.error = error
        return time.perf_counter() - began


def _near(by_ranks: Mapping[int, Curve], backend: Backend) -> int:
    """Bytes of a collective that takes about as long as computing is measured beside, of those that were measured."""
    points = by_ranks[backend.size].points
    return int(min(points, key=lambda point: abs(np.log(point[1] / BESIDE_SECONDS)))[0])
