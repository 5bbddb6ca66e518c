"""The fused loops on torch's CPU tensors, without copies, and the choice between them and plain operations."""

import functools
import math
import warnings
from typing import Any

import numpy as np
import torch

from grace.kernels.constants import NARROW
from grace.kernels.fused.availability import LOOPS, missing
from grace.kernels.reference import Kernels
from grace.kernels.torch.primitives import DTYPES, NAMES, TorchKernels
from grace.kernels.triton.availability import missing as triton_missing

HALVES = (torch.float16, torch.bfloat16)
IN_CACHE = 1 << 16  # elements below which torch's temporary tensors cost nothing


class HalfTorchKernels(TorchKernels):
    """CPU tensors: 16-bit floats in compiled loops. torch converts tensors of two dtypes a few elements at a time, and
    takes 20 copies to see whether all are finite; its casts are as fast as ours."""

    def all_finite(self, x, most=math.inf):
        half = _half_of(x, x)
        return super().all_finite(x, most) if half is None else half.at_most(_patterns(x), most)

    def add(self, out, x, weight=1.0):
        half = _half_of(x, out) if out.dtype == torch.float32 else None
        if half is None:
            return super().add(out, x, weight)
        half.add(_numbers(out), _patterns(x), np.float32(weight))
        return out

    def divide(self, out, x, by):
        if by == 1 or x.dtype == out.dtype or x.numel() < IN_CACHE or torch.float32 not in (x.dtype, out.dtype):
            return super().divide(out, x, by)
        x = x.reshape(out.shape)
        given, wanted = _half_of(x, out), _half_of(out, x)
        if given is not None:
            given.widen(_numbers(out), _patterns(x), np.float32(by))
        elif wanted is not None:
            wanted.narrow(_patterns(out), _numbers(x), np.float32(by))
        else:
            return super().divide(out, x, by)
        return out


def _half_of(x, other):
    """Return the loops of a tensor's 16-bit format; None if they do not take both tensors."""
    if x.dtype not in HALVES or x.shape != other.shape:
        return None
    fit = all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in (x, other))
    return _halves()[NAMES[x.dtype]] if fit else None


def _numbers(x):
    return x.detach().numpy().reshape(-1)


def _patterns(x):
    return x.detach().view(torch.int16).numpy().reshape(-1).view(np.uint16)


class FusedTorchKernels(HalfTorchKernels):
    """CPU tensors: the fused kernels, on zero-copy NumPy views.

    Each method named in ``FUSED`` runs compiled when its tensors are contiguous and of the dtypes that the
    fused loops take, and in plain torch otherwise.
    """

    name = "torch-fused"
    codecs = "grace.kernels.fused.bucket_codecs"
    FUSED = (*LOOPS, "signs")
    DTYPES = frozenset({torch.float32, torch.uint8, torch.int32})

    def addresses(self, tensors, dtype="float32"):
        wanted = DTYPES[dtype]
        found = [x.data_ptr() for x in tensors if x.dtype is wanted and x.is_cpu and x.is_contiguous()]
        return found if len(found) == len(tensors) else None

    def memory(self, x):
        return x.view(torch.uint8).numpy()

    def combine(self, a, x, b, y):
        # torch takes a pass over memory for each factor that is not 1, and one for the sum
        if (b == 1 and (a == 1 or x.numel() < IN_CACHE)) or not _both_plain(x, y):
            return super().combine(a, x, b, y)
        return torch.from_numpy(_fused_kernels().combine(a, x.detach().numpy(), b, y.detach().numpy()))

    def add(self, out, x, weight=1.0):
        if weight == 1 or not _both_plain(out, x):
            return super().add(out, x, weight)
        _fused_kernels().add(out.detach().numpy(), x.detach().numpy(), weight)
        return out

    def uniform(self, stream, n, like=None):
        bits = self.random_bits(stream, n, like)
        if bits.dtype == torch.uint32:  # torch has no shifts for it
            bits = bits.view(torch.int32)
        return (bits >> 8 & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def matmul(self, a, b, transpose=False):
        # the loops take one thread, of which BLAS needs two for as much, but for single columns; batches are small
        loops = a.dim() == 3 or (torch.get_num_threads() <= 2 and b.shape[-1] > 1)
        if not loops or a.dim() != b.dim() or not self._narrow(a, b):
            return super().matmul(a, b, transpose)
        return torch.from_numpy(_fused_kernels().matmul(a.detach().numpy(), b.detach().numpy(), transpose))

    def matmul_add(self, out, a, b, weight, keep=1.0):
        # always by the loops, so that all ranks decode to the same bits, whatever their threads are
        if not self._narrow(out, a) or not self._narrow(out, b):
            return super().matmul_add(out, a, b, weight, keep)
        _fused_kernels().matmul_add(*(x.detach().numpy() for x in (out, a, b)), weight, keep)
        return out

    def zero_columns(self, matrices):
        if not all(self._narrow(x, x) for x in matrices):
            return super().zero_columns(matrices)
        return _fused_kernels().zero_columns([x.detach().numpy() for x in matrices])

    def _narrow(self, wide, factor):
        """Return True if loops of products take the matrices."""
        return _plain(wide) and _plain(factor) and factor.shape[-1] <= NARROW


def _plain(x):
    """Return True if compiled loops can read the tensor as a NumPy array of float32."""
    return x.dtype is torch.float32 and x.is_contiguous() and x.device.type == "cpu"


def _both_plain(x, y):
    return x.shape == y.shape and _plain(x) and _plain(y)


def _fused(method: str):
    plain = getattr(HalfTorchKernels, method)

    def call(self, *args):
        arrays = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if arg.dtype not in self.DTYPES or not arg.is_contiguous() or arg.device.type != "cpu":
                    return plain(self, *args)
                arg = arg.detach().numpy()
            arrays.append(arg)
        return _to_torch(getattr(_fused_kernels(), method)(*arrays))

    call.__name__, call.__doc__ = method, f"Compiled; see Kernels.{method}."
    return call


for _method in FusedTorchKernels.FUSED:
    setattr(FusedTorchKernels, _method, _fused(_method))


def _to_torch(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_to_torch(item) for item in value)
    return value if isinstance(value, (bool, int, float)) else torch.from_numpy(value)


@functools.cache
def _halves():
    from grace.kernels.fused.halves import HALVES

    return HALVES


@functools.cache
def _fused_kernels():
    from grace.kernels.fused.primitives import FusedKernels

    return FusedKernels()


_PLAIN, _FUSED = TorchKernels(), FusedTorchKernels()
_USE_FUSED = not missing()


@functools.cache
def _triton_kernels(device: torch.device) -> Kernels:
    """Return the kernels of a GPU: Triton's, if they work there."""
    if triton_missing():
        return _PLAIN
    from grace.kernels.triton.primitives import KERNELS, trouble

    if why := trouble(device):
        warnings.warn(f"Triton does not work on {device}, so Grace takes torch's operations: {why}", stacklevel=2)
    return _PLAIN if why else KERNELS


def kernels_of_tensor(tensor: torch.Tensor) -> Kernels:
    """Return fused kernels for CPU tensors if Numba is installed, Triton's for GPUs if that is; else, and where
    GRACE_FUSED is 0, plain ones."""
    kind = tensor.device.type
    if kind == "cpu":
        return _FUSED if _USE_FUSED else _PLAIN
    return _triton_kernels(tensor.device) if kind == "cuda" else _PLAIN
