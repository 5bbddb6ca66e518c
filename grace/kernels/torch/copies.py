"""Copies between a host and its devices. Only copies that bring numbers back wait."""

from collections.abc import Sequence

import numpy as np
import torch

_CAPTURED: list[torch.Tensor] = []
"""Host memory that CUDA graphs copy to a device. Each replay reads it again, so it stays as long as the process."""
CONSTANTS: dict[tuple[int, torch.device], tuple[np.ndarray, torch.Tensor]] = {}
"""Copies of arrays on devices, beside the arrays, by ids of arrays and devices."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device. A GPU copies pinned memory, since a graph that is being captured takes no other."""
    if device.type != "cuda":
        return host.to(device)
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(pinned)
    return pinned.to(device, non_blocking=True)


class StagedCopy:
    """Pinned memory and memory on a device, through which arrays of one size and dtype are copied again and again.

    New memory for each copy would take longer than the copy. It would also change what the framework's allocator
    returns for other tensors, whose addresses may then differ from those of the step before.
    """

    def __init__(self, size: int, dtype: np.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        like = torch.from_numpy(np.empty(0, dtype))
        self.host = torch.empty(size, dtype=like.dtype, device="cpu", pin_memory=on_gpu)
        self.array = self.host.numpy()
        self.tensor = torch.empty(size, dtype=like.dtype, device=device)
        """The numbers on the device."""
        self.copied = torch.cuda.Event() if on_gpu else None

    def write(self, values: np.ndarray) -> None:
        """Copy numbers to the device, behind all work of the current stream so far.

        The host waits only if the device has not made the last copy yet.
        """
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        self.array[:] = values
        self.tensor.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies in the CPU's memory, when they are there; tensors of the CPU themselves. A GPU copies to pinned
    memory, and all its copies take one wait."""
    found = []
    for x in tensors:
        on_gpu = x.device.type == "cuda"
        pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) if on_gpu else None
        found.append(x.cpu() if pinned is None else pinned.copy_(x, non_blocking=True))
    for device in {x.device for x in tensors if x.device.type == "cuda"}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
    return found


def constant(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return a tensor, or a NumPy array that nobody changes as a tensor: it is copied to a device once."""
    if isinstance(values, torch.Tensor):
        return values
    held = CONSTANTS.get((id(values), device))
    if held is None or held[0] is not values:
        held = CONSTANTS[id(values), device] = values, torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return held[1]
