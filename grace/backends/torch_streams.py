"""A stream of a GPU's that collectives start on, beside the one in which the program computes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Side:
    """Collectives of one device, on a stream of their own.

    They wait there for what was computed before they were started, and what is computed afterwards waits for them only
    once it is told to, both by events: the host waits for neither. What is sent and received is recorded for the
    stream, so that its memory is not given away while a collective still needs it.

    Args:
        device: a GPU.
        streams: what makes streams and events, as ``torch.cuda`` does.
    """

    def __init__(self, device: Any, streams: Any = torch.cuda):
        self.device, self.streams, self.stream = device, streams, streams.Stream(device)

    def start(self, begin: Callable[[], Any], tensors: Iterable[Any]) -> Any:
        """Start a collective of these tensors, what it sends and what it fills: the work that ``begin`` returns."""
        encoded = self.streams.Event()
        encoded.record(self.streams.current_stream(self.device))
        self.stream.wait_event(encoded)
        with self.streams.stream(self.stream):
            work = begin()
        for tensor in tensors:
            tensor.record_stream(self.stream)
        return work

    def join(self, work: Any) -> None:
        """Let what is computed from now on wait for a collective that was started."""
        with self.streams.stream(self.stream):
            work.wait()
        arrived = self.streams.Event()
        arrived.record(self.stream)
        self.streams.current_stream(self.device).wait_event(arrived)
