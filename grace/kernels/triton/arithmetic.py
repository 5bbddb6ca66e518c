"""Kernels of plain arithmetic, and sums of which each program takes a part."""

import triton
import triton.language as tl

MAX = tl.constexpr(3.4028234663852886e38)
MAX_BITS, INF_BITS, LOW31 = tl.constexpr(0x7F7FFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)


@triton.jit
def span(n, N: tl.constexpr):
    """Return a program's part of n elements: the first one (int64), the places of N from there on (int32), and which
    exist."""
    base = tl.program_id(0).to(tl.int64) * N
    place = tl.arange(0, N)
    return base, place, place < n - base


@triton.jit
def magnitude_bits(x):
    """Return magnitudes as int32 in their order; NaN is larger than Inf."""
    return x.to(tl.int32, bitcast=True) & LOW31


@triton.jit
def finite_scale(bits):
    """Return the float of a largest magnitude's bits, at most the largest number; NaN stays."""
    return tl.where(bits > INF_BITS, bits, tl.minimum(bits, MAX_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """Return float32. bfloat16 is widened by its bits, as all devices have it and interpreters may not."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrowed_to(x, Type: tl.constexpr):
    """Return float32 rounded to nearest even; to bfloat16 by its bits."""
    if tl.bfloat16 == Type:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(Type)


@triton.jit
def combine(out, x, y, n, a, b, N: tl.constexpr):
    base, place, inside = span(n, N)
    left = widened(tl.load(x + base + place, mask=inside, other=0))
    right = widened(tl.load(y + base + place, mask=inside, other=0))
    tl.store(out + base + place, left * a + right * b, mask=inside)


@triton.jit
def add(out, x, n, weight, N: tl.constexpr):
    base, place, inside = span(n, N)
    kept = tl.load(out + base + place, mask=inside, other=0)
    more = widened(tl.load(x + base + place, mask=inside, other=0))
    tl.store(out + base + place, kept + more * weight, mask=inside)


@triton.jit
def divide(out, x, n, by, N: tl.constexpr):
    base, place, inside = span(n, N)
    value = widened(tl.load(x + base + place, mask=inside, other=0))
    quotient = tl.div_rn(value, tl.full([N], 0, tl.float32) + by)
    tl.store(out + base + place, narrowed_to(quotient, out.dtype.element_ty), mask=inside)


@triton.jit
def signs(out, x, n, N: tl.constexpr):
    base, place, inside = span(n, N)
    value = widened(tl.load(x + base + place, mask=inside, other=0))
    tl.store(out + base + place, narrowed_to(tl.where(value >= 0, 1.0, -1.0), out.dtype.element_ty), mask=inside)


@triton.jit
def clip(out, x, n, limit, N: tl.constexpr):
    """Clip to a limit that lies in memory; NaN stays."""
    base, place, inside = span(n, N)
    most = tl.load(limit)
    value = tl.load(x + base + place, mask=inside, other=0)
    value = tl.where(value > most, most, tl.where(value < -most, -most, value))
    tl.store(out + base + place, value, mask=inside)


@triton.jit
def deny(flag, x, n, most, N: tl.constexpr):
    """Set ``flag[0] = 0`` if a magnitude is not at most ``most``."""
    base, place, inside = span(n, N)
    value = widened(tl.load(x + base + place, mask=inside, other=0))
    beyond = tl.where(tl.abs(value) <= most, 0, 1)
    if tl.max(beyond, 0) > 0:
        tl.store(flag, 0.0)


ABSOLUTE, PLAIN, SQUARES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def sums(parts, x, n, mean, WHAT: tl.constexpr, N: tl.constexpr):
    """Write each program's sum in float64: of magnitudes, of the numbers, or of (x - mean)^2 with a mean in memory."""
    base, place, inside = span(n, N)
    value = tl.load(x + base + place, mask=inside, other=0).to(tl.float64)
    if WHAT == ABSOLUTE:
        value = tl.abs(value)
    elif WHAT == SQUARES:
        value = tl.where(inside, value - tl.load(mean), 0.0)
        value = value * value
    tl.store(parts + tl.program_id(0), tl.sum(value, 0))


@triton.jit
def sides(parts, counts, x, n, N: tl.constexpr):
    """Write each program's sums of the numbers below zero and of the rest, and the number of the rest."""
    base, place, inside = span(n, N)
    value = tl.load(x + base + place, mask=inside, other=0)
    upper = inside & (value >= 0)
    wide = value.to(tl.float64)
    tl.store(parts + 2 * tl.program_id(0), tl.sum(tl.where(upper, 0.0, wide), 0))
    tl.store(parts + 2 * tl.program_id(0) + 1, tl.sum(tl.where(upper, wide, 0.0), 0))
    tl.store(counts + tl.program_id(0), tl.sum(upper.to(tl.int32), 0))


@triton.jit
def largest(bits, x, n, N: tl.constexpr):
    """Raise ``bits[0]`` to the bits of the largest magnitude."""
    base, place, inside = span(n, N)
    value = tl.load(x + base + place, mask=inside, other=0)
    tl.atomic_max(bits, tl.max(magnitude_bits(value), 0))
