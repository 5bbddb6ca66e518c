"""float16 and bfloat16, whose patterns come as uint16, in float32 arithmetic, as compiled loops.

What they are is computed with whole numbers, which any processor has vectors of. Rounding is to nearest even, beyond
the range to Inf; NaN stays NaN.
"""

import numpy as np
from numba import njit

from grace.kernels.constants import FLOAT32_MAX
from grace.kernels.numba.loops import INF_BITS, LOW31, compiled, f32, u32
from grace.kernels.numba.simd import float_of, pattern_of

u16 = np.uint16
FLOAT16, BFLOAT16 = 1, 2
HALVES = {"float16": FLOAT16, "bfloat16": BFLOAT16}
"""Numbers of the formats, which loops take."""
SIGN, SIGN16, ONE, SHIFT13, SHIFT16 = u32(0x80000000), u32(0x8000), u32(1), u32(13), u32(16)
NAN16, INF16, NAN_BFLOAT16 = u32(0x7E00), u32(0x7C00), u32(0x7FC0)
SMALLEST_FLOAT16, BEYOND_FLOAT16 = u32(113 << 23), u32(143 << 23)  # 2^-14, the smallest normal one, and 2^16
FLOAT16_STEP, BFLOAT16_STEP = u32(0xFFF), u32(0x7FFF)  # just less than half of what is cut off
DOWN, UP, UP_MORE = u32(-(112 << 23) & 0xFFFFFFFF), u32(112 << 23), u32(113 << 23)
MAGIC = f32(0.5)  # whose last bit counts what a denormal half's last bit does
MAGIC_BITS, SMALLEST = MAGIC.view(np.uint32), f32(2.0**-14)
EXPONENT13, INF13, LOW15 = u32(0x7C00 << 13), u32(0x7C00 << 13), u32(0x7FFF)


@njit(inline="always")
def _to_float16(bits):
    magnitude = u32(bits & LOW31)
    # The last bit that stays: with it ties go to even.
    odd = u32(u32(magnitude >> SHIFT13) & ONE)
    normal = u32(u32(magnitude + DOWN + FLOAT16_STEP + odd) >> SHIFT13)
    small = u32(pattern_of(float_of(magnitude) + MAGIC) - MAGIC_BITS)
    large = NAN16 if magnitude > INF_BITS else INF16
    rounded = small if magnitude < SMALLEST_FLOAT16 else normal
    rounded = large if magnitude >= BEYOND_FLOAT16 else rounded
    return u16(u32(rounded | u32(u32(bits >> SHIFT16) & SIGN16)))


@njit(inline="always")
def _from_float16(half):
    magnitude = u32(u32(half & LOW15) << SHIFT13)
    # A denormal: its bits behind 2^-14, from which 2^-14 is subtracted without rounding.
    small = pattern_of(float_of(u32(magnitude + UP_MORE)) - SMALLEST)
    normal = u32(magnitude + UP)
    large = u32(magnitude + UP + UP)
    exponent = u32(magnitude & EXPONENT13)
    bits = small if exponent == u32(0) else normal
    bits = large if exponent == INF13 else bits
    return float_of(u32(bits | u32(u32(half & SIGN16) << SHIFT16)))


@njit(inline="always")
def _to_bfloat16(bits):
    odd = u32(u32(bits >> SHIFT16) & ONE)
    rounded = u32(u32(bits + BFLOAT16_STEP + odd) >> SHIFT16)
    nan = u32(u32(u32(bits >> SHIFT16) & SIGN16) | NAN_BFLOAT16)
    return u16(nan if u32(bits & LOW31) > INF_BITS else rounded)


@njit(inline="always")
def _from_bfloat16(half):
    return float_of(u32(u32(half) << SHIFT16))


@njit(inline="always")
def _to_half(bits, form):
    return _to_float16(bits) if form == FLOAT16 else _to_bfloat16(bits)


@njit(inline="always")
def _from_half(half, form):
    return _from_float16(half) if form == FLOAT16 else _from_bfloat16(half)


# -- loops over 1-d contiguous arrays: 16-bit floats as patterns (uint16), others as float32 ---------------------------


@compiled
def _narrow(out, x, by, form):
    """Write ``x / by`` in 16 bits; by 1 it is a cast."""
    for i in range(out.size):
        out[i] = _to_half(pattern_of(x[i] / by), form)


@compiled
def _widen(out, x, by, form):
    """Write ``x / by`` in float32, of 16 bits."""
    # A loop for each format, which LLVM makes faster than one that it has to take apart.
    if form == BFLOAT16:
        for i in range(out.size):
            out[i] = _from_bfloat16(x[i]) / by
    else:
        for i in range(out.size):
            out[i] = _from_float16(x[i]) / by


@compiled
def _share(out, x, by, form):
    """Write ``x / by`` in 16 bits, of 16 bits, divided in float32."""
    for i in range(out.size):
        out[i] = _to_half(pattern_of(_from_half(x[i], form) / by), form)


@compiled
def _add_half(out, x, weight, form):
    """Add ``weight x`` in float32, of 16 bits."""
    if form == BFLOAT16:
        for i in range(out.size):
            out[i] += weight * _from_bfloat16(x[i])
    else:
        for i in range(out.size):
            out[i] += weight * _from_float16(x[i])


@compiled
def _largest(x):
    """Return the largest magnitude as a pattern; NaN's are above Inf's."""
    largest = u16(0)
    for i in range(x.size):
        magnitude = u16(x[i] & LOW15)
        largest = magnitude if magnitude > largest else largest
    return largest


def at_most(x: np.ndarray, most: float, form: int) -> bool:
    """Return True if all numbers are finite and no larger in magnitude than ``most``."""
    largest = np.empty(1, np.float32)
    _widen(largest, np.array([_largest(x)], np.uint16), f32(1), form)
    return bool(largest[0] <= min(most, FLOAT32_MAX))
