"""How much memory a piece of work holds at most, beyond what was held before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROCESS = Path("/proc/self")


def peak_bytes(work: Callable[[], Any], device: str = "cpu") -> int | None:
    """The largest amount of memory that ``work()`` held at once, beyond what this process held before, in bytes.

    On the CPU it is what the process has resident (pages it has touched, whoever allocated them: torch, NumPy or
    compiled code), from Linux's own peak counter, which is reset first; None where there is no such counter. It counts
    in pages and with a slack of about 0.1 MB. On a GPU it is what torch's allocator handed out.

    What ``work`` returns is dropped. Run it once before, so that nothing is compiled or loaded meanwhile.

    >>> peak = peak_bytes(lambda: torch.ones(10_000_000))
    >>> peak is None or 40e6 <= peak < 42e6
    True
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        _give_back()
        (PROCESS / "clear_refs").write_text("5")  # the peak is what is resident now: see man 5 proc
        before = _resident("VmRSS")
        work()
        return max(0, _resident("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _resident(key: str) -> int:
    """One of the kernel's counts of this process's memory, in bytes."""
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    return {words[0]: 1024 * int(words[1]) for words in lines if words[0] in ("VmRSS:", "VmHWM:")}[f"{key}:"]


def _give_back() -> None:
    """Return freed memory to the system: reused, it would not be counted."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
