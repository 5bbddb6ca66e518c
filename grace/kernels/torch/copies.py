"""Copies between a host and its devices. Only copies that bring numbers back wait."""

from typing import Any

import numpy as np
import torch

_CAPTURED: list[torch.Tensor] = []
"""Host memory that CUDA graphs copy to a device. Each replay reads it again, so it stays as long as the process."""
CONSTANTS: dict[tuple[int, torch.device], tuple[Any, torch.Tensor]] = {}
"""Copies of arrays on devices, beside the arrays, by ids of arrays and devices."""


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device. A GPU copies pinned memory, since a graph that is being captured takes no other."""
    if device.type != "cuda":
        return host.to(device)
    pinned = host.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(pinned)
    return pinned.to(device, non_blocking=True)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in the CPU's memory, when it is there. A GPU copies to pinned memory."""
    if x.device.type != "cuda":
        return x.cpu()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(x.device))
    event.synchronize()
    return host


def constant(values: Any, device: torch.device) -> torch.Tensor:
    """Return a tensor, or a NumPy array that nobody changes as a tensor: it is copied to a device once."""
    if isinstance(values, torch.Tensor):
        return values
    held = CONSTANTS.get((id(values), device))
    if held is None or held[0] is not values:
        held = CONSTANTS[id(values), device] = values, torch.from_numpy(np.ascontiguousarray(values)).to(device)
    return held[1]
