"""Kernels that round numbers to codes, with random numbers made where they are used."""

import triton
import triton.language as tl

from grace.kernels.constants import LARGEST_FLOAT8, LOWEST_BIASED, POWER_OFFSET, ROOT, ROTATED
from grace.kernels.triton.arithmetic import LOW31, MAX, finite_scale, magnitude_bits, span
from grace.kernels.triton.random import WORDS, row_of_words, rows_of_words, uniform

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
    code = tl.minimum(scaled * levels + (offset - (wide - most)), most).to(tl.int32)
    return tl.where(x >= 0, above + code, below - code).to(tl.uint8)


@triton.jit(do_not_specialize=WORDS)
def round_rows(
    codes, scales, x, n, buckets, bucket_size, levels, key_low, key_high, step, draw,
    FORM: tl.constexpr, REACH: tl.constexpr, DRAWN: tl.constexpr, FOURS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write the scales and codes of ROWS buckets of at most COLS elements, each read once."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLS)
    base = first * bucket_size
    place = row[:, None] * bucket_size + column[None, :]
    inside = (column < bucket_size)[None, :] & (place < n - base)
    value = tl.load(x + base + place, mask=inside, other=0)
    if FORM == LEVELS_BY_NORM:
        scale = norm_of(square_sums(value), tl.minimum(n - base - row * bucket_size, bucket_size), REACH)
    else:
        scale = finite_scale(tl.max(magnitude_bits(value), 1))
    tl.store(scales + first + row, scale, mask=row < buckets - first)
    offset = tl.full([ROWS, COLS], 0.5, tl.float32)
    if DRAWN:
        starts = (first + row) * bucket_size
        offset = uniform(rows_of_words(starts, key_low, key_high, step, draw, ROWS, COLS, FOURS))
    wide = tl.broadcast_to(scale[:, None], [ROWS, COLS])
    tl.store(codes + base + place, rounded(value, wide, offset, levels, FORM), mask=inside)


@triton.jit
def scale_parts(parts, x, n, bucket_size, shares, FORM: tl.constexpr, N: tl.constexpr):
    """Write each program's part of a bucket that takes many: its largest magnitude, or sum of squares."""
    bucket, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    start = share.to(tl.int64) * N
    base = bucket.to(tl.int64) * bucket_size + start
    place = tl.arange(0, N)
    inside = (place < bucket_size - start) & (place < n - base)
    value = tl.load(x + base + place, mask=inside, other=0)
    if FORM == LEVELS_BY_NORM:
        tl.store(parts + tl.program_id(0), tl.sum(value.to(tl.float64) * value.to(tl.float64), 0))
    else:
        tl.store(parts + tl.program_id(0), tl.max(magnitude_bits(value), 0))


@triton.jit
def joined_scales(
    scales, parts, shares, n, bucket_size, FORM: tl.constexpr, REACH: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Write the scale of a bucket from its programs' parts."""
    place = tl.arange(0, N)
    first = tl.program_id(0).to(tl.int64) * shares
    if FORM == LEVELS_BY_NORM:
        squares = tl.zeros([N], tl.float64)
        for low in range(0, shares, N):
            squares += tl.load(parts + first + low + place, mask=low + place < shares, other=0)
        many = tl.minimum(n - tl.program_id(0).to(tl.int64) * bucket_size, bucket_size)
        tl.store(scales + tl.program_id(0), norm_of(tl.sum(squares, 0), many, REACH))
    else:
        bits = tl.zeros([N], tl.int32)
        for low in range(0, shares, N):
            bits = tl.maximum(bits, tl.load(parts + first + low + place, mask=low + place < shares, other=0))
        tl.store(scales + tl.program_id(0), finite_scale(tl.max(bits, 0)))


@triton.jit(do_not_specialize=WORDS)
def round_by_scales(
    codes, scales, x, n, bucket_size, levels, key_low, key_high, step, draw,
    FORM: tl.constexpr, DRAWN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write codes of buckets whose scales are known."""
    base, place, inside = span(n, N)
    value = tl.load(x + base + place, mask=inside, other=0)
    scale = tl.load(scales + bucket_at(base, place, bucket_size), mask=inside, other=0)
    offset = tl.full([N], 0.5, tl.float32)
    if DRAWN:
        offset = uniform(row_of_words(base, key_low, key_high, step, draw, N))
    tl.store(codes + base + place, rounded(value, scale, offset, levels, FORM), mask=inside)


@triton.jit
def bucket_at(base, place, bucket_size):
    """Return the buckets of elements, by one 64-bit division a program and 32-bit ones."""
    bucket = base // bucket_size
    rest = (base - bucket * bucket_size).to(tl.uint32)
    size = tl.cast(bucket_size, tl.uint32)  # to Triton an argument of 1 is a constant, which has no methods
    return bucket + ((rest + place.to(tl.uint32)) // size).to(tl.int32)


@triton.jit
def add_levels(out, codes, scales, n, bucket_size, levels, weight, N: tl.constexpr):
    base, place, inside = span(n, N)
    kept = tl.load(out + base + place, mask=inside, other=0)
    code = tl.load(codes + base + place, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + bucket_at(base, place, bucket_size), mask=inside, other=0)
    part = tl.div_rn(code - levels, tl.full([N], 0, tl.float32) + levels)
    tl.store(out + base + place, kept + scale * weight * part, mask=inside)


@triton.jit
def float8_of(code):
    """Return the values of 8-bit floats' codes, divided by the largest finite one."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    digits = tl.where(exponent > 0, 8 + mantissa, mantissa).to(tl.float32)
    power = (127 + tl.maximum(exponent, 1) - 10) << 23
    value = tl.div_rn(digits * power.to(tl.float32, bitcast=True), tl.full(code.shape, _LARGEST_FLOAT8, tl.float32))
    return tl.where(code >= 128, -value, value)


@triton.jit
def add_float8(out, codes, scales, n, bucket_size, weight, N: tl.constexpr):
    base, place, inside = span(n, N)
    kept = tl.load(out + base + place, mask=inside, other=0)
    code = tl.load(codes + base + place, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + bucket_at(base, place, bucket_size), mask=inside, other=0)
    tl.store(out + base + place, kept + scale * weight * float8_of(code), mask=inside)


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


@triton.jit(do_not_specialize=WORDS)
def round_powers(codes, x, n, key_low, key_high, step, draw, N: tl.constexpr):
    base, place, inside = span(n, N)
    value = tl.load(x + base + place, mask=inside, other=0)
    words = row_of_words(base, key_low, key_high, step, draw, N)
    tl.store(codes + base + place, powers_rounded(value, words), mask=inside)


@triton.jit
def add_powers(out, codes, n, weight, N: tl.constexpr):
    base, place, inside = span(n, N)
    kept = tl.load(out + base + place, mask=inside, other=0)
    code = tl.load(codes + base + place, mask=inside, other=0)
    tl.store(out + base + place, kept + power_of(code) * weight, mask=inside)


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


@triton.jit
def rotate(out, x, n, whole, ROWS: tl.constexpr):
    """Multiply rows of 32 elements, which end at ``whole``, by Hadamard's matrix; elements behind them are copied."""
    base = tl.program_id(0).to(tl.int64) * ROWS * ROTATED_ROW
    place = tl.arange(0, ROWS * ROTATED_ROW)
    inside = place < n - base
    given = tl.load(x + base + place, mask=inside, other=0)
    value = turned_rows(given, place < whole - base, ROWS * ROTATED_ROW)
    tl.store(out + base + place, value, mask=inside)
