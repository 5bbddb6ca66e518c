"""The reference's hot kernels as fused single-pass loops, compiled by Numba.

They take contiguous NumPy arrays (float32, uint8, int32), often zero-copy views of a framework's CPU
tensors, and release the interpreter lock. Floating-point operations are those of the reference in the same
order, except that float64 sums are reassociated.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from grace.kernels.checks import check_count, check_packed, check_quantized, check_scale
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.fused.loops import (
    LOW31,
    SHIFT8,
    TILE,
    UNIT,
    _max_bits,
    _philox,
    _random_blocks,
    _words,
    f32,
    f64,
    i32,
    u8,
    u32,
    u64,
)  # fmt: skip
from grace.kernels.fused.quantization import ValueFused
from grace.kernels.fused.sparsification import SparseFused, check_used
from grace.kernels.random import FEISTEL_ROUNDS, feistel_bits
from grace.kernels.reference.primitives import FLOAT32_MAX, NumpyKernels


@njit(nogil=True, cache=True)
def _random_indices(out, n, left_bits, right_bits, k0, k1, step, draw):
    for i in range(out.size):
        index = u32(i)
        while True:
            left, right = u32(index >> u32(right_bits)), u32(index & u32((1 << right_bits) - 1))
            lb, rb = left_bits, right_bits
            for number in range(FEISTEL_ROUNDS):
                mixed, _, _, _ = _philox(right, u32(number), step, draw, k0, k1)
                left, right = right, u32(left ^ (mixed & u32((1 << lb) - 1)))
                lb, rb = rb, lb
            index = u32(u32(left << u32(right_bits)) | right)
            if index < n:
                break
        out[i] = index


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum_squares(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(x[i]) * f64(x[i])
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum_abs(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(abs(x[i]))
    return total


@njit(nogil=True, cache=True)
def _sum_abs_by_tiles(x):
    total = f64(0)
    for low in range(0, x.size, TILE):
        total += _sum_abs(x[low : min(low + TILE, x.size)])
    return total


@njit(nogil=True, cache=True)
def _quantize(x, codes, scales, levels, bucket_size, l2, k0, k1, step, draw):
    random = np.empty(TILE + 4, np.uint32)
    one, top = f32(1), f32(levels)
    for bucket in range(scales.size):
        start, stop = bucket * bucket_size, min((bucket + 1) * bucket_size, x.size)
        scale = f32(0)
        if l2:
            scale = f32(min(np.sqrt(_sum_squares(x[start:stop])), f64(FLOAT32_MAX)))
        else:
            for i in range(start, stop):
                scale = max(scale, abs(x[i]))
            scale = min(scale, FLOAT32_MAX)
        scales[bucket] = scale
        divisor = scale if scale > 0 else one
        for low in range(start, stop, TILE):
            high = min(low + TILE, stop)
            offset = low % 4
            blocks = (high - low + offset + 3) // 4
            _random_blocks(random[: 4 * blocks], low // 4, k0, k1, step, draw)
            for i in range(high - low):
                value = x[low + i]
                u = f32(random[offset + i] >> SHIFT8) * UNIT
                code = i32(min(np.floor(abs(value) / divisor * top + u), top))
                codes[low + i] = u8(levels + (code if value >= 0 else -code))


@njit(nogil=True, cache=True)
def _dequantize(out, codes, scales, levels, bucket_size, weight):
    middle = f32(levels)
    for bucket in range(scales.size):
        factor = scales[bucket] * weight
        for i in range(bucket * bucket_size, min((bucket + 1) * bucket_size, codes.size)):
            out[i] += factor * ((f32(codes[i]) - middle) / middle)


@njit(nogil=True, cache=True)
def _pack(codes, bits, out):
    full = codes.size // 8
    for group in range(full + (codes.size % 8 > 0)):
        word = u64(0)
        for i in range(min(8, codes.size - 8 * group)):
            word |= u64(codes[8 * group + i]) << u64(bits * i)
        for byte in range(min(bits, out.size - group * bits)):
            out[group * bits + byte] = u8(word >> u64(8 * byte))


@njit(nogil=True, cache=True)
def _unpack(packed, bits, out):
    mask = u64((1 << bits) - 1)
    for group in range((out.size + 7) // 8):
        word = u64(0)
        for byte in range(min(bits, packed.size - group * bits)):
            word |= u64(packed[group * bits + byte]) << u64(8 * byte)
        for i in range(min(8, out.size - 8 * group)):
            out[8 * group + i] = u8((word >> u64(bits * i)) & mask)


@njit(nogil=True, cache=True)
def _pack_signs(x, out):
    full = x.size // 8
    for group in range(full):
        byte = u8(0)
        for i in range(8):
            byte |= u8(u8(x[8 * group + i] >= 0) << i)
        out[group] = byte
    if full < out.size:
        byte = u8(0)
        for i in range(x.size - 8 * full):
            byte |= u8(u8(x[8 * full + i] >= 0) << i)
        out[full] = byte


@njit(nogil=True, cache=True)
def _add_signs(out, packed, amount):
    for i in range(out.size):
        out[i] += amount if (packed[i >> 3] >> (i & 7)) & 1 else -amount


@njit(nogil=True, cache=True)
def _kth_largest(bits, k):
    """The bit pattern of the k-th largest magnitude, and how many are larger: radix select, 11 + 10 + 10 bits."""
    prefix, known, remaining, larger = u32(0), 31, k, 0
    for width in (11, 10, 10):
        shift = known - width
        histogram = np.zeros(1 << width, np.int64)
        mask = u32((1 << width) - 1)
        for i in range(bits.size):
            b = bits[i] & LOW31
            if u64(b) >> u64(known) == u64(prefix):
                histogram[(b >> u32(shift)) & mask] += 1
        digit = (1 << width) - 1
        while histogram[digit] < remaining:
            remaining -= histogram[digit]
            larger += histogram[digit]
            digit -= 1
        prefix = u32(prefix << u32(width)) | u32(digit)
        known = shift
    return prefix, larger


@njit(nogil=True, cache=True)
def _collect(bits, threshold, ties, out):
    """Positions above the threshold and the first ``ties`` positions at it, ascending."""
    count = 0
    for i in range(bits.size):
        b = bits[i] & LOW31
        if b >= threshold:
            if b == threshold:
                if ties == 0:
                    continue
                ties -= 1
            out[count] = i
            count += 1
            if count == out.size:
                return


@njit(nogil=True, cache=True)
def _filter(bits, threshold, indices, found):
    """Positions and patterns of magnitudes at or above the threshold; -1 when there are too many."""
    count = 0
    for i in range(bits.size):
        b = bits[i] & LOW31
        if b >= threshold:
            if count == indices.size:
                return -1
            indices[count], found[count] = i, b
            count += 1
    return count


@njit(nogil=True, cache=True)
def _topk(bits, k):
    """Exact top-k in one pass over the tensor, as a rule.

    1. Guess a threshold that a little more than k elements reach, from an evenly spread sample.
    2. Collect those candidates in one pass; 3. select exactly among them. If the guess failed (too few
    candidates, or far too many), select over the whole tensor instead: the result is the same.
    """
    n, out = bits.size, np.empty(k, np.int32)
    if k * 8 <= n and n >= 1 << 14:
        stride = max(1, min(n // 2048, k // 64, 128))
        sample = np.empty(n // stride, np.uint32)
        for j in range(sample.size):
            sample[j] = bits[j * stride + (j * 7) % stride]
        expected = sample.size * k / n
        rank = min(sample.size, i32(expected + 4 * np.sqrt(expected) + 4))
        guess, _ = _kth_largest(sample, rank)
        capacity = min(n, 4 * k + 1024)
        indices, found = np.empty(capacity, np.int32), np.empty(capacity, np.uint32)
        count = _filter(bits, guess, indices, found)
        if count >= k:
            threshold, larger = _kth_largest(found[:count], k)
            _collect(found[:count], threshold, k - larger, out)
            for j in range(k):
                out[j] = indices[out[j]]
            return out
    threshold, larger = _kth_largest(bits, k)
    _collect(bits, threshold, k - larger, out)
    return out


@njit(nogil=True, cache=True)
def _gather(x, indices, out):
    for i in range(indices.size):
        out[i] = x[indices[i]]


@njit(nogil=True, cache=True)
def _scatter_add(out, indices, values, weight):
    """Returns how many indices there are before the first that is out of range."""
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] += weight * values[i]
    return indices.size


@njit(nogil=True, cache=True)
def _combine(a, x, b, y, out):
    for i in range(out.size):
        out[i] = a * x[i] + b * y[i]


@njit(nogil=True, cache=True)
def _add(out, x, weight):
    for i in range(out.size):
        out[i] += weight * x[i]


def _plain(x, y):
    """Whether a loop over both takes them: float32, contiguous, of one shape."""
    return x.shape == y.shape and all(a.dtype == np.float32 and a.flags.c_contiguous for a in (x, y))


class FusedKernels(ValueFused, SparseFused, NumpyKernels):
    """The reference with its hot kernels compiled.

    >>> import numpy as np
    >>> FusedKernels().topk(np.float32([1, -5, 3, 5]), 2)
    array([1, 3], dtype=int32)
    """

    name = "fused"
    compiled = True
    empty: Any = staticmethod(np.empty)
    """Makes the arrays that are returned: a 1-d one of so many elements; for frameworks that ask more of memory."""

    def addresses(self, tensors, dtype="float32"):
        if all(x.dtype.name == dtype and x.flags.c_contiguous for x in tensors):
            return [x.__array_interface__["data"][0] for x in tensors]
        return None

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
        if out.dtype != x.dtype:
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
        _quantize(x, codes, scales, levels, bucket_size, norm == "l2", *_words(stream))
        return codes, scales

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        _dequantize(out, codes, scales, levels, bucket_size, np.float32(weight))
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
