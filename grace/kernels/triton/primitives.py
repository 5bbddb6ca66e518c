"""The Triton kernels: a launch or a few, and each element read once, where torch takes an operation for each step."""

import math
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from grace.kernels.checks import check_count, check_packed, check_quantized, check_scale, check_table
from grace.kernels.constants import EQUAL_DEVIATION, LARGEST_FACTOR, ROTATED, bucket_within, gaussian_reach
from grace.kernels.random import Stream
from grace.kernels.reference import NumpyKernels
from grace.kernels.torch.copies import constant
from grace.kernels.torch.primitives import DTYPES, FLOAT32_MAX, TorchKernels
from grace.kernels.triton import arithmetic, packing, random, rounding, selection
from grace.kernels.triton.launching import BLOCK, FEWER, LARGEST_ROW, STEP, blocks, launch, room_of, steps_of
from grace.kernels.triton.random import words_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TritonKernels(TorchKernels):
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

    def random_bits(self, stream, n, like=None):
        out = torch.empty(n, dtype=torch.uint32, device=like.device)
        launch(random.write_random, blocks(out), out, n, *words_of(stream), FORM=random.BITS, N=BLOCK)
        return out

    def uniform(self, stream, n, like=None):
        out = torch.empty(n, dtype=torch.float32, device=like.device)
        launch(random.write_random, blocks(out), out, n, *words_of(stream), FORM=random.UNIFORM, N=BLOCK)
        return out

    def random_matrix(self, stream, shape, like):
        out = torch.empty(shape, dtype=torch.float32, device=like.device)
        launch(random.write_random, blocks(out), out, out.numel(), *words_of(stream), FORM=random.SIGNED, N=BLOCK)
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
        given = out, found, x, x.numel(), columns, *words_of(stream)
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

    def max_abs(self, x):
        bits = torch.zeros(1, dtype=torch.int32, device=x.device)
        launch(arithmetic.largest, blocks(x), bits, x, x.numel(), N=BLOCK)
        return torch.where(bits > 0x7F800000, bits, bits.clamp(max=0x7F7FFFFF)).view(torch.float32)

    def side_means(self, x):
        parts = torch.zeros((blocks(x), 2), dtype=torch.float64, device=x.device)
        counts = torch.zeros(blocks(x), dtype=torch.int32, device=x.device)
        launch(arithmetic.sides, blocks(x), parts, counts, x, x.numel(), N=BLOCK)
        upper = counts.sum()
        return (parts.sum(dim=0) / torch.stack([x.numel() - upper, upper]).clamp(min=1)).float()

    def clip_deviation(self, x, factor):
        if not x.numel():
            return x.clone()
        mean = _sum(x, arithmetic.PLAIN) / x.numel()
        deviation = (_sum(x, arithmetic.SQUARES, mean) / x.numel()).sqrt()
        limit = torch.where(deviation > EQUAL_DEVIATION * mean.abs(), factor * deviation, FLOAT32_MAX)
        limit, out = limit.clamp(max=FLOAT32_MAX).float(), torch.empty_like(x)
        launch(arithmetic.clip, blocks(x), out, x, x.numel(), limit, N=BLOCK)
        return out

    def mean_abs(self, x):
        return (_sum(x, arithmetic.ABSOLUTE) / max(1, x.numel())).float().reshape(1)

    def quantize(self, x, levels, bucket_size, norm, stream):
        form = rounding.LEVELS if norm == "max" else rounding.LEVELS_BY_NORM
        reach = gaussian_reach(levels) if norm == "rms" else 0.0
        return _rounded(x, bucket_size, form, float(levels), stream, reach)

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.numel())
        check_quantized(codes.numel(), scales.numel(), out.numel(), bucket_size)
        numbers = out.numel(), bucket_size, float(levels), float(weight)
        launch(rounding.add_levels, blocks(out), out, codes, scales, *numbers, N=BLOCK)
        return out

    def round_powers(self, x, stream):
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        launch(rounding.round_powers, blocks(x), codes, x, x.numel(), *words_of(stream), N=BLOCK)
        return codes

    def add_powers(self, out, codes, weight):
        check_packed(codes.numel(), 8, out.numel())
        launch(rounding.add_powers, blocks(out), out, codes, out.numel(), float(weight), N=BLOCK)
        return out

    def round_float8(self, x, bucket_size, stream):
        return _rounded(x, bucket_size, rounding.FLOAT8, 0.0, stream)

    def add_float8(self, out, codes, scales, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.numel())
        check_quantized(codes.numel(), scales.numel(), out.numel(), bucket_size)
        launch(rounding.add_float8, blocks(out), out, codes, scales, out.numel(), bucket_size, float(weight), N=BLOCK)
        return out

    def rotate(self, x):
        out, whole = torch.empty_like(x), x.numel() // ROTATED * ROTATED
        launch(rounding.rotate, blocks(x), out, x, x.numel(), whole, ROWS=BLOCK // ROTATED)
        return out

    def bucketize(self, x, scale, edges):
        edges = constant(edges, x.device)
        codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
        programs = triton.cdiv(x.numel(), FEWER)
        launch(packing.bucketize, programs, codes, x, scale, edges, len(edges), x.numel(), N=FEWER)
        return codes

    def add_table(self, out, packed, bits, table, scale, weight):
        check_scale(scale)
        check_table(table, bits)
        check_packed(packed.numel(), bits, out.numel())
        table = constant(table, out.device)
        if len(table) < 1 << bits and out.device.type == "cpu":  # which only an interpreter's tensors are on
            self.check_indices(self.unpack(packed, bits, out.numel()).to(torch.int32), len(table))
        numbers = out.numel(), packed.numel(), len(table), float(weight)
        launch(packing.add_table, blocks(out), out, packed, table, scale, *numbers, BITS=bits, N=BLOCK)
        return out

    def random_indices(self, stream, n, k, like=None):
        out = torch.empty(k, dtype=torch.int32, device=like.device)
        launch(random.write_walked, triton.cdiv(k, BLOCK), out, n, k, *random.walk_of(stream, n), N=BLOCK)
        return out

    def sample_indices(self, stream, n, k, like=None):
        out = torch.empty(k, dtype=torch.int32, device=like.device)
        launch(random.write_samples, triton.cdiv(k, FEWER), out, n, k, *words_of(stream), N=FEWER)
        return out

    def topk(self, x, k):
        """Find the smallest of the largest digit by digit, by counting on the device: nothing is read back."""
        n, out = x.numel(), torch.empty(k, dtype=torch.int32, device=x.device)
        if not k:
            return out
        steps = steps_of(n)
        programs, room, wide = triton.cdiv(n, steps * STEP), room_of(n, k, steps), int(x.data_ptr() % 16 == 0)
        counts = torch.empty(selection.STATE.value, dtype=torch.int32, device=x.device)
        rows = torch.empty((programs, 32), dtype=torch.int16, device=x.device)
        listed, ties = torch.empty((2, programs), dtype=torch.int32, device=x.device)
        patterns, places = (
            torch.empty(programs * room, dtype=dtype, device=x.device) for dtype in (torch.int32, torch.int16)
        )
        given = counts, x, n, k, steps, room, wide
        launch(selection.guess_largest, 1, counts, x, n, k, warps=16)
        first = patterns, places, listed, ties, counts, x, n, steps, room
        launch(selection.list_largest, programs, *first, N=STEP)
        for done in (1, 2):
            launch(selection.count_digit, programs, patterns, listed, *given, PASS=done, N=STEP, warps=8)
        launch(selection.count_last, programs, rows, patterns, listed, ties, *given, N=STEP)
        launch(selection.write_largest, programs, out, rows, places, patterns, listed, *given, N=STEP, P=32)
        return out

    def topk_chunks(self, x, chunk, k):
        n, count = x.numel(), -(-k * x.numel() // chunk)
        out, rows = torch.empty(count, dtype=torch.int32, device=x.device), max(1, BLOCK // chunk)
        numbers = {"CHUNK": chunk, "ROWS": rows, "warps": max(4, chunk // 512)}
        launch(selection.write_of_chunks, triton.cdiv(n, rows * chunk), out, x, n, k, count, **numbers)
        return out

    def widen_chunks(self, narrow, chunk, k):
        out = torch.empty(narrow.numel(), dtype=torch.int32, device=narrow.device)
        launch(selection.widen_chunks, blocks(out), out, narrow.contiguous(), out.numel(), k, CHUNK=chunk, N=BLOCK)
        return out

    def above(self, x, threshold):
        return _chosen(x, float(threshold))

    def where_code(self, codes, code):
        return _chosen(codes, code)

    def bitmap(self, indices, n):
        words = torch.empty(triton.cdiv(n, 32), dtype=torch.int32, device=indices.device)
        given = words, indices, indices.numel(), n
        launch(packing.write_bits, triton.cdiv(n, 32 * FEWER), *given, WORDS=FEWER, N=FEWER)
        return words.view(torch.uint8)[: triton.cdiv(n, 8)]

    def positions(self, bitmap, n, count=None):
        check_packed(bitmap.numel(), 1, n)
        steps = steps_of(n)
        programs = max(1, triton.cdiv(n, steps * STEP))
        counts = torch.empty(programs, dtype=torch.int32, device=bitmap.device)
        launch(packing.count_bits, programs, counts, bitmap, n, steps, N=STEP)
        out = torch.empty(int(counts.sum()) if count is None else count, dtype=torch.int32, device=bitmap.device)
        launch(packing.write_positions, programs, out, counts, bitmap, n, len(out), steps, N=STEP)
        return out

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.numel(), indices.numel())
        self.check_indices(indices, out.numel())
        k = indices.numel()
        launch(
            selection.scatter_add, triton.cdiv(k, BLOCK), out, indices, values, out.numel(), k, float(weight), N=BLOCK
        )
        return out

    def zero_at(self, out, indices):
        self.check_indices(indices, out.numel())
        launch(selection.scatter_one, blocks(indices), out, indices, None, out.numel(), indices.numel(), 0.0, N=BLOCK)
        return out

    def add_at(self, out, indices, value, weight):
        check_count("means", value.numel(), 1)
        self.check_indices(indices, out.numel())
        k = indices.numel()
        launch(
            selection.scatter_one, triton.cdiv(k, BLOCK), out, indices, value, out.numel(), k, float(weight), N=BLOCK
        )
        return out


def _sum(x: torch.Tensor, what: Any, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Return a sum in float64, in an order that its length alone decides."""
    parts = torch.zeros(blocks(x), dtype=torch.float64, device=x.device)
    launch(arithmetic.sums, blocks(x), parts, x, x.numel(), mean, WHAT=what, N=BLOCK)
    return parts.sum()


def _rounded(
    x: torch.Tensor, bucket_size: int, form: Any, levels: float, stream: Any, reach: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Return the codes and scales of buckets: in one pass if a program can read a bucket at once, else in two."""
    n, bucket_size = x.numel(), bucket_within(bucket_size, x.numel())
    buckets = triton.cdiv(n, bucket_size)
    codes = torch.empty(n, dtype=torch.uint8, device=x.device)
    scales = torch.empty(buckets, dtype=torch.float32, device=x.device)
    words, chosen = words_of(stream) if stream else (0, 0, 0, 0), {"FORM": form, "DRAWN": stream is not None}
    if bucket_size <= LARGEST_ROW:
        columns = max(4, triton.next_power_of_2(bucket_size))
        rows = max(1, 2 * BLOCK // columns)
        numbers = n, buckets, bucket_size, levels
        shape = {"REACH": reach, "FOURS": bucket_size % 4 == 0, "ROWS": rows, "COLS": columns}
        launch(rounding.round_rows, triton.cdiv(buckets, rows), codes, scales, x, *numbers, *words, **chosen, **shape)
        return codes, scales
    shares = triton.cdiv(bucket_size, LARGEST_ROW)
    dtype = torch.float64 if form == rounding.LEVELS_BY_NORM else torch.int32
    parts = torch.empty(buckets * shares, dtype=dtype, device=x.device)
    launch(rounding.scale_parts, buckets * shares, parts, x, n, bucket_size, shares, FORM=form, N=LARGEST_ROW)
    launch(rounding.joined_scales, buckets, scales, parts, shares, n, bucket_size, FORM=form, REACH=reach, N=BLOCK)
    launch(rounding.round_by_scales, blocks(x), codes, scales, x, n, bucket_size, levels, *words, **chosen, N=BLOCK)
    return codes, scales


def _chosen(x: torch.Tensor, value: float | int) -> torch.Tensor:
    """Return the places of the elements that ``selection.chosen`` marks; their number is read back."""
    ends = counted(x, value)
    return placed(x, value, ends, int(ends[-1]) if len(ends) else 0)


def counted(x: torch.Tensor, value: float | int) -> torch.Tensor:
    """Count the chosen elements of each program and all before it."""
    counts = torch.empty(blocks(x), dtype=torch.int32, device=x.device)
    launch(selection.count_chosen, blocks(x), counts, x, x.numel(), value, N=BLOCK)
    return counts.cumsum(0, dtype=torch.int32)


def placed(x: torch.Tensor, value: float | int, ends: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the first ``count`` chosen elements; -1 for missing ones."""
    out = torch.full((count,), -1, dtype=torch.int32, device=x.device)
    launch(selection.write_chosen, blocks(x), out, ends, x, x.numel(), value, count, N=BLOCK)
    return out


def trouble(device: torch.device) -> str:
    """Return the reason why the kernels cannot be used on a device; empty if one of them computes the right numbers."""
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
    """Return a method that falls back to torch's if one of its tensors is of a kind that the kernels do not take."""
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
