"""The random numbers of :mod:`grace.kernels.random` inside kernels: the same integers, made where they are used."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from grace.kernels.random import FEISTEL_ROUNDS, MULTIPLIERS, ROUNDS, WEYL, Stream
from grace.kernels.triton.arithmetic import span
from grace.kernels.triton.launching import signed

_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS, _FEISTEL_ROUNDS = tl.constexpr(ROUNDS), tl.constexpr(FEISTEL_ROUNDS)

WORDS = ("key_low", "key_high", "step", "draw")
"""Arguments of kernels that change at every step, so that none is compiled for their values."""


def words_of(stream: Stream) -> tuple[int | torch.Tensor, ...]:
    """Return a stream as the four arguments of a kernel. A step that lies in a tensor, as in CUDA graphs, is read
    there."""
    if not isinstance(stream.step, torch.Tensor):
        return tuple(signed(word) for word in stream.words)
    key_low, key_high, _, draw = replace(stream, step=0).words
    return signed(key_low), signed(key_high), stream.step, signed(draw)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of each block (uint32)."""
    for _ in tl.static_range(_ROUNDS):
        m0, m1 = tl.full(c0.shape, _M0, tl.uint32), tl.full(c2.shape, _M1, tl.uint32)
        high0, high1, low0, low1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1), c0 * m0, c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + tl.full([], _W0, tl.uint32), k1 + tl.full([], _W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def number_of(step):
    """Return the step: an argument, or the number that it points to."""
    if step.dtype.is_ptr():
        number = tl.load(step)
    else:
        number = step
    return number.to(tl.uint32)


@triton.jit
def blocks(block, key_low, key_high, step, draw):
    """Return the four words of blocks with these numbers (int64)."""
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = tl.full(low.shape, 0, tl.uint32)
    step, draw = zero + number_of(step), zero + draw.to(tl.uint32)
    return philox(low, high, step, draw, key_low.to(tl.uint32), key_high.to(tl.uint32))


@triton.jit
def row_of_words(first, key_low, key_high, step, draw, N: tl.constexpr):
    """Return N consecutive words, from element ``first`` on, a multiple of 4: all four of each block are used."""
    # Joined in this order, reshape() reads a, b, c, d.
    a, b, c, d = blocks(first // 4 + tl.arange(0, N // 4), key_low, key_high, step, draw)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N])


@triton.jit
def words_at(element, key_low, key_high, step, draw):
    """Return the word of each element (int64): one of the four of its block."""
    a, b, c, d = blocks(element // 4, key_low, key_high, step, draw)
    word = element % 4
    return tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))


@triton.jit
def rows_of_words(first, key_low, key_high, step, draw, ROWS: tl.constexpr, COLS: tl.constexpr, FOURS: tl.constexpr):
    """Return a row of COLS consecutive words from each element of ``first`` on; with FOURS these are multiples of 4."""
    if FOURS:
        a, b, c, d = blocks((first // 4)[:, None] + tl.arange(0, COLS // 4)[None, :], key_low, key_high, step, draw)
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [ROWS, COLS])
    return words_at(first[:, None] + tl.arange(0, COLS)[None, :], key_low, key_high, step, draw)


@triton.jit
def uniform(words):
    """Return multiples of 2**-24 in [0, 1)."""
    return (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24


@triton.jit
def permuted(index, key_low, key_high, step, draw, left_bits, right_bits):
    """Return the images of indices (uint32) under the Feistel permutation of its whole domain."""
    one = tl.full([], 1, tl.uint32)
    key_low, key_high = key_low.to(tl.uint32), key_high.to(tl.uint32)
    zero = tl.full(index.shape, 0, tl.uint32)
    step, draw = zero + number_of(step), zero + draw.to(tl.uint32)
    left_bits, right_bits = left_bits.to(tl.uint32), right_bits.to(tl.uint32)
    left, right = index >> right_bits, index & ((one << right_bits) - 1)
    for number in tl.static_range(_FEISTEL_ROUNDS):
        mixed, _, _, _ = philox(right, zero + number, step, draw, key_low, key_high)
        left, right = right, left ^ (mixed & ((one << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


@triton.jit
def walked(index, n, key_low, key_high, step, draw, left_bits, right_bits):
    """Walk indices below n through the permutation until they are below n again."""
    index = permuted(index, key_low, key_high, step, draw, left_bits, right_bits)
    outside = index >= n
    while tl.max(outside.to(tl.int32), 0) > 0:
        index = tl.where(outside, permuted(index, key_low, key_high, step, draw, left_bits, right_bits), index)
        outside = index >= n
    return index


@triton.jit(do_not_specialize=WORDS)
def write_random(out, n, key_low, key_high, step, draw, N: tl.constexpr):
    """Write the words of a stream as int64."""
    base, place, inside = span(n, N)
    words = row_of_words(base, key_low, key_high, step, draw, N)
    tl.store(out + base + place, words.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=(*WORDS, "left_bits", "right_bits"))
def write_walked(out, n, k, key_low, key_high, step, draw, left_bits, right_bits, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    given = tl.where(place < k, place, 0).to(tl.uint32)
    walked_to = walked(given, tl.cast(n, tl.uint32), key_low, key_high, step, draw, left_bits, right_bits)
    tl.store(out + place, walked_to.to(tl.int32), mask=place < k)
