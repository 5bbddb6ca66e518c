"""Functions of numbers and their bits that kernels share."""

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
