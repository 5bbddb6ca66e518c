"""Compiled loops that several fused kernels share: random numbers and the largest magnitude.

A loop is vectorized if its body has no branch and no call, its arrays begin with its first element (slices rather than
offsets, whose sign is not known), and its numbers are no wider than they need to be: Numba makes 64 bits of whatever it
adds or shifts, so results are made 32 bits again at once. ``tests/kernels/test_vectorized.py`` looks at what came out.
"""

import numpy as np
from numba import njit

from grace.kernels.numba.compiling import announce, loop
from grace.kernels.random import MULTIPLIERS, ROUNDS, WEYL

announce()

u8, u32, u64, i32, f32, f64 = np.uint8, np.uint32, np.uint64, np.int32, np.float32, np.float64

M0, M1 = u64(MULTIPLIERS[0]), u64(MULTIPLIERS[1])
W0, W1 = u32(WEYL[0]), u32(WEYL[1])
SHIFT32, SHIFT8, LOW31, INF_BITS = u64(32), u32(8), u32(0x7FFFFFFF), u32(0x7F800000)
UNIT = f32(2.0**-24)
TILE = 1024  # elements whose random numbers are drawn at a time; a multiple of 4

# by Numba's own error model every division looks whether to raise
compiled = loop()
# Sums may be reassociated, so that LLVM adds up several lanes side by side.
summing = loop(fastmath={"reassoc"})


@njit(inline="always")
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(ROUNDS):
        p0, p1 = M0 * u64(c0), M1 * u64(c2)
        c0, c1, c2, c3 = u32(p1 >> SHIFT32) ^ c1 ^ k0, u32(p1), u32(p0 >> SHIFT32) ^ c3 ^ k1, u32(p0)
        k0, k1 = u32(k0 + W0), u32(k1 + W1)
    return c0, c1, c2, c3


@compiled
def _random_blocks(out, first, k0, k1, step, draw):
    """Fill ``out`` (a multiple of 4 long) with the blocks from ``first`` on."""
    for j in range(out.size // 4):
        block = u64(first + j)
        a, b, c, d = _philox(u32(block), u32(block >> SHIFT32), step, draw, k0, k1)
        out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3] = a, b, c, d


@compiled
def _max_bits(bits):
    """Return the largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(bits.size):
        magnitude = u32(bits[i] & LOW31)
        largest = magnitude if magnitude > largest else largest
    return largest


def _words(stream):
    return tuple(u32(word) for word in stream.words)
