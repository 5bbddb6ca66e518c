"""Where everything runs: on a GPU, or, in Triton's interpreter, on the CPU, whose tensors its kernels then take."""

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def prepare() -> None:
    """Let Triton's kernels take a CPU's tensors where they are interpreted."""
    if INTERPRETED:
        from grace.kernels.torch import fused
        from grace.kernels.triton.primitives import KERNELS

        fused._FUSED = KERNELS  # type: ignore[assignment]


def clock() -> Any:
    """The device's own."""
    from grace.bench.common.clocks import DeviceClock, HostClock

    return HostClock() if INTERPRETED else DeviceClock()


def broken() -> bool:
    """Whether the GPU takes nothing more from this process, as after an illegal address."""
    if INTERPRETED:
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
