"""Kernels that only tests launch; most are written badly on purpose."""

import triton
import triton.language as tl

from grace.kernels.triton.random import row_of_words


@triton.jit
def words_from(out, first, key_low, key_high, step, draw):
    """16 random words from any element on, a multiple of 4."""
    words = row_of_words(first, key_low, key_high, step, draw, 16)
    tl.store(out + tl.arange(0, 16), words)


@triton.jit
def strided(out, x, n, N: tl.constexpr):
    """No load of 16 bytes: neighbours are apart."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(x + place * 2, mask=place < n))


@triton.jit
def inexact(out, x, n, a, N: tl.constexpr):
    """An approximate division."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(x + place, mask=place < n) / a, mask=place < n)


@triton.jit
def contracted(out, x, n, a, N: tl.constexpr):
    """A product and a sum, which compilers join where they may."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + place, tl.load(x + place, mask=place < n) * a + 3.0, mask=place < n)


@triton.jit
def greedy(out, x, n, N: tl.constexpr):
    """More elements in registers than a thread has room for."""
    place = tl.arange(0, N)
    given = tl.load(x + place, mask=place < n, other=0)
    tl.store(out + place, given - tl.max(given, 0), mask=place < n)


@triton.jit
def sharing(out, x, n, N: tl.constexpr):
    """A square that is turned in the memory that a program shares."""
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + row * N + column, tl.trans(tl.load(x + row * N + column)))


@triton.jit
def twice(out, x, n, N: tl.constexpr):
    """Reads what it has read."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    inside = place < n
    tl.store(out + place, tl.load(x + place, mask=inside) - tl.max(tl.load(x + place, mask=inside), 0), mask=inside)
