"""Compiled loops that several fused kernels share: random numbers and the largest magnitude."""

import numpy as np
from numba import njit

from grace.kernels.random import MULTIPLIERS, ROUNDS, WEYL

u8, u32, u64, i32, f32, f64 = np.uint8, np.uint32, np.uint64, np.int32, np.float32, np.float64

M0, M1 = u64(MULTIPLIERS[0]), u64(MULTIPLIERS[1])
W0, W1 = u32(WEYL[0]), u32(WEYL[1])
SHIFT32, SHIFT8, LOW31, INF_BITS = u64(32), u32(8), u32(0x7FFFFFFF), u32(0x7F800000)
UNIT = f32(2.0**-24)
TILE = 1024  # elements whose random numbers are drawn at a time; a multiple of 4


@njit(inline="always")
def _philox(c0, c1, c2, c3, k0, k1):
    for _ in range(ROUNDS):
        p0, p1 = M0 * u64(c0), M1 * u64(c2)
        c0, c1, c2, c3 = u32(p1 >> SHIFT32) ^ c1 ^ k0, u32(p1), u32(p0 >> SHIFT32) ^ c3 ^ k1, u32(p0)
        k0, k1 = u32(k0 + W0), u32(k1 + W1)
    return c0, c1, c2, c3


@njit(nogil=True, cache=True)
def _random_blocks(out, first, k0, k1, step, draw):
    """Fill ``out`` (a multiple of 4 long) with the blocks from ``first`` on."""
    for j in range(out.size // 4):
        block = u64(first + j)
        a, b, c, d = _philox(u32(block), u32(block >> SHIFT32), step, draw, k0, k1)
        out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3] = a, b, c, d


@njit(nogil=True, cache=True)
def _max_bits(bits):
    """The largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & LOW31)
    return largest


def _words(stream):
    return tuple(u32(word) for word in stream.words)
