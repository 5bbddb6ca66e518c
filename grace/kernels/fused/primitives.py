"""The reference's hot kernels as fused single-pass loops, compiled by Numba.

They take contiguous NumPy arrays (float32, uint8, int32), often zero-copy views of a framework's CPU
tensors, and release the interpreter lock. Floating-point operations are those of the reference in the same
order, except that float64 sums are reassociated.
"""

import math

import numpy as np

from grace.kernels.checks import check_count, check_packed, check_quantized, check_scale
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.contract.quantization import gaussian_reach
from grace.kernels.fused.halves import HalfFused
from grace.kernels.fused.lanes import part
from grace.kernels.fused.loops import (
    TILE,
    _max_bits,
    _philox,
    _random_blocks,
    _words,
    compiled,
    f32,
    f64,
    summing,
    u32,
    u64,
)
from grace.kernels.fused.packing import _add_signs, _pack, _pack_signs, _unpack
from grace.kernels.fused.products import ProductsFused
from grace.kernels.fused.quantization import ValueFused
from grace.kernels.fused.rounding import NORMS, _dequantize, _quantize
from grace.kernels.fused.selection import _topk
from grace.kernels.fused.sparsification import SparseFused, check_used
from grace.kernels.random import FEISTEL_ROUNDS, Stream, feistel_bits
from grace.kernels.reference.primitives import FLOAT32_MAX


@compiled
def _feistel(index, left_bits, right_bits, k0, k1, step, draw):
    """Send each index through the permutation; round by round, so that Philox is vectorized."""
    for number in range(FEISTEL_ROUNDS):
        left, right = (left_bits, right_bits) if number % 2 == 0 else (right_bits, left_bits)
        low, high, move, by = u32((1 << right) - 1), u32((1 << left) - 1), u32(right), u32(left)
        for j in range(index.size):
            half = u32(index[j] & low)
            mixed, _, _, _ = _philox(half, u32(number), step, draw, k0, k1)
            index[j] = u32(half << by) | (u32(index[j] >> move) ^ (u32(mixed) & high))


@compiled
def _random_indices(out, n, left_bits, right_bits, k0, k1, step, draw):
    index, place = np.empty(TILE, np.uint32), np.empty(TILE, np.int32)
    for low in range(0, out.size, TILE):
        tile = part(out, low, min(low + TILE, out.size))
        walking = tile.size
        for j in range(walking):
            index[j], place[j] = low + j, j
        while walking:
            _feistel(part(index, 0, walking), left_bits, right_bits, k0, k1, step, draw)
            outside = 0
            for j in range(walking):
                value = index[j]
                tile[place[j]] = value  # written again if it is outside
                index[outside], place[outside] = value, place[j]
                outside += value >= n
            walking = outside


@summing
def _sum_abs(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(abs(x[i]))
    return total


@compiled
def _sum_abs_by_tiles(x):
    total = f64(0)
    for low in range(0, x.size, TILE):
        total += _sum_abs(part(x, low, min(low + TILE, x.size)))
    return total


@compiled
def _gather(x, indices, out):
    for i in range(indices.size):
        out[i] = x[indices[i]]


@compiled
def _scatter_add(out, indices, values, weight):
    """Returns how many indices there are before the first that is out of range."""
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] += weight * values[i]
    return indices.size


@compiled
def _combine(a, x, b, y, out):
    for i in range(out.size):
        out[i] = a * x[i] + b * y[i]


@compiled
def _signs(x, out):
    for i in range(x.size):
        out[i] = f32(1) if x[i] >= 0 else f32(-1)


@compiled
def _add(out, x, weight):
    for i in range(out.size):
        out[i] += weight * x[i]


def _plain(x, y):
    """Whether a loop over both takes them: float32, contiguous, of one shape."""
    return x.shape == y.shape and all(a.dtype == np.float32 and a.flags.c_contiguous for a in (x, y))


class FusedKernels(ValueFused, SparseFused, ProductsFused, HalfFused):
    """The reference with its hot kernels compiled.

    >>> import numpy as np
    >>> FusedKernels().topk(np.float32([1, -5, 3, 5]), 2)
    array([1, 3], dtype=int32)
    """

    name = "fused"
    codecs = "grace.kernels.fused.bucket_codecs"

    def addresses(self, tensors, dtype="float32"):
        if all(x.dtype.name == dtype and x.flags.c_contiguous for x in tensors):
            return [x.__array_interface__["data"][0] for x in tensors]
        return None

    def memory(self, x):
        return x.view(np.uint8)

    def all_finite(self, x, most=math.inf):
        if x.dtype != np.float32:
            return super().all_finite(x, most)
        return bool(_max_bits(x.reshape(-1).view(np.uint32)) <= f32(min(most, FLOAT32_MAX)).view(np.uint32))

    def combine(self, a, x, b, y):
        if not _plain(x, y):
            return super().combine(a, x, b, y)
        out = self.empty(x.size, np.float32)
        _combine(f32(a), x.reshape(-1), f32(b), y.reshape(-1), out)
        return out.reshape(x.shape)

    def add(self, out, x, weight=1.0):
        if not _plain(out, x):
            return super().add(out, x, weight)
        _add(out.reshape(-1), x.reshape(-1), f32(weight))
        return out

    def divide(self, out, x, by):
        if out.dtype != x.dtype or x.dtype.itemsize == 2:
            return super().divide(out, x, by)
        x = x.reshape(out.shape)
        if by != 1:
            np.divide(x, out.dtype.type(by), out=out)
        elif x.ctypes.data != out.ctypes.data:
            out[...] = x
        return out

    def mean_abs(self, x):
        return np.array([_sum_abs_by_tiles(x) / x.size if x.size else 0.0], np.float32)

    def random_bits(self, stream, n, like=None):
        out = self.empty((n + 3) // 4 * 4, np.uint32)
        _random_blocks(out, 0, *_words(stream))
        return out[:n]

    def random_indices(self, stream, n, k, like=None):
        out = self.empty(k, np.int32)
        _random_indices(out, n, *feistel_bits(n), *_words(stream.permuting()))
        return out

    def quantize(self, x, levels, bucket_size, norm, stream):
        bucket_size = bucket_within(bucket_size, x.size)
        codes, scales = self.empty(x.size, np.uint8), self.empty(-(-x.size // bucket_size), np.float32)
        reach, words = gaussian_reach(levels) if norm == "rms" else 1.0, _words(stream or Stream(0))
        _quantize(x, codes, scales, f64(levels), bucket_size, NORMS[norm], reach, stream is None, *words)
        return codes, scales

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        _dequantize(out, codes, scales, f64(levels), bucket_size, np.float32(weight))
        return out

    def pack(self, codes, bits):
        if bits == 8:
            return codes
        out = self.empty((codes.size * bits + 7) // 8, np.uint8)
        _pack(codes, bits, out)
        return out

    def unpack(self, packed, bits, n):
        check_packed(packed.size, bits, n)
        if bits == 8:
            return packed
        out = self.empty(n, np.uint8)
        _unpack(packed, bits, out)
        return out

    def signs(self, x):
        if not _plain(x, x):
            return super().signs(x)
        out = self.empty(x.size, np.float32)
        _signs(x.reshape(-1), out)
        return out.reshape(x.shape)

    def pack_signs(self, x):
        out = self.empty((x.size + 7) // 8, np.uint8)
        _pack_signs(x, out)
        return out

    def add_signs(self, out, packed, scale, weight):
        check_scale(scale)
        check_packed(packed.size, 1, out.size)
        amount = np.float32(weight) * (np.float32(1) if scale is None else scale[0])
        _add_signs(out, packed, np.float32(amount))
        return out

    def topk(self, x, k):
        return _topk(x.view(np.uint32), k) if k else np.empty(0, np.int32)

    def gather(self, x, indices):
        out = self.empty(indices.size, x.dtype)
        _gather(x, indices, out)
        return out

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.size, indices.size)
        check_used(_scatter_add(out, indices, values, np.float32(weight)), indices, out.size)
        return out
