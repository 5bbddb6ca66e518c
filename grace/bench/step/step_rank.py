"""One rank of ``grace bench step``.

Usage: python -m grace.bench.step.step_rank FOLDER ENGINE, where FOLDER holds settings.json; rank 0 writes events.jsonl,
a line for each :class:`~grace.bench.common.events.Event`: facts, the number of blocks, and the blocks of steps.
"""

import contextlib
import math
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Sequence

import torch

from grace.bench.common.events import Event
from grace.bench.ranks.rank_program import Emit, join_run, run_as_rank
from grace.bench.step.contestants import (
    Contestant,
    Stepper,
    bound,
    horovod_baselines,
    in_hook,
    in_optimizer,
    torch_baselines,
)
from grace.bench.step.step_settings import StepSettings
from grace.bench.workloads.models import workload
from grace.core.backend import Backend
from grace.errors import ConfigError, ExchangeError, GraceError, RankError

WARM_UP = 3
"""Steps before anything is timed: DDP rebuilds its buckets after the first; torch's PowerSGD starts at the third.
``strategy="auto"`` takes more, until it has chosen."""
BLOCK_SECONDS = 0.2
"""Approximate seconds of a block."""
LONGEST_BLOCK = 50
"""Largest number of a block's steps, if a period is not longer; a block has at least one."""
ACKNOWLEDGED, RECEIVED = 120, 128
"""Offsets in TCP_INFO (linux/tcp.h) of ``tcpi_bytes_acked`` and ``tcpi_bytes_received``, 64 bits each."""


def measure(settings: StepSettings, backend: Backend, engine: str, emit: Emit) -> None:
    """Let the contestants take turns, and emit their blocks of steps.

    The engine is that of this run: its baselines are measured, and Grace's methods if it is the settings' engine.
    """
    if not os.environ.get("OMP_NUM_THREADS"):  # torch reads it
        torch.set_num_threads(1)
    torch.manual_seed(0)
    work = workload(settings.model, backend.rank)
    model = work.model
    skipped: dict[str, str] = {}
    steppers: list[tuple[Stepper, int]] = []
    for contestant in _contestants(settings, engine, backend.size):
        try:
            stepper = Stepper(contestant, model, work.loss)
            steppers.append((stepper, _warm_up(stepper, backend)))
        except (GraceError, RuntimeError, TypeError, ValueError) as error:
            refused = isinstance(error, ConfigError | RankError) and not isinstance(error, ExchangeError)
            if contestant.kind != "baseline" and not refused:
                raise
            skipped[contestant.name] = str(error).splitlines()[0]  # on every rank: the engine or Grace refuses it
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts: dict[str, object] = {
        "device": next(model.parameters()).device.type,
        "parameters": count,
        "batch": work.samples,
    }
    facts |= {"optimizer": "SGD", "threads": torch.get_num_threads()}
    emit({"facts": {**facts, **({"skipped": skipped} if skipped else {})}})
    emit({"blocks": settings.rounds * len(steppers)})
    for _ in range(settings.rounds):
        for stepper, steps in steppers:
            block = _block(stepper, steps, backend, settings.sharded)
            one = stepper.contestant
            emit({"name": one.name, "kind": one.kind, "method": one.method, "samples": work.samples, **block})


def _contestants(settings: StepSettings, engine: str, ranks: int) -> list[Contestant]:
    if settings.sharded:
        from grace.bench.step import sharded  # it needs a newer torch

        return sharded.contestants(settings)
    found = [bound()]
    if ranks > 1:
        if engine == "torch" and "ddp" in settings.baselines:
            found += torch_baselines()
        if engine == "horovod" and "horovod" in settings.baselines:
            found += horovod_baselines()
    if engine == settings.engine:
        size = settings.bucket_bytes
        found += [in_optimizer(spec, spec, compressor=spec, bucket_bytes=size) for spec in settings.methods]
        found += [in_optimizer(f"strategy {spec}", strategy=spec) for spec in settings.strategies]
        if settings.ddp_hook and ranks > 1:
            found += [in_hook(spec, size) for spec in settings.methods]
    return found


def _warm_up(stepper: Stepper, backend: Backend) -> int:
    """Make the first steps, and return the number of steps of a block: whole periods, the same number on all ranks."""
    count = 0
    while count < WARM_UP or stepper.planning:
        began = time.perf_counter()
        stepper()
        _synchronize(stepper)
        seconds = time.perf_counter() - began
        count += 1
    first = backend.allgather_object(seconds)[0]  # rank 0's time, so that all ranks make as many steps
    steps = min(LONGEST_BLOCK, max(1, round(BLOCK_SECONDS / first)))
    return math.ceil(steps / stepper.period) * stepper.period


def _block(stepper: Stepper, steps: int, backend: Backend, sharded: int = 0) -> Event:
    """Make some steps, and return each one's time on this rank, and the bytes per step of the rank that moved most.

    If ranks exchange in one step of a period only, the times are the means of the periods. With shard groups, bytes are
    those that left or entered a group, of the group that moved most.
    """
    backend.allgather_object(None)  # a barrier: the former contestant's collectives are done on all ranks
    traffic = stepper.traffic
    sockets = _tcp_bytes(bool(sharded))
    codec = traffic.codec_seconds if traffic else None
    counted = traffic.sent_bytes if traffic else 0
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        stepper()
        _synchronize(stepper)
        times.append(1e3 * (time.perf_counter() - began))
    backend.allgather_object(None)
    own = stepper.traffic.sent_bytes - counted if stepper.traffic else None
    sent, received = zip(*backend.allgather_object(_moved(sockets, _tcp_bytes(bool(sharded)), own)), strict=True)
    after = stepper.traffic
    period = stepper.period
    return {
        "times_ms": [statistics.fmean(times[first : first + period]) for first in range(0, steps, period)],
        "codec_ms": 1e3 * (after.codec_seconds - codec) / steps if after and codec is not None else None,
        "sent_bytes": _most(sent, steps, sharded or 1),
        "received_bytes": _most(received, steps, sharded or 1),
    }


def _tcp_bytes(between_nodes: bool = False) -> tuple[int, int] | None:
    """Return the bytes sent (and acknowledged) and received so far by all open TCP connections, without headers; None
    where they cannot be known.

    With ``between_nodes`` only connections whose ends have different addresses count, and None means that no connection
    leaves this node.
    """
    if sys.platform != "linux":
        return None
    sent = received = found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:  # dup: closing it leaves the engine's open
                if between_nodes and connection.getpeername()[:1] == connection.getsockname()[:1]:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            # an older kernel gives a shorter structure
            if len(info) >= RECEIVED + 8:
                found += 1
                sent += struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
                received += struct.unpack_from("Q", info, RECEIVED)[0]
    return None if between_nodes and not found else (sent, received)


def _moved(
    before: tuple[int, int] | None, after: tuple[int, int] | None, counted: float | None
) -> tuple[float | None, float | None]:
    """Return the bytes through the sockets; where there are none (shared memory), those that Grace has counted, if any.

    >>> _moved((100, 50), (400, 80), 290.0), _moved((0, 0), (0, 0), 290.0), _moved(None, None, None)
    ((300, 30), (290.0, None), (None, None))
    """
    if before is not None and after is not None and (after[0] - before[0] > 0 or not counted):
        return after[0] - before[0], after[1] - before[1]
    return counted, None


def _most(values: Sequence[float | None], steps: int, together: int) -> float | None:
    """Return the largest value per step over groups of so many ranks.

    >>> _most([4, 6, 1, 2], 2, together=1), _most([4, 6, 1, 2], 2, together=2), _most([4, None], 2, together=1)
    (3.0, 5.0, None)
    """
    known = [value for value in values if value is not None]
    if len(known) != len(values):
        return None
    return max(sum(known[first : first + together]) for first in range(0, len(known), together)) / steps


def _synchronize(stepper: Stepper) -> None:
    if next(stepper.model.parameters()).is_cuda:
        torch.cuda.synchronize()


def main(folder: str, engine: str) -> None:
    """Join the run, and measure."""
    with join_run(folder, StepSettings, engine) as (settings, backend, emit):
        measure(settings, backend, engine, emit)


if __name__ == "__main__":
    run_as_rank(main)
