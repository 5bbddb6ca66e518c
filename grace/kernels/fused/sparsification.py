"""The hot primitives of :mod:`grace.kernels.contract.sparsification` as fused loops."""

import math
from typing import Any

import numpy as np

from grace.kernels.checks import check_count, check_range
from grace.kernels.fused.loops import SHIFT32, compiled, f32, f64, i32, u8, u64
from grace.kernels.fused.rounding import _sum_squares
from grace.kernels.fused.selection import _above, _kth_largest, _topk_chunks
from grace.kernels.reference.sparsification import SparseReference, clip_factor, rounded_down


@compiled
def _sample_indices(bits, n, out):
    k = u64(out.size)
    for j in range(out.size):
        start, stop = u64(j) * u64(n) // k, u64(j + 1) * u64(n) // k
        out[j] = i32(start + ((stop - start) * u64(bits[j]) >> SHIFT32))


@compiled
def _zero_at(out, indices):
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] = 0
    return indices.size


@compiled
def _add_at(out, indices, amount):
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] += amount
    return indices.size


@compiled
def _scaled(x, factor, out):
    for i in range(x.size):
        out[i] = f32(f64(x[i]) * factor)


@compiled
def _one_side(x, sign, out):
    count = 0
    for i in range(x.size):
        value = sign * x[i]
        positive = value > 0
        out[i] = value if positive else f32(0)
        count += positive
    return count


@compiled
def _fixed_tags(x, bound, top, per8, per16, out):
    for i in range(x.size):
        magnitude = abs(x[i])
        tag = u8(3)
        if magnitude <= top:
            if np.rint(magnitude * per16) <= f32(32767):
                tag = u8(2)
            if np.rint(magnitude * per8) <= f32(127):
                tag = u8(1)
        out[i] = u8(0) if magnitude <= bound else tag


@compiled
def _where_code(codes, code, out):
    count = 0
    for i in range(codes.size):
        out[count] = i  # overwritten by the next one unless it counts, which costs less than a branch
        count += codes[i] == code
    return count


def check_used(count, indices, n):
    """A loop over indices used so many of them, and stopped at the next one if that is none of an array of n."""
    if count < indices.size:
        check_range(int(indices[count]), int(indices[count]), n)


class SparseFused(SparseReference):
    """A part of :class:`~grace.kernels.fused.primitives.FusedKernels`."""

    empty: Any

    def topk_chunks(self, x, chunk, k):
        return _topk_chunks(x.view(np.uint32), chunk, k)

    def above(self, x, threshold):
        out = np.empty(x.size, np.int32)  # what is not written to takes no memory, but the rest of a huge page
        return out[: _above(x.view(np.uint32), np.float32(threshold).view(np.uint32), out)].copy()

    def kth_magnitude(self, x, k):
        pattern, _ = _kth_largest(x.view(np.uint32), k)
        return float(np.uint32(pattern).view(np.float32))

    def sample_indices(self, stream, n, k, like=None):
        out = self.empty(k, np.int32)
        _sample_indices(self.random_bits(stream, k), n, out)
        return out

    def zero_at(self, out, indices):
        check_used(_zero_at(out, indices), indices, out.size)
        return out

    def add_at(self, out, indices, value, weight):
        check_count("means", value.size, 1)
        check_used(_add_at(out, indices, np.float32(np.float32(weight) * value[0])), indices, out.size)
        return out

    def clip_norm(self, x, limit):
        out = self.empty(x.size, np.float32)
        _scaled(x, clip_factor(limit, math.sqrt(_sum_squares(x))), out)
        return out

    def one_side(self, x, sign):
        out = self.empty(x.size, np.float32)
        return out, int(_one_side(x, np.float32(sign), out))

    def fixed_tags(self, x, bound, top, step8, step16):
        out = self.empty(x.size, np.uint8)
        per8, per16 = np.float32(1 / step8), np.float32(1 / step16)
        _fixed_tags(x, rounded_down(bound), np.float32(top), per8, per16, out)
        return out

    def where_code(self, codes, code):
        out = np.empty(codes.size, np.int32)
        return out[: _where_code(codes, code, out)].copy()
