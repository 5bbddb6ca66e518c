"""Simulated wire beside a GPU's computation, since NCCL takes no two ranks on one GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from grace.backends.simulated import SimulatedRanks
from grace.core.backend import Handle

CALIBRATION = 20_000_000
"""Cycles that a kernel sleeps, to measure the cycles of a second."""


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
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            handle = move()
            torch.cuda._sleep(round(seconds() * self.cycles))
            done = self.stream.record_event()
        sent.record_stream(self.stream)

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

    name = "simulated"

    def __init__(self, size: int, lane: Lane, rate: float | None):
        super().__init__(size)
        self.lane = lane
        self.rate = rate

    def _carried(self, move: Callable[[], Handle], sent: torch.Tensor) -> Handle:
        before = self.sent_bytes

        def seconds() -> float:
            return 0.0 if self.rate is None else 8 * (self.sent_bytes - before) / self.rate

        return self.lane.carry(move, seconds, sent)

    def allreduce(self, tensor: Any) -> Handle:
        return self._carried(partial(super().allreduce, tensor), tensor)

    def allgather(self, tensor: Any) -> Handle:
        return self._carried(partial(super().allgather, tensor), tensor)

    def alltoall(self, tensor: Any) -> Handle:
        return self._carried(partial(super().alltoall, tensor), tensor)

    def gather(self, tensor: Any, root: int) -> Handle:
        return self._carried(partial(super().gather, tensor, root), tensor)
