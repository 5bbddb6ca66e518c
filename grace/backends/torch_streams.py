"""Stream of a GPU that collectives start on, besides the one in which the program computes."""

from collections.abc import Callable, Iterable
from types import ModuleType

import torch
import torch.distributed as dist


class SideStream:
    """Stream for the collectives of one device.

    Collectives wait there for what was computed before they were started. Later computations wait for a collective only
    after :meth:`join`. Both waits are events: the host waits for neither. Sent and received tensors are recorded for
    the stream, so that their memory is not reused while a collective still needs it.

    Args:
        device: a GPU.
        streams: the factory of streams and events, as ``torch.cuda``.
    """

    def __init__(self, device: torch.device, streams: ModuleType = torch.cuda):
        self.device = device
        self.streams = streams
        self.stream = streams.Stream(device)

    def start(self, begin: Callable[[], dist.Work], tensors: Iterable[torch.Tensor]) -> dist.Work:
        """Start a collective by ``begin``, and return its work; ``tensors`` are those that it sends and fills."""
        encoded = self.streams.Event()
        encoded.record(self.streams.current_stream(self.device))
        self.stream.wait_event(encoded)
        with self.streams.stream(self.stream):
            work = begin()
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return work

    def join(self, work: dist.Work) -> None:
        """Let later computations wait for a collective that was started."""
        with self.streams.stream(self.stream):
            work.wait()
        arrived = self.streams.Event()
        arrived.record(self.stream)
        self.streams.current_stream(self.device).wait_event(arrived)
