"""Loops of the value quantizers: means, clipping, powers of two, and tables of edges."""

import numpy as np
from numba import njit

from grace.kernels.constants import EQUAL_DEVIATION, FLOAT32_MAX, POWER_OFFSET
from grace.kernels.numba.loops import LOW31, TILE, _random_blocks, compiled, f32, f64, i32, summing, u8, u32
from grace.kernels.numba.simd import float_of, part

i64 = np.int64
SIGN_CODE, SHIFT9, SHIFT23, SHIFT24, LOW7 = u32(0x80), u32(9), u32(23), u32(24), u32(0x7F)
OFFSET, LOWEST, HIGHEST = i32(POWER_OFFSET), i32(1), i32(127)


@summing
def _side_sums(x):
    """Return the sum of the negatives, the sum of the rest, and the number of the rest."""
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
    """Return the limit at which elements that add up to ``total`` are clipped: ``deviation_limit`` of the constants."""
    mean, squares = total / max(1, x.size), f64(0)
    for low in range(0, x.size, TILE):
        squares += _sum_squared_deviations(part(x, low, min(low + TILE, x.size)), mean)
    deviation = np.sqrt(squares / max(1, x.size))
    # As deviation_limit() does, NaN included.
    if not deviation > EQUAL_DEVIATION * abs(mean):
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
    """Return, for each pattern of a float32's bits above ``shift``, the number of edges below all numbers that begin
    with it."""
    cells = 1 << (32 - shift)
    starts, word = np.empty(cells, np.uint8), np.empty(1, np.uint32)
    smallest = word.view(np.float32)
    count = 0
    for i in range(cells):  # in the order of the numbers: negative ones, the largest pattern first, then the others
        cell = cells - 1 - i if 2 * i < cells else i - cells // 2
        word[0] = u32((cell << shift) | ((1 << shift) - 1 if 2 * i < cells else 0))
        while edges[count] < smallest[0]:  # ends, since the last edge is Inf
            count += 1
        starts[cell] = count
    return starts


@njit(inline="always")
def _below(edges, starts, shift, value, bits):
    """Count the ascending edges, the last one Inf, that are below the value: rarely more than one comparison."""
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
    """Write bucket numbers, sums and counts, from the smallest element of each bucket but the first.

    ``first[j]`` is the number of elements equal to ``edges[j]`` that still belong below it, so that equal elements fill
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
