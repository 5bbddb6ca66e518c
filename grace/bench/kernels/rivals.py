"""Rivals of a GPU's kernels: torch's top-k, torch's own hooks, and GRACE's formulas in plain torch.

The hooks run as they are, over a process group of one rank, whose collectives move nothing: their codec is left.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Works = dict[str, Callable[[], object]]
RATIO, RANK, LEVELS = 0.01, 4, 127
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


def hooks(x: torch.Tensor, group: dist.ProcessGroup | None) -> dict[str, Works]:
    """Return the works of torch's own hooks, each a round trip of a gradient; ``x`` is not changed."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    given = OneBucket(x.clone())
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    works = (
        lambda: default_hooks.fp16_compress_hook(group, given).wait(),  # type: ignore[arg-type]
        lambda: powerSGD_hook.powerSGD_hook(state, given).wait(),  # type: ignore[arg-type]
    )
    return {name: {"round_trip": work} for name, work in zip(HOOKS, works, strict=True)}


def formulas(x: torch.Tensor) -> dict[str, Works]:
    """Return the works of torch.topk, and of GRACE's methods (Xu et al., ICDCS 2021) in plain torch.

    >>> sorted(formulas(torch.ones(4, 4)))[0]
    "GRACE's efsignsgd in torch"
    """
    flat, n = x.view(-1), x.numel()
    k = max(1, int(n * RATIO))
    found: dict[str, Works] = {
        f"torch.topk(ratio={RATIO})": {"encode": lambda: torch.topk(flat.abs(), k, sorted=False)}
    }

    def topk() -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.topk(flat.abs(), k, sorted=False)[1]
        return flat[indices], indices

    def randomk() -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.randperm(n, device=x.device)[:k]
        return flat[indices], indices

    def scattered(payload: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.zeros_like(flat).scatter_(0, payload[1], payload[0])

    def qsgd() -> tuple[torch.Tensor, torch.Tensor]:
        norm = flat.norm()
        levels = flat.abs() * (LEVELS / norm)
        lower = levels.floor()
        codes = lower + (torch.rand_like(flat) < levels - lower)
        return (codes * flat.sign()).to(torch.int8), norm

    def powersgd() -> tuple[torch.Tensor, torch.Tensor]:
        matrix = x.view(-1, x.shape[-1])
        p = torch.linalg.qr(matrix @ start)[0]
        return p, matrix.t() @ p

    start = torch.randn(x.shape[-1], RANK, device=x.device)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "fp16": (lambda: flat.half(), lambda payload: payload.float()),
        "qsgd": (qsgd, lambda payload: payload[0].float() * (payload[1] / LEVELS)),
        "signsgd": (lambda: (flat >= 0).to(torch.uint8), lambda payload: payload.float() * 2 - 1),
        "efsignsgd": (
            lambda: ((flat >= 0).to(torch.uint8), flat.abs().mean()),
            lambda payload: (payload[0].float() * 2 - 1) * payload[1],
        ),
        "topk": (topk, scattered),
        "randomk": (randomk, scattered),
        f"powersgd({RANK})": (powersgd, lambda payload: payload[0] @ payload[1].t()),
    }
    for name, (encode, decode) in pairs.items():
        payload = encode()
        found[f"GRACE's {name} in torch"] = {
            "encode": encode,
            "decode": lambda decode=decode, payload=payload: decode(payload),  # type: ignore[misc]
        }
    return found


def sent_bits(name: str, shape: tuple[int, ...]) -> float | None:
    """Return the bits per element that a rival sends, if they are known.

    >>> sent_bits("GRACE's qsgd in torch", (8, 8)), sent_bits("torch's fp16 hook", (8, 8))
    (8.0, 16.0)
    """
    n = math.prod(shape)
    low_rank = 32.0 * RANK * (shape[-1] + n // shape[-1]) / n
    known = {"fp16": 16.0, "qsgd": 8.0, "signsgd": 8.0, "efsignsgd": 8.0, "topk": 96 * RATIO, "randomk": 96 * RATIO}
    known |= {f"powersgd({RANK})": low_rank}
    if name in HOOKS:
        return 16.0 if name == HOOKS[0] else low_rank
    return known.get(name.removeprefix("GRACE's ").removesuffix(" in torch"))
