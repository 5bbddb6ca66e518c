"""The value quantizers' kernels in Triton."""

from typing import Any

import torch
import triton

from grace.kernels.checks import check_packed, check_quantized, check_scale, check_table
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.contract.quantization import ROTATED, gaussian_reach
from grace.kernels.reference.quantization import CONSTANT
from grace.kernels.torch.copies import constant
from grace.kernels.triton import arithmetic, packing, rounding
from grace.kernels.triton.launching import BLOCK, FEWER, launch
from grace.kernels.triton.random import words_of

LARGEST_ROW = 4096
"""Elements of the largest buckets that one program reads at once."""
FLOAT32_MAX = torch.finfo(torch.float32).max


class ValueTriton:
    """A part of :class:`~grace.kernels.triton.primitives.TritonKernels`. Nothing is read back from the device."""

    check_indices: Any
    unpack: Any

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
        limit = torch.where(deviation > CONSTANT * mean.abs(), factor * deviation, FLOAT32_MAX)
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


def blocks(x: torch.Tensor) -> int:
    """How many programs take so many elements."""
    return triton.cdiv(x.numel(), BLOCK)


def _sum(x: torch.Tensor, what: Any, mean: torch.Tensor | None = None) -> torch.Tensor:
    """A sum in float64, in an order that its length alone decides."""
    parts = torch.zeros(blocks(x), dtype=torch.float64, device=x.device)
    launch(arithmetic.sums, blocks(x), parts, x, x.numel(), mean, WHAT=what, N=BLOCK)
    return parts.sum()


def _rounded(
    x: torch.Tensor, bucket_size: int, form: Any, levels: float, stream: Any, reach: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """The codes and scales of buckets: in one pass where a program can read a bucket at once, else in two."""
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
