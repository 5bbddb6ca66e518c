"""The device of everything: a GPU, or, in Triton's interpreter, the CPU, whose tensors its kernels then take."""

import dataclasses
import functools
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
        hasten_interpreter()


def hasten_interpreter() -> None:
    """Leave out what Triton's interpreter computes and nobody reads, for most of its time."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def patch_once(function: Any) -> Any:
        """Patch the language when a function is called first, where Triton would at each call; nothing is put back."""
        scope = patch(function)
        scope._changes.clear()
        return scope

    interpreter._patch_lang = patch_once
    numpy_type = interpreter._get_np_dtype  # which makes a table of all types at each call
    known = functools.cache(numpy_type)
    interpreter._get_np_dtype = lambda kind: (numpy_type if kind.scalar.is_ptr() else known)(kind.scalar)
    builder = interpreter.interpreter_builder  # which looks for integers that overflow, and says it in debug mode alone
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def clock() -> Any:
    """The device's own."""
    from grace.bench.common.clocks import DeviceClock, HostClock

    return HostClock() if INTERPRETED else DeviceClock()


def broken() -> bool:
    """Return True if the GPU takes nothing more from this process, as after an illegal address."""
    if INTERPRETED:
        return False
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
