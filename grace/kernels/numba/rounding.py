"""QSGD's stochastic rounding and what decodes it, a bucket at a time."""

import numpy as np

from grace.kernels.constants import FLOAT32_MAX, LARGEST_FLOAT8, LOWEST_BIASED, ROOT, ROTATED
from grace.kernels.numba.compiling import loop
from grace.kernels.numba.loops import SHIFT8, TILE, UNIT, _max_bits, _random_blocks, compiled, f32, f64, i32, u8, u32
from grace.kernels.numba.simd import float_of, part, pattern_of

MAX_BITS = FLOAT32_MAX.view(np.uint32)
NEAREST = u32(1 << 31)  # the random number of an offset of a half, which rounds to the nearest
HALF, NEAR = f32(0.5), u32(2)
MAX, L2, RMS = 0, 1, 2
NORMS = {"max": MAX, "l2": L2, "rms": RMS}
LARGEST, LOWEST, BOTH, SHIFT23 = f32(LARGEST_FLOAT8), u32(LOWEST_BIASED), u32(257), u32(23)
EIGHT, MOST_CODE, SIGN, ZERO, SHRINK = i32(8), i32(126), i32(128), i32(0), f32(1 / ROTATED)
UPPER16 = u32(0xFFFFFF00)  # of the 24 bits of a float32's significand


@loop(fastmath={"reassoc", "contract"})  # no product is rounded, so that it may be joined with the sum
def _sum_squares(x):
    total = f64(0)
    for i in range(x.size):
        total += f64(x[i]) * f64(x[i])
    return total


@compiled
def _scale(x, norm, reach):
    """Return the norm of a bucket, at most the largest float32."""
    if norm == MAX:
        return float_of(min(_max_bits(x.view(np.uint32)), MAX_BITS))
    squares = _sum_squares(x)
    return f32(min(np.sqrt(squares) if norm == L2 else np.sqrt(squares / x.size) * reach, f64(FLOAT32_MAX)))


@compiled
def _round_bucket(x, random, divisor, levels, codes):
    top, most = f32(levels), i32(levels)
    for i in range(x.size):
        raised = abs(x[i]) / divisor * top + f32(i32(random[i] >> SHIFT8)) * UNIT
        code = i32(raised)
        code = code if code < most else most
        codes[i] = u8(i32(most + (code if x[i] >= 0 else i32(-code))))


@compiled
def _round_nearest(x, divisor, levels, codes, factor, high, low, subtracts):
    """Round to the nearest level; then subtract it as :func:`_dequantize_bucket` does, while x is in registers."""
    top, below, above = f32(levels), i32(levels), i32(levels + 0.5)
    offset = HALF if below == above else f32(0)
    for i in range(x.size):
        value = x[i]
        code = i32(abs(value) / divisor * top + offset)
        code = code if code < below else below
        code = i32(above + code) if value >= 0 else i32(below - code)
        codes[i] = u8(code)
        level = f32(code) - top
        if subtracts:
            x[i] = value + factor * (level * high + level * low)


@compiled
def _threshold(divisor, levels):
    """Return the smallest magnitude that :func:`_round_nearest` rounds up from the level next to zero.

    It is divisor (1 - offset) / levels, but for what is rounded there and in :func:`_round_nearest`: at most two
    float32s from what is computed, so these are tried.
    """
    top = f32(levels)
    offset = HALF if levels == i32(levels) else f32(0)
    first, below = u32(pattern_of(divisor * f32((1 - offset) / levels)) - NEAR), u32(0)
    for i in range(2 * NEAR):
        raised = float_of(u32(first + u32(i))) / divisor * top + offset
        below += u32(0) if raised >= f32(1) else u32(1)
    return float_of(u32(first + below))


@compiled
def _round_to_two_bits(x, threshold, levels, codes, factor, high, low):
    """Round and subtract as :func:`_round_nearest` does, where levels end at 1 or 1.5, without a division."""
    top, below, above = f32(levels), i32(levels), i32(levels + 0.5)
    far, near = f32(i32(above + 1)) - top, f32(above) - top
    far, near = factor * (far * high + far * low), factor * (near * high + near * low)
    for i in range(x.size):
        value = x[i]
        is_far, is_up = abs(value) >= threshold, value >= 0
        code, amount = i32(1) if is_far else i32(0), far if is_far else near
        codes[i] = u8(i32(above + code) if is_up else i32(below - code))
        x[i] = value + amount if is_up else value - amount


@compiled
def _round_float8(x, random, divisor, codes):
    for i in range(x.size):
        scaled = abs(x[i]) / divisor * LARGEST
        exponent = u32(pattern_of(scaled) >> SHIFT23)
        biased = exponent if exponent > LOWEST else LOWEST
        place = scaled * float_of(u32(u32(BOTH - biased) << SHIFT23))
        code = i32(i32(i32(biased - LOWEST) * EIGHT) + i32(place + f32(i32(random[i] >> SHIFT8)) * UNIT))
        code = code if code < MOST_CODE else MOST_CODE
        codes[i] = u8(i32(code + (SIGN if x[i] < 0 else ZERO)))


@compiled
def _quantize(x, codes, scales, levels, bucket_size, norm, reach, nearest, k0, k1, step, draw):
    """Round to levels, or to 8-bit floats if ``levels`` is 0."""
    random = np.full(TILE + 4, NEAREST)
    span = max(1, TILE // bucket_size) * bucket_size  # several small buckets share a tile, a large one has several
    for low in range(0, x.size, span):
        high = min(low + span, x.size)
        for start in range(low, high, bucket_size):
            scales[start // bucket_size] = _scale(part(x, start, min(start + bucket_size, high)), norm, reach)
        for tile in range(low, high, TILE):
            stop, skip = min(tile + TILE, high), tile % 4
            if not nearest:
                _random_blocks(part(random, 0, (stop - tile + skip + 3) // 4 * 4), tile // 4, k0, k1, step, draw)
            for start in range(tile, stop, bucket_size):
                end, scale = min(start + bucket_size, stop), scales[start // bucket_size]
                drawn, divisor = part(random, start - tile + skip, end - tile + skip), scale if scale > 0 else f32(1)
                values, coded = part(x, start, end), part(codes, start, end)
                if levels == 0:
                    _round_float8(values, drawn, divisor, coded)
                elif nearest:
                    _round_nearest(values, divisor, levels, coded, f32(0), f32(0), f32(0), False)
                else:
                    _round_bucket(values, drawn, divisor, levels, coded)


@compiled
def _add_float8(out, codes, scales, bucket_size, weight, values):
    for bucket in range(scales.size):
        factor, low, high = scales[bucket] * weight, bucket * bucket_size, min((bucket + 1) * bucket_size, codes.size)
        for i in range(high - low):
            out[low + i] += factor * values[codes[low + i]]


@compiled
def _rotate(x, out):
    """Rotate groups one by one: butterflies within a group fit into four registers, those of 32 groups at a time would
    need a transposition."""
    whole = x.size // ROTATED * ROTATED
    for i in range(x.size):
        out[i] = x[i] * SHRINK if i < whole else x[i]
    for group in range(x.size // ROTATED):
        rows = part(out, group * ROTATED, (group + 1) * ROTATED)
        span = 1
        while span < ROTATED:
            for low in range(0, ROTATED, 2 * span):
                for i in range(low, low + span):
                    left, right = rows[i], rows[i + span]
                    rows[i], rows[i + span] = left + right, left - right
            span *= 2
        for i in range(ROTATED):
            rows[i] = min(max(rows[i] * ROOT, -FLOAT32_MAX), FLOAT32_MAX)


@compiled
def _reciprocal(levels):
    """Return 1 / levels as a sum of two float32s, the first of 16 bits.

    Its product with a whole number of 8 bits is exact, so that the sum of both products is rounded once: it is that
    number divided by ``levels``, bit for bit, because no such quotient is as near to the middle of two float32s as the
    second product is inexact.
    """
    exact = 1.0 / levels
    high = float_of(u32(pattern_of(f32(exact)) & UPPER16))
    return high, f32(exact - f64(high))


@compiled
def _dequantize_bucket(out, codes, factor, middle, high, low):
    for i in range(out.size):
        level = f32(codes[i]) - middle
        out[i] += factor * (level * high + level * low)


@compiled
def _dequantize_to(out, codes, factor, middle, high, low):
    """Write what :func:`_dequantize_bucket` makes of zeros."""
    for i in range(out.size):
        level = f32(codes[i]) - middle
        out[i] = f32(0) + factor * (level * high + level * low)


@compiled
def _dequantize(out, codes, scales, levels, bucket_size, weight):
    middle = f32(levels)
    reciprocal, rest = _reciprocal(levels)
    for bucket in range(scales.size):
        low, high = bucket * bucket_size, min((bucket + 1) * bucket_size, codes.size)
        places = part(out, low, high), part(codes, low, high)
        _dequantize_bucket(*places, scales[bucket] * weight, middle, reciprocal, rest)
