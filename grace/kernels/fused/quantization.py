"""The value quantizers' kernels as compiled loops."""

from typing import Any

import numpy as np
from numba import njit

from grace.kernels.checks import check_packed, check_quantized, check_scale, check_table
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.contract.quantization import POWER_OFFSET
from grace.kernels.fused.lanes import float_of, part
from grace.kernels.fused.loops import (
    LOW31,
    TILE,
    _max_bits,
    _random_blocks,
    _words,
    compiled,
    f32,
    f64,
    i32,
    summing,
    u8,
    u32,
)
from grace.kernels.fused.packing import _add_either, _add_table
from grace.kernels.fused.rounding import MAX, MAX_BITS, _add_float8, _quantize, _rotate
from grace.kernels.random import Stream
from grace.kernels.reference.primitives import FLOAT32_MAX
from grace.kernels.reference.quantization import CONSTANT, FLOAT8, table_factor

i64 = np.int64
SIGN_CODE, SHIFT9, SHIFT23, SHIFT24, LOW7 = u32(0x80), u32(9), u32(23), u32(24), u32(0x7F)
OFFSET, LOWEST, HIGHEST = i32(POWER_OFFSET), i32(1), i32(127)


@summing
def _side_sums(x):
    """Of the negatives, of the rest, and how many the rest are."""
    lower, upper, count = f64(0), f64(0), 0
    for i in range(x.size):
        is_upper = x[i] >= 0
        lower += f64(0) if is_upper else f64(x[i])
        upper += f64(x[i]) if is_upper else f64(0)
        count += is_upper
    return lower, upper, count


@compiled
def _side_means(x, means):
    lower, upper, count = f64(0), f64(0), 0
    for low in range(0, x.size, TILE):
        below, above, many = _side_sums(part(x, low, min(low + TILE, x.size)))
        lower, upper, count = lower + below, upper + above, count + many
    means[0], means[1] = lower / max(1, x.size - count), upper / max(1, count)


@summing
def _sum(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(x[i])
    return total


@summing
def _sum_squared_deviations(x, mean):
    total = f64(0)
    for i in range(x.size):
        total += (f64(x[i]) - mean) * (f64(x[i]) - mean)
    return total


@compiled
def _deviation_limit(x, total, factor):
    """Where elements that add up to ``total`` are clipped: ``deviation_limit`` of the reference."""
    mean, squares = total / max(1, x.size), f64(0)
    for low in range(0, x.size, TILE):
        squares += _sum_squared_deviations(part(x, low, min(low + TILE, x.size)), mean)
    deviation = np.sqrt(squares / max(1, x.size))
    if not deviation > CONSTANT * abs(mean):
        return FLOAT32_MAX
    return f32(min(factor * deviation, f64(FLOAT32_MAX)))


@compiled
def _clip(x, limit, out):
    for i in range(x.size):
        out[i] = min(max(x[i], -limit), limit)


@compiled
def _clip_deviation(x, factor, out):
    total = f64(0)
    for low in range(0, x.size, TILE):
        total += _sum(part(x, low, min(low + TILE, x.size)))
    _clip(x, _deviation_limit(x, total, factor), out)


@compiled
def _round_powers_tile(bits, random, codes):
    for i in range(bits.size):
        magnitude = u32(bits[i] & LOW31)
        exponent = i32(i32(u32(magnitude + (random[i] >> SHIFT9)) >> SHIFT23) - OFFSET)
        power = exponent if exponent > LOWEST else LOWEST
        power = power if power < HIGHEST else HIGHEST
        code = u8(u32(power) | u32(u32(bits[i] >> SHIFT24) & SIGN_CODE))
        codes[i] = code if magnitude > u32(0) else u8(0)


@compiled
def _round_powers(bits, codes, k0, k1, step, draw):
    random = np.empty(TILE, np.uint32)
    for low in range(0, bits.size, TILE):
        high = min(low + TILE, bits.size)
        _random_blocks(part(random, 0, (high - low + 3) // 4 * 4), low // 4, k0, k1, step, draw)
        _round_powers_tile(part(bits, low, high), random, part(codes, low, high))


@compiled
def _add_powers(out, codes, weight):
    for i in range(out.size):
        code = u32(codes[i])
        power = u32(code & LOW7)
        bits = u32(u32(u32(power + POWER_OFFSET) << SHIFT23) | u32(u32(code & SIGN_CODE) << SHIFT24))
        out[i] += weight * float_of(bits if power > u32(0) else u32(0))


@compiled
def _starts(edges, shift):
    """For each pattern of a float32's bits above ``shift``: how many edges are below all numbers that begin so."""
    cells = 1 << (32 - shift)
    starts, word = np.empty(cells, np.uint8), np.empty(1, np.uint32)
    smallest = word.view(np.float32)
    count = 0
    for i in range(cells):  # in the order of the numbers: negative ones, the largest pattern first, then the others
        cell = cells - 1 - i if 2 * i < cells else i - cells // 2
        word[0] = u32((cell << shift) | ((1 << shift) - 1 if 2 * i < cells else 0))
        while edges[count] < smallest[0]:
            count += 1
        starts[cell] = count
    return starts


@njit(inline="always")
def _below(edges, starts, shift, value, bits):
    """How many of the ascending edges, the last one Inf, are below the value: rarely more than one comparison."""
    count = i64(starts[bits >> u32(shift)])
    count += i64(edges[count] < value)
    while edges[count] < value:
        count += 1
    return count


@compiled
def _bucketize(x, divisor, edges, shift, codes):
    starts = _starts(edges, shift)
    tile = np.empty(TILE, np.float32)
    bits = tile.view(np.uint32)
    for low in range(0, x.size, TILE):
        high = min(low + TILE, x.size)
        for i in range(high - low):
            tile[i] = x[low + i] / divisor
        for i in range(high - low):
            codes[low + i] = _below(edges, starts, shift, tile[i], bits[i])


@compiled
def _assign(x, edges, shift, first, codes, sums, counts):
    """Bucket numbers, sums and counts, from the smallest element of each bucket but the first.

    ``first[j]`` is how many elements equal to ``edges[j]`` still belong below it, so that equal elements fill
    the buckets in the order of their indices.
    """
    starts, bits = _starts(edges, shift), x.view(np.uint32)
    seen = np.zeros(edges.size, np.int64)
    for i in range(x.size):
        code = _below(edges, starts, shift, x[i], bits[i])
        if edges[code] == x[i]:
            place = code
            while code < first.size and edges[code] == x[i] and first[code] <= seen[place]:
                code += 1
            seen[place] += 1
        codes[i] = code
        sums[code] += f64(x[i])
        counts[code] += 1


class ValueFused:
    """A part of :class:`~grace.kernels.fused.primitives.FusedKernels`."""

    empty: Any
    unpack: Any
    check_indices: Any

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


def _searchable(edges, n):
    """Edges ended by Inf, and the shift of :func:`_starts`: a table that n elements are worth making."""
    return np.append(edges, np.float32(np.inf)), 17 if n >= 1 << 14 else 20
