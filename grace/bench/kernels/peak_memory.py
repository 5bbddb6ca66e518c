"""Peak memory of a piece of work, beyond the memory that was held before."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Numbers of mallopt's parameters: the size from which a block is mapped of its own, and the freed bytes that stay."""
MAPPED = 2
"""Bit of the word before a block: the block is mapped."""
SMALL = 1 << 16
"""Bytes of the smallest block that is returned."""


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int | None:
    """Return the largest memory in bytes that ``work()`` held, beyond the memory that this process held before.

    On the CPU it is resident memory (pages it has touched, whoever allocated them), from Linux's own peak counter,
    which is reset first; None where there is no such counter. It is off by up to 0.5 MB or so, since Linux counts pages
    per core. On a GPU torch's allocator counts what it hands out. Run the work once before, so that nothing is compiled
    or loaded meanwhile.
    """
    gc.collect()  # cycles that are freed during the work would hide what it allocates
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        with _returning_what_is_freed():
            (PROCESS / "clear_refs").write_text("5")  # the peak is what is resident now: see man 5 proc
            before = _resident("VmRSS")
            work()
            return max(0, _resident("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _resident(key: str) -> int:
    """Return one of the kernel's counts of this process's memory, in bytes."""
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    return {words[0]: 1024 * int(words[1]) for words in lines if words[0] in ("VmRSS:", "VmHWM:")}[f"{key}:"]


@contextlib.contextmanager
def _returning_what_is_freed() -> Iterator[None]:
    """Return a context in which glibc returns large blocks to the system as soon as they are freed.

    It would keep those below 32 MB: kept, they count, and used again, they do not. So each such block shall be mapped
    on its own, which glibc does where no free block of the heap is large enough: those are taken meanwhile, without
    touching them. Afterwards the thresholds are where glibc raises them to by itself once large blocks were freed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):  # another C library
        yield
        return
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim(0)
    libc.mallopt(MMAP_THRESHOLD, SMALL)
    taken, size = [], 1 << 30
    while size >= SMALL:
        # The word before a block holds its size, with flags in the lowest bits: glibc's malloc_chunk.
        block = libc.malloc(size)
        if block and not ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & MAPPED:
            taken.append(block)
        else:
            libc.free(block)
            size //= 2
    try:
        yield
    finally:
        for block in taken:
            libc.free(block)
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(TRIM_THRESHOLD, 64 << 20)
