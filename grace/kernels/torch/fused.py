"""The fused loops on torch's CPU tensors, without copies, and the choice between them and plain operations."""

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from grace.errors import warn
from grace.kernels.constants import NARROW
from grace.kernels.numba.availability import missing
from grace.kernels.reference import Kernels
from grace.kernels.torch.primitives import DTYPES, TorchKernels
from grace.kernels.triton.availability import missing as triton_missing

FLOAT, HALVES = (torch.float32,), (torch.float16, torch.bfloat16)
IN_CACHE = 1 << 16  # elements below which torch's temporary tensors cost nothing
LOOPS = (
    "mean_abs", "signs", "random_bits", "random_indices", "sample_indices", "quantize", "dequantize", "pack",
    "unpack", "pack_signs", "add_signs", "max_abs", "side_means", "clip_deviation", "round_powers", "add_powers",
    "round_float8", "add_float8", "rotate", "bucketize", "add_table", "quantile_buckets", "topk", "topk_chunks",
    "above", "kth_magnitude", "gather", "scatter_add", "zero_at", "add_at", "clip_norm", "one_side", "fixed_tags",
    "where_code",
)  # fmt: skip
"""Kernels that run compiled whatever they are given, if the loops can read all of it."""


class FusedTorchKernels(TorchKernels):
    """CPU tensors: the fused kernels, on zero-copy NumPy views.

    The methods named in ``LOOPS``, and those below as far as torch is slower, run compiled when their tensors are
    contiguous and of the dtypes that the loops take, and in plain torch otherwise.
    """

    name = "torch-fused"
    codecs = "grace.kernels.numba.bucket_codecs"

    def addresses(self, tensors, dtype="float32"):
        wanted = DTYPES[dtype]
        found = [x.data_ptr() for x in tensors if x.dtype is wanted and x.is_cpu and x.is_contiguous()]
        return found if len(found) == len(tensors) else None

    def memory(self, x):
        return x.view(torch.uint8).numpy()

    def all_finite(self, x, most=math.inf):
        # of 16 bits torch takes 20 copies
        return _by_loops("all_finite", x, most) if _readable(x, FLOAT + HALVES) else super().all_finite(x, most)

    def combine(self, a, x, b, y):
        # torch takes a pass over memory for each factor that is not 1, and one for the sum
        is_sum = b == 1 and (a == 1 or x.numel() < IN_CACHE)
        if is_sum or x.shape != y.shape or not (_readable(x) and _readable(y)):
            return super().combine(a, x, b, y)
        return _by_loops("combine", a, x, b, y)

    def add(self, out, x, weight=1.0):
        # torch converts 16-bit floats a few elements at a time, where tensors of two dtypes meet
        is_sum = weight == 1 and x.dtype == out.dtype
        if is_sum or x.shape != out.shape or not (_readable(out) and _readable(x, FLOAT + HALVES)):
            return super().add(out, x, weight)
        _by_loops("add", out, x, weight)
        return out

    def divide(self, out, x, by):
        x = x.reshape(out.shape)
        plain = by == 1 or x.dtype == out.dtype or x.numel() < IN_CACHE  # torch's casts are as fast
        if plain or torch.float32 not in (x.dtype, out.dtype):
            return super().divide(out, x, by)
        if not all(_readable(y, FLOAT + HALVES) for y in (x, out)):
            return super().divide(out, x, by)
        _by_loops("divide", out, x, by)
        return out

    def uniform(self, stream, n, like=None):
        bits = self.random_bits(stream, n, like)
        if bits.dtype == torch.uint32:  # torch has no shifts for it
            bits = bits.view(torch.int32)
        return (bits >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def matmul(self, a, b, transpose=False):
        # the loops take one thread, of which BLAS needs two for as much, but for single columns; batches are small
        faster = a.dim() == 3 or (torch.get_num_threads() <= 2 and b.shape[-1] > 1)
        if not faster or a.dim() != b.dim() or not _narrow(a, b):
            return super().matmul(a, b, transpose)
        return _by_loops("matmul", a, b, transpose)

    def matmul_add(self, out, a, b, weight, keep=1.0):
        # always by the loops, so that all ranks decode to the same bits, whatever their threads are
        if not (_narrow(out, a) and _narrow(out, b)):
            return super().matmul_add(out, a, b, weight, keep)
        _by_loops("matmul_add", out, a, b, weight, keep)
        return out

    def zero_columns(self, matrices):
        if not all(_narrow(x, x) for x in matrices):
            return super().zero_columns(matrices)
        return _loops().zero_columns(list(map(_array, matrices)))


def _readable(x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = FLOAT) -> bool:
    """Return True if compiled loops can read the tensor as a NumPy array of one of the dtypes."""
    return x.dtype in dtypes and x.is_contiguous() and x.device.type == "cpu"


def _narrow(wide: torch.Tensor, factor: torch.Tensor) -> bool:
    """Return True if loops of products take the matrices."""
    return _readable(wide) and _readable(factor) and factor.shape[-1] <= NARROW


def _compiled(method: str) -> Callable[..., object]:
    """Return a method that runs compiled if the loops can read its tensors."""
    plain = getattr(TorchKernels, method)

    def call(self: FusedTorchKernels, *args: object) -> object:
        for arg in args:
            if isinstance(arg, torch.Tensor) and not _readable(arg, (torch.float32, torch.uint8, torch.int32)):
                return plain(self, *args)
        return _by_loops(method, *args)

    call.__name__, call.__doc__ = method, f"Compiled; see Kernels.{method}."
    return call


for _method in LOOPS:
    setattr(FusedTorchKernels, _method, _compiled(_method))


def _by_loops(method: str, *args: object) -> object:
    """Return the result of a kernel of arrays, computed with the memory of tensors."""
    return _tensor(getattr(_loops(), method)(*map(_array, args)))


def _array(arg: object) -> object:
    """Return a tensor as an array, without a copy. NumPy has no bfloat16, so its patterns stand for it."""
    if not isinstance(arg, torch.Tensor):
        return arg
    given = arg.detach()
    return given.view(torch.int16).numpy().view(np.uint16) if arg.dtype == torch.bfloat16 else given.numpy()


def _tensor(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_tensor, value))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@functools.cache
def _loops() -> Kernels:
    """Return the kernels of arrays. They are made at the first call, since Numba may be missing."""
    from grace.kernels.numba.primitives import NumbaKernels

    class Loops(NumbaKernels):
        """The loops, with bfloat16."""

        half_types: ClassVar = {"float16": np.float16, "bfloat16": np.uint16}

    return Loops()


_PLAIN, _FUSED = TorchKernels(), FusedTorchKernels()
_USE_FUSED = not missing()


@functools.cache
# Once for each device: the trial compiles a kernel, and its warning is enough.
def _triton_kernels(device: torch.device) -> Kernels:
    """Return the kernels of a GPU: Triton's, if they work there."""
    if triton_missing():
        return _PLAIN
    from grace.kernels.triton.primitives import KERNELS, trouble

    if why := trouble(device):
        warn(f"Triton does not work on {device}, so Grace takes torch's operations: {why}")
    return _PLAIN if why else KERNELS


def kernels_of_tensor(tensor: torch.Tensor) -> Kernels:
    """Return fused kernels for CPU tensors if Numba is installed, Triton's for GPUs if that is; else, and where
    GRACE_FUSED is 0, plain ones."""
    kind = tensor.device.type
    if kind == "cpu":
        return _FUSED if _USE_FUSED else _PLAIN
    return _triton_kernels(tensor.device) if kind == "cuda" else _PLAIN  # other devices have torch's operations
