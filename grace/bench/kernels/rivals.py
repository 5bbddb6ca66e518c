"""Rivals of a GPU's kernels: torch's own hooks of DDP.

They run as they are, over a process group of one rank, whose collectives move nothing: their codec is left.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

RANK = 4
HOOKS = ("torch's fp16 hook", f"torch's PowerSGD({RANK}) hook")


class OneBucket:
    """Gradient in the form in which torch's hooks take DDP's buckets."""

    def __init__(self, gradient: torch.Tensor):
        self._gradient, self._flat = gradient, gradient.view(-1)

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return [self._gradient]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@contextlib.contextmanager
def alone(device: str) -> Iterator[dist.ProcessGroup]:
    """Return a context in which this process alone is the default process group; refuse if there is one already."""
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A thread of gloo's drops a hook's last callback, and the group with it, at any time after the hook's wait. A group
    # that its own thread destroys, or the interpreter at its end, aborts the process: it is never destroyed.
    world = dist.group.WORLD
    assert world is not None  # it was made above
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(world))
    try:
        yield world
    finally:
        dist.destroy_process_group()


def hooks(x: torch.Tensor, group: dist.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    """Return functions that call torch's own hooks, each a round trip of a gradient; ``x`` is not changed."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    given = OneBucket(x.clone())
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    works = (
        lambda: default_hooks.fp16_compress_hook(group, given).wait(),  # type: ignore[arg-type]
        lambda: powerSGD_hook.powerSGD_hook(state, given).wait(),  # type: ignore[arg-type]
    )
    return dict(zip(HOOKS, works, strict=True))


def sent_bits(hook: str, shape: tuple[int, ...]) -> float:
    """Return the bits per element that a hook sends.

    >>> sent_bits("torch's fp16 hook", (8, 8)), sent_bits("torch's PowerSGD(4) hook", (8, 8))
    (16.0, 32.0)
    """
    n = math.prod(shape)
    return 16.0 if hook == HOOKS[0] else 32.0 * RANK * (shape[-1] + n // shape[-1]) / n
