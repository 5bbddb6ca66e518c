"""Copies between a host and its devices, for which nobody waits unless they bring numbers back."""

from typing import Any

import numpy as np
import torch

_CAPTURED: list[torch.Tensor] = []
"""What CUDA graphs copy to a device: each replay reads it again, so it stays as long as the process."""
CONSTANTS: dict[tuple[int, torch.device], tuple[Any, torch.Tensor]] = {}
"""Arrays on devices, with what they are of."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device; of pinned memory for a GPU, since a graph that is being captured takes no other."""
    if device.type != "cuda":
        return host.to(device)
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(pinned)
    return pinned.to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy in the CPU's memory, when it is there; from a GPU by pinned memory."""
    if x.device.type != "cuda":
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(x.device))
    event.synchronize()
    return host


def constant(values: Any, device: torch.device) -> torch.Tensor:
    """A tensor; of a NumPy array, which nobody changes, it is copied to a device once."""
    if isinstance(values, torch.Tensor):
        return values
    held = CONSTANTS.get((id(values), device))
    if held is None or held[0] is not values:
        held = CONSTANTS[id(values), device] = values, torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return held[1]
