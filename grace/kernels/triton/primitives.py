"""The Triton kernels: a launch or a few, and each element read once, where torch takes an operation for each step."""

import math
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from grace.kernels.checks import check_packed, check_scale
from grace.kernels.contract.primitives import LARGEST_FACTOR
from grace.kernels.random import Stream
from grace.kernels.reference.primitives import NumpyKernels
from grace.kernels.torch.primitives import DTYPES, TorchKernels
from grace.kernels.triton import arithmetic, packing, random
from grace.kernels.triton.launching import BLOCK, launch
from grace.kernels.triton.quantization import FLOAT32_MAX, ValueTriton, blocks
from grace.kernels.triton.sparsification import SparseTriton

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TritonKernels(ValueTriton, SparseTriton, TorchKernels):
    """Tensors on a GPU: Triton kernels where tensors are contiguous and of the dtypes that these take (``TAKEN``),
    and torch's operations otherwise.

    Codes and positions that are not in range write nothing, and are not reported, as nothing is read back.
    """

    name = "torch-triton"
    codecs = "grace.kernels.triton.sparse_codecs"
    TAKEN = (
        "mean_abs", "quantize", "dequantize", "pack", "unpack", "pack_signs", "add_signs", "topk", "bitmap",
        "scatter_add", "max_abs", "side_means", "clip_deviation", "round_powers", "add_powers", "round_float8",
        "add_float8", "rotate", "bucketize", "add_table", "above", "positions", "zero_at", "add_at", "where_code",
        "topk_chunks",
    )  # fmt: skip
    """Methods of float32, uint8 and int32 tensors; :func:`_guarded` looks at them."""

    def blank(self, shape, dtype, like):
        return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)

    def addresses(self, tensors, dtype="float32"):
        wanted = DTYPES[dtype]
        found = [x.data_ptr() for x in tensors if x.dtype is wanted and x.is_contiguous()]
        return found if len(found) == len(tensors) and len({x.device for x in tensors}) <= 1 else None

    def all_finite(self, x, most=math.inf) -> Any:
        if x.dtype not in FLOATS or not x.is_contiguous():
            return super().all_finite(x, most)
        flag = torch.ones((), dtype=torch.float32, device=x.device)
        launch(arithmetic.deny, blocks(x), flag, x, x.numel(), min(float(most), FLOAT32_MAX), N=BLOCK)
        return flag

    def combine(self, a, x, b, y):
        if x.shape != y.shape or not _plain(x) or not _plain(y):
            return super().combine(a, x, b, y)
        out = torch.empty_like(x, dtype=torch.float32)
        launch(arithmetic.combine, blocks(x), out, x, y, x.numel(), float(a), float(b), N=BLOCK)
        return out

    def add(self, out, x, weight=1.0):
        if out.dtype is not torch.float32 or x.shape != out.shape or not _plain(x) or not _plain(out):
            return super().add(out, x, weight)
        launch(arithmetic.add, blocks(x), out, x, x.numel(), float(weight), N=BLOCK)
        return out

    def divide(self, out, x, by):
        if torch.float32 not in (x.dtype, out.dtype) or not _plain(x) or not _plain(out):
            return super().divide(out, x, by)
        launch(arithmetic.divide, blocks(x), out, x, x.numel(), float(by), N=BLOCK)
        return out

    def signs(self, x):
        if not _plain(x):
            return super().signs(x)
        out = torch.empty_like(x)
        launch(arithmetic.signs, blocks(x), out, x, x.numel(), N=BLOCK)
        return out

    def random_bits(self, stream, n, like):
        out = torch.empty(n, dtype=torch.uint32, device=like.device)
        launch(random.write_words, triton.cdiv(n, BLOCK), out, n, *random.words_of(stream), N=BLOCK)
        return out

    def uniform(self, stream, n, like):
        out = torch.empty(n, dtype=torch.float32, device=like.device)
        launch(random.write_uniform, triton.cdiv(n, BLOCK), out, n, *random.words_of(stream), N=BLOCK)
        return out

    def random_matrix(self, stream, shape, like):
        out = torch.empty(shape, dtype=torch.float32, device=like.device)
        launch(random.write_signed, blocks(out), out, out.numel(), *random.words_of(stream), N=BLOCK)
        return out

    def renew_columns(self, x, stream):
        rows, columns = x.shape
        if x.dtype is not torch.float32 or not x.is_contiguous() or columns > BLOCK:
            return super().renew_columns(x, stream)
        found, out = torch.zeros(2 * columns, dtype=torch.int32, device=x.device), torch.empty_like(x)
        shape = {"COLS": triton.next_power_of_2(max(1, columns))}
        shape["ROWS"] = BLOCK // shape["COLS"]
        numbers = rows, columns, LARGEST_FACTOR
        launch(random.judge_columns, triton.cdiv(rows, shape["ROWS"]), found, x, *numbers, **shape)
        given = out, found, x, x.numel(), columns, *random.words_of(stream)
        launch(random.renew_columns, blocks(x), *given, N=BLOCK)
        return out

    def pack(self, codes, bits):
        if bits == 8:
            return codes
        size, groups = (codes.numel() * bits + 7) // 8, BLOCK // 8
        out = torch.empty(size, dtype=torch.uint8, device=codes.device)
        numbers = out, codes, codes.numel(), size
        launch(packing.pack, triton.cdiv(codes.numel(), 8 * groups), *numbers, BITS=bits, GROUPS=groups)
        return out

    def unpack(self, packed, bits, n):
        check_packed(packed.numel(), bits, n)
        if bits == 8:
            return packed
        out = torch.empty(n, dtype=torch.uint8, device=packed.device)
        launch(packing.unpack, blocks(out), out, packed, n, packed.numel(), BITS=bits, N=BLOCK)
        return out

    def pack_signs(self, x):
        words = torch.empty(triton.cdiv(x.numel(), 32), dtype=torch.int32, device=x.device)
        launch(packing.pack_signs, triton.cdiv(x.numel(), 4 * BLOCK), words, x, x.numel(), WORDS=BLOCK // 8)
        return words.view(torch.uint8)[: triton.cdiv(x.numel(), 8)]

    def add_signs(self, out, packed, scale, weight):
        check_scale(scale)
        check_packed(packed.numel(), 1, out.numel())
        launch(packing.add_signs, blocks(out), out, packed, scale, out.numel(), float(weight), N=BLOCK)
        return out


def trouble(device: torch.device) -> str:
    """Why the kernels cannot be used on a device; empty if one of them does what it should there."""
    stream = Stream(0x0123456789ABCDEF, 1, 2)
    try:
        with _disable_current_modes():  # whoever traces with tensors that have no numbers
            found = KERNELS.random_bits(stream, 9, torch.empty(0, device=device)).cpu().numpy()
    except Exception as error:  # of the compiler, the C compiler that it calls, or the driver
        return f"{type(error).__name__}: {error}"
    return "" if (found == NumpyKernels().random_bits(stream, 9)).all() else "it computes other numbers than the CPU"


def _plain(x: torch.Tensor) -> bool:
    return x.dtype in FLOATS and x.is_contiguous()


_WANTED = (torch.float32, torch.uint8, torch.int32)


def _guarded(method: str) -> Any:
    """A method that is torch's where one of its tensors is not what the kernels take."""
    kernel, plain = getattr(TritonKernels, method), getattr(TorchKernels, method)

    def call(self: Any, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        taken = all(x.dtype in _WANTED and x.is_contiguous() for x in tensors)
        return (kernel if taken else plain)(self, *args)

    call.__name__, call.__doc__ = method, kernel.__doc__ or f"See Kernels.{method}."
    return call


for _method in TritonKernels.TAKEN:
    setattr(TritonKernels, _method, _guarded(_method))

KERNELS = TritonKernels()
