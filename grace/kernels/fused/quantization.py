"""The value quantizers' kernels as compiled loops."""

from typing import Any

import numpy as np
from numba import njit

from grace.kernels.checks import check_packed, check_scale, check_table
from grace.kernels.contract.quantization import POWER_OFFSET
from grace.kernels.fused.loops import LOW31, TILE, _max_bits, _random_blocks, _words, f32, f64, i32, u8, u32, u64
from grace.kernels.reference.quantization import FLOAT32_MAX, deviation_limit, table_factor

i64 = np.int64
SIGN_CODE, SHIFT9, SHIFT23, SHIFT24 = u32(0x80), u32(9), u32(23), u32(24)
MAX_BITS = FLOAT32_MAX.view(np.uint32)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _side_means(x, means):
    lower, upper, count = f64(0), f64(0), 0
    for i in range(x.size):
        is_upper = x[i] >= 0
        lower += f64(0) if is_upper else f64(x[i])
        upper += f64(x[i]) if is_upper else f64(0)
        count += is_upper
    means[0], means[1] = lower / max(1, x.size - count), upper / max(1, count)


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(x[i])
    return total


@njit(nogil=True, cache=True, fastmath={"reassoc"})
def _sum_squared_deviations(x, mean):
    total = f64(0)
    for i in range(x.size):
        total += (f64(x[i]) - mean) * (f64(x[i]) - mean)
    return total


@njit(nogil=True, cache=True)
def _clip(x, limit, out):
    for i in range(x.size):
        out[i] = min(max(x[i], -limit), limit)


@njit(nogil=True, cache=True)
def _round_powers(bits, codes, k0, k1, step, draw):
    random = np.empty(TILE, np.uint32)
    for low in range(0, bits.size, TILE):
        high = min(low + TILE, bits.size)
        _random_blocks(random[: (high - low + 3) // 4 * 4], low // 4, k0, k1, step, draw)
        for i in range(high - low):
            b = bits[low + i]
            magnitude = b & LOW31
            exponent = i32(u32(magnitude + (random[i] >> SHIFT9)) >> SHIFT23) - i32(POWER_OFFSET)
            code = u32(min(max(exponent, i32(1)), i32(127))) | ((b >> SHIFT24) & SIGN_CODE)
            codes[low + i] = u8(code if magnitude > 0 else u32(0))


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _add_table(out, packed, bits, amounts):
    mask = u64((1 << bits) - 1)
    full = out.size // 8
    for group in range(full):
        word = u64(0)
        for byte in range(bits):
            word |= u64(packed[group * bits + byte]) << u64(8 * byte)
        for i in range(8):
            out[8 * group + i] += amounts[(word >> u64(bits * i)) & mask]
    if out.size % 8:
        word = u64(0)
        for byte in range(packed.size - full * bits):
            word |= u64(packed[full * bits + byte]) << u64(8 * byte)
        for i in range(out.size % 8):
            out[8 * full + i] += amounts[(word >> u64(bits * i)) & mask]


@njit(nogil=True, cache=True)
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
        mean = _sum(x) / max(1, x.size)
        limit = deviation_limit(mean, np.sqrt(_sum_squared_deviations(x, mean) / max(1, x.size)), factor)
        out = self.empty(x.size, np.float32)
        _clip(x, limit, out)
        return out

    def round_powers(self, x, stream):
        codes = self.empty(x.size, np.uint8)
        _round_powers(x.view(np.uint32), codes, *_words(stream))
        return codes

    def add_powers(self, out, codes, weight):
        return self.add_table(out, codes, 8, POWERS, None, weight)

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


def _powers():
    codes = np.arange(256)
    values = np.ldexp(np.where(codes & 0x80, -1.0, 1.0), (codes & 0x7F) + POWER_OFFSET - 127)
    return np.where(codes & 0x7F, values, 0).astype(np.float32)


POWERS = _powers()
