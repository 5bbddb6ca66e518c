"""The reference's hot kernels as fused single-pass loops, compiled by Numba.

They take contiguous NumPy arrays (float32, uint8, int32), often zero-copy views of a framework's CPU
tensors, and release the interpreter lock. Floating-point operations are those of the reference in the same
order, except that float64 sums are reassociated.
"""

import math
from typing import Any, ClassVar

import numpy as np

from grace.kernels.constants import (
    FLOAT8,
    FLOAT32_MAX,
    LARGEST_FACTOR,
    NARROW,
    bucket_within,
    clip_factor,
    gaussian_reach,
    rounded_down,
    table_factor,
)
from grace.kernels.numba.half_precision import HALVES, _add_half, _narrow, _share, _widen, at_most
from grace.kernels.numba.loops import (
    SHIFT32,
    TILE,
    _max_bits,
    _philox,
    _random_blocks,
    _words,
    compiled,
    f32,
    f64,
    i32,
    summing,
    u8,
    u32,
    u64,
)
from grace.kernels.numba.packing import _add_either, _add_table, _pack, _pack_signs, _unpack
from grace.kernels.numba.products import _add_product, _columns_in_range, _products
from grace.kernels.numba.quantization import (
    _add_powers,
    _assign,
    _bucketize,
    _clip_deviation,
    _round_powers,
    _side_means,
)
from grace.kernels.numba.rounding import (
    MAX,
    MAX_BITS,
    NORMS,
    _add_float8,
    _dequantize,
    _quantize,
    _rotate,
    _sum_squares,
)
from grace.kernels.numba.selection import _above, _kth_largest, _topk, _topk_chunks
from grace.kernels.numba.simd import part
from grace.kernels.random import FEISTEL_ROUNDS, Stream, feistel_bits
from grace.kernels.reference import Kernels
from grace.kernels.wire_checks import check_count, check_packed, check_quantized, check_range, check_scale, check_table


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
    # In tiles, as codecs of buckets add up, so that both have the same bits.
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
    """Return the number of indices before the first that is out of range."""
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        # Unsigned: of a signed index Numba looks whether it counts from the end.
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


class NumbaKernels(Kernels):
    """The reference with its hot kernels compiled, those of 16-bit floats too.

    >>> NumbaKernels().topk(np.float32([1, -5, 3, 5]), 2)
    array([1, 3], dtype=int32)
    >>> NumbaKernels().cast(np.float32([1, 0.1, 1e5]), "float16")
    array([1. , 0.1, inf], dtype=float16)
    """

    name = "fused"
    codecs = "grace.kernels.numba.bucket_codecs"
    empty: Any = staticmethod(np.empty)
    """Function that allocates the 1-d arrays of results; replaced for frameworks that ask more of memory."""
    half_types: ClassVar[dict[str, type]] = {"float16": np.float16}
    """NumPy types of arrays of each 16-bit format; NumPy itself has no bfloat16."""

    def addresses(self, tensors, dtype="float32"):
        if all(x.dtype.name == dtype and x.flags.c_contiguous for x in tensors):
            return [x.__array_interface__["data"][0] for x in tensors]
        return None

    def memory(self, x):
        return x.view(np.uint8)

    def cast(self, x, dtype):
        if x.dtype == np.float32 and dtype in self.half_types:
            out = self.empty(x.size, np.uint16)
            _narrow(out, x.reshape(-1), f32(1), HALVES[dtype])
            return out.view(self.half_types[dtype]).reshape(x.shape)
        half = self._half(x)
        if half is not None and dtype == "float32":
            out = self.empty(x.size, np.float32)
            _widen(out, _patterns(x), f32(1), half)
            return out.reshape(x.shape)
        return super().cast(x, dtype)

    def all_finite(self, x, most=math.inf):
        if x.dtype == np.float32:
            return bool(_max_bits(x.reshape(-1).view(np.uint32)) <= f32(min(most, FLOAT32_MAX)).view(np.uint32))
        half = self._half(x)
        return super().all_finite(x, most) if half is None else at_most(_patterns(x), most, half)

    def combine(self, a, x, b, y):
        if x.shape != y.shape or not _plain(x, y):
            return super().combine(a, x, b, y)
        out = self.empty(x.size, np.float32)
        _combine(f32(a), x.reshape(-1), f32(b), y.reshape(-1), out)
        return out.reshape(x.shape)

    def add(self, out, x, weight=1.0):
        if out.shape == x.shape and _plain(out, x):
            _add(out.reshape(-1), x.reshape(-1), f32(weight))
            return out
        half = self._half_of(x, out)
        if half is None or out.dtype != np.float32:
            return super().add(out, x, weight)
        _add_half(out.reshape(-1), _patterns(x), f32(weight), half)
        return out

    def divide(self, out, x, by):
        x = x.reshape(out.shape)
        if out.dtype == x.dtype and x.dtype.itemsize > 2:
            if by != 1:
                np.divide(x, out.dtype.type(by), out=out)
            elif x.ctypes.data != out.ctypes.data:  # in place, by 1: nothing to do
                out[...] = x
            return out
        given, wanted = self._half_of(x, out), self._half_of(out, x)
        if given is not None and out.dtype == np.float32:
            _widen(out.reshape(-1), _patterns(x), f32(by), given)
        elif wanted is not None and x.dtype == np.float32:
            _narrow(_patterns(out), x.reshape(-1), f32(by), wanted)
        elif given is not None and given == wanted:
            _share(_patterns(out), _patterns(x), f32(by), given)
        else:
            return super().divide(out, x, by)
        return out

    def _half(self, x):
        """Return the number of an array's 16-bit format; None if it has another dtype."""
        return next((HALVES[name] for name, dtype in self.half_types.items() if x.dtype == dtype), None)

    def _half_of(self, x, other):
        """Return the number of an array's 16-bit format, if loops take both arrays."""
        fit = x.shape == other.shape and x.flags.c_contiguous and other.flags.c_contiguous
        return self._half(x) if fit else None

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
        # Loops take numbers always: without a stream these are not used.
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
        if not _plain(x):
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
        amount = table_factor(scale, weight)
        _add_either(out, packed, amount, -amount)
        return out

    def topk(self, x, k):
        return _topk(x.view(np.uint32), k) if k else np.empty(0, np.int32)

    def gather(self, x, indices):
        out = self.empty(indices.size, x.dtype)
        _gather(x, indices, out)
        return out

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.size, indices.size)
        _check_used(_scatter_add(out, indices, values, np.float32(weight)), indices, out.size)
        return out

    def max_abs(self, x):
        return np.array([min(_max_bits(x.view(np.uint32)), MAX_BITS)], np.uint32).view(np.float32)

    def side_means(self, x):
        means = self.empty(2, np.float32)
        _side_means(x, means)
        return means

    def clip_deviation(self, x, factor):
        out = self.empty(x.size, np.float32)
        _clip_deviation(x, f64(factor), out)
        return out

    def round_powers(self, x, stream):
        codes = self.empty(x.size, np.uint8)
        _round_powers(x.view(np.uint32), codes, *_words(stream))
        return codes

    def add_powers(self, out, codes, weight):
        check_packed(codes.size, 8, out.size)
        _add_powers(out, codes, f32(weight))
        return out

    def round_float8(self, x, bucket_size, stream):
        bucket_size, words = bucket_within(bucket_size, x.size), _words(stream or Stream(0))
        codes, scales = self.empty(x.size, np.uint8), self.empty(-(-x.size // bucket_size), np.float32)
        _quantize(x, codes, scales, f64(0), bucket_size, MAX, 1.0, stream is None, *words)
        return codes, scales

    def add_float8(self, out, codes, scales, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        _add_float8(out, codes, scales, bucket_size, f32(weight), FLOAT8)
        return out

    def rotate(self, x):
        out = self.empty(x.size, np.float32)
        _rotate(x, out)
        return out

    def bucketize(self, x, scale, edges):
        codes = self.empty(x.size, np.uint8)
        ended, shift = _searchable(edges, x.size)
        _bucketize(x, scale[0] if scale[0] > 0 else f32(1), ended, shift, codes)
        return codes

    def add_table(self, out, packed, bits, table, scale, weight):
        check_scale(scale)
        check_table(table, bits)
        check_packed(packed.size, bits, out.size)
        if table.size < 1 << bits:  # as a sketch's of fewer buckets; the other tables have an entry for every code
            self.check_indices(self.unpack(packed, bits, out.size), table.size)
        amounts = np.zeros(256, np.float32)
        amounts[: table.size] = table_factor(scale, weight) * table
        if bits == 1:
            _add_either(out, packed, amounts[1], amounts[0])
        else:
            _add_table(out, packed, bits, amounts)
        return out

    def quantile_buckets(self, x, buckets):
        # 1. sort the values once; the bucket boundaries are the elements of certain ranks
        starts = -(-np.arange(1, buckets) * x.size // buckets)
        ordered = np.sort(x)
        edges = ordered[starts]
        # 2. in index order, give every element its bucket
        first = starts - np.searchsorted(ordered, edges, side="left")
        codes, sums, counts = self.empty(x.size, np.uint8), np.zeros(256), np.zeros(256, np.int64)
        ended, shift = _searchable(edges, x.size)
        _assign(x, ended, shift, first, codes, sums, counts)
        return codes, (sums / np.maximum(1, counts))[:buckets].astype(np.float32)

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
        _check_used(_zero_at(out, indices), indices, out.size)
        return out

    def add_at(self, out, indices, value, weight):
        check_count("means", value.size, 1)
        _check_used(_add_at(out, indices, np.float32(np.float32(weight) * value[0])), indices, out.size)
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

    def matmul(self, a, b, transpose=False):
        if a.ndim != b.ndim or not _suited(a, b):
            return super().matmul(a, b, transpose)
        rows = a.shape[-1 if transpose else -2]
        shape = (*a.shape[:-2], rows, b.shape[-1])
        out = self.empty(math.prod(shape), np.float32).reshape(shape)
        _products(_stacked(a), _stacked(b), _stacked(out), transpose)
        return out

    def matmul_add(self, out, a, b, weight, keep=1.0):
        if not _suited(out, a) or not _suited(out, b):
            return super().matmul_add(out, a, b, weight, keep)
        _add_product(out.reshape(a.shape[0], b.shape[0]), a, b, f32(weight), f32(keep))
        return out

    def zero_columns(self, matrices):
        if not all(_suited(x, x) for x in matrices):
            return super().zero_columns(matrices)
        return not all(_columns_in_range(x, f32(LARGEST_FACTOR)) for x in matrices)


def _plain(*arrays):
    """Return True if float32 loops take the arrays."""
    return all(x.dtype == np.float32 and x.flags.c_contiguous for x in arrays)


def _suited(wide, narrow):
    """Return True if loops of products take the matrices."""
    return _plain(wide, narrow) and narrow.shape[-1] <= NARROW


def _stacked(x):
    """Return a batch of matrices, or a matrix, as one array of three dimensions."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _patterns(x):
    return x.reshape(-1).view(np.uint16)


def _searchable(edges, n):
    """Return edges ended by Inf, and the shift of ``_starts`` whose table pays for n elements."""
    return np.append(edges, np.float32(np.inf)), 17 if n >= 1 << 14 else 20


def _check_used(count, indices, n):
    """Raise PayloadError if a loop over indices stopped after ``count``: the next one is outside an array of n."""
    if count < indices.size:
        check_range(int(indices[count]), int(indices[count]), n)
