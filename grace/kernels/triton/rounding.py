"""Functions that round numbers to codes, and make numbers of codes."""

import triton
import triton.language as tl

from grace.kernels.constants import LARGEST_FLOAT8, LOWEST_BIASED, POWER_OFFSET, ROOT, ROTATED
from grace.kernels.triton.arithmetic import LOW31, MAX

LEVELS, LEVELS_BY_NORM, FLOAT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Quantizers: rounding to multiples of a bucket's largest magnitude, or of its l2 norm or root mean square, or 8-bit
floats."""
_LARGEST_FLOAT8, _LOWEST_BIASED = tl.constexpr(LARGEST_FLOAT8), tl.constexpr(LOWEST_BIASED)
_POWER_OFFSET, ROTATED_ROW = tl.constexpr(POWER_OFFSET), tl.constexpr(ROTATED)
_ROOT, _SHARE = tl.constexpr(float(ROOT)), tl.constexpr(1 / ROTATED)


@triton.jit
def square_sums(x):
    """Return the sum of squares of each row, in float64."""
    wide = x.to(tl.float64)
    return tl.sum(wide * wide, 1)


@triton.jit
def norm_of(squares, many, REACH: tl.constexpr):
    """Return the l2 norm, or REACH times the root mean square of so many elements, in float32, at most the largest
    number; NaN stays."""
    if REACH == 0:
        norm = tl.sqrt(squares)
    else:
        norm = tl.sqrt(squares / tl.maximum(many, 1).to(tl.float64)) * REACH
    return tl.where(norm > MAX, MAX, norm).to(tl.float32)


@triton.jit
def rounded(x, scale, offset, levels, FORM: tl.constexpr):
    """Return the codes (uint8) of numbers, given the scales of their buckets, of one shape."""
    scaled = tl.div_rn(tl.abs(x), tl.where(scale > 0, scale, 1.0))
    if FORM == FLOAT8:
        scaled = scaled * _LARGEST_FLOAT8
        biased = tl.maximum(scaled.to(tl.int32, bitcast=True) >> 23, _LOWEST_BIASED)
        places = scaled * ((257 - biased) << 23).to(tl.float32, bitcast=True)  # in units of its last bit
        code = tl.minimum((biased - _LOWEST_BIASED) * 8 + tl.minimum(places + offset, 126.0).to(tl.int32), 126)
        return (code + tl.where(x < 0, 128, 0)).to(tl.uint8)
    wide = tl.zeros_like(x) + levels
    below, above = wide.to(tl.int32), (wide + 0.5).to(tl.int32)  # of a code 0; they differ where there is no level 0
    most = below.to(tl.float32)
    # Levels of n + 1/2 take no offset: half of one is cancelled here.
    code = tl.minimum(scaled * levels + (offset - (wide - most)), most).to(tl.int32)
    return tl.where(x >= 0, above + code, below - code).to(tl.uint8)


@triton.jit
def float8_of(code):
    """Return the values of 8-bit floats' codes, divided by the largest finite one."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    digits = tl.where(exponent > 0, 8 + mantissa, mantissa).to(tl.float32)
    power = (127 + tl.maximum(exponent, 1) - 10) << 23
    value = tl.div_rn(digits * power.to(tl.float32, bitcast=True), tl.full(code.shape, _LARGEST_FLOAT8, tl.float32))
    return tl.where(code >= 128, -value, value)


@triton.jit
def powers_rounded(x, words):
    """Return codes (uint8) of powers of two that random words choose."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & LOW31
    carried = magnitude + (words >> 9)
    code = tl.minimum(tl.maximum((carried >> 23).to(tl.int32) - _POWER_OFFSET, 1), 127)
    return tl.where(magnitude > 0, code | ((bits >> 24) & 0x80).to(tl.int32), 0).to(tl.uint8)


@triton.jit
def power_of(code):
    """Return the values of codes of powers of two."""
    code = code.to(tl.uint32)
    power = code & 0x7F
    bits = ((power + _POWER_OFFSET) << 23) | ((code >> 7) << 31)
    return tl.where(power > 0, bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def turned(value, N: tl.constexpr, SPAN: tl.constexpr):
    """Return the sums and the differences of elements that are SPAN apart."""
    left, right = tl.split(tl.permute(tl.reshape(value, [N // (2 * SPAN), 2, SPAN]), [0, 2, 1]))
    return tl.reshape(tl.permute(tl.join(left + right, left - right), [0, 2, 1]), [N])


@triton.jit
def turned_rows(given, turns, N: tl.constexpr):
    """Multiply rows of 32 of N elements by Hadamard's matrix, where ``turns``."""
    value = given * _SHARE  # so that no sum overflows
    for stage in tl.static_range(5):
        value = turned(value, N, 1 << stage)
    value = value * _ROOT
    value = tl.where(value > MAX, MAX, tl.where(value < -MAX, -MAX, value))
    return tl.where(turns, value, given)
