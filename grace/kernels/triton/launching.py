"""Launches of kernels: on the device of their tensors, or only written down, to be compiled for another. There is no
autotuning: sizes of blocks are constants."""

import atexit
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from grace.errors import warn

BLOCK = 1024
"""Elements of a program of most kernels: 8 of each thread, two 16-byte loads."""
FEWER = BLOCK // 2
"""Elements of a program where 8 of each thread would not fit into registers."""

LARGEST_ROW = 4096
"""Elements of the largest buckets that one program reads at once."""
PROGRAMS = 1024
"""Most programs of a search for the largest: more would count more digits than elements."""
STEP = 1024
"""Elements that a program of a search reads at once."""


def steps_of(n: int) -> int:
    """Return the number of reads of each program of a search: its positions and counts have 16 bits.

    >>> steps_of(0), steps_of(3 << 20), steps_of(1 << 30)
    (1, 4, 32)
    """
    return min(triton.next_power_of_2(max(1, triton.cdiv(n, PROGRAMS * STEP))), (1 << 15) // STEP)


def room_of(n: int, k: int, steps: int) -> int:
    """Return the number of elements that each program of a search may list: most likely those above the guess are
    little more than k. Where there are more than there is room for, they are read from the tensor.

    >>> room_of(1 << 20, 1 << 13, 1), room_of(1 << 20, 1 << 17, 2), room_of(1 << 20, 1 << 19, 2)
    (256, 1024, 2048)
    """
    return steps * STEP // (4 if 16 * k <= n else 2 if 3 * k <= n else 1)


@dataclass
class Launch:
    """One launch of a kernel that was written down.

    Attributes:
        kernel: what ``triton.jit`` made.
        programs: how many of it are started.
        args: its arguments, by position.
        constants: those that are known when it is compiled, and the compiler's options.
    """

    kernel: Any
    programs: int
    args: tuple[object, ...]
    constants: dict[str, Any]


_RECORD: list[Launch] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches in this context instead of making them: tensors may be on the meta device."""
    global _RECORD
    before, _RECORD = _RECORD, []
    try:
        yield _RECORD
    finally:
        _RECORD = before


def launch(kernel: Any, programs: int, *args: object, warps: int = 4, **constants: Any) -> None:
    """Start ``programs`` of a kernel on the device of its first argument.

    A product and a sum are rounded one after the other, as everywhere, so that all devices compute the same bits.
    """
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if _RECORD is not None:
        _RECORD.append(Launch(kernel, programs, args, {**constants, **options}))
    elif programs:
        with torch.cuda.device_of(args[0]):  # nothing, of a tensor on a CPU
            kernel[(programs,)](*args, **constants, **options)


def keep_compiled() -> None:
    """Let Triton keep compiled kernels in a temporary folder if its own cannot be written to: it would fail at the
    first launch."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        temporary = tempfile.TemporaryDirectory(prefix="grace-triton-")
        atexit.register(temporary.cleanup)
        os.environ["TRITON_CACHE_DIR"] = temporary.name
        warn(
            f"kernels are compiled again in each process, since Triton cannot keep them ({error}): set "
            "TRITON_CACHE_DIR to a folder that can be written to"
        )


def signed(word: int) -> int:
    """Return a 32-bit word as the int32 of the same bits, so that its size does not choose its type.

    >>> signed(0xFFFFFFFF), signed(7)
    (-1, 7)
    """
    return word - (1 << 32) if word >= 1 << 31 else word


keep_compiled()
