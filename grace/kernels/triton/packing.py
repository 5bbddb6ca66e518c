"""Functions that pack codes and signs into streams of bits and read them, and kernels that read bitmaps."""

import triton
import triton.language as tl


@triton.jit
def code_at(packed, place, inside, size, BITS: tl.constexpr):
    """Return the codes at these places of a stream of ``size`` bytes (int32)."""
    if BITS == 8:
        return tl.load(packed + place, mask=inside, other=0).to(tl.int32)
    byte, shift = place * BITS // 8, (place * BITS % 8).to(tl.int32)
    word = tl.load(packed + byte, mask=inside, other=0).to(tl.int32)
    if 8 % BITS != 0:  # a code may lie in two bytes
        word |= tl.load(packed + byte + 1, mask=inside & (byte + 1 < size), other=0).to(tl.int32) << 8
    return (word >> shift) & ((1 << BITS) - 1)


@triton.jit
def byte_of_codes(code, BITS: tl.constexpr, N: tl.constexpr):
    """Return N codes of BITS that divide 8, in bytes."""
    lane = tl.arange(0, 8 // BITS)[None, :] * BITS
    return tl.sum(tl.reshape(code.to(tl.int32), [N * BITS // 8, 8 // BITS]) << lane, 1).to(tl.uint8)


@triton.jit
def codes_of_byte(packed, BITS: tl.constexpr, N: tl.constexpr):
    """Invert :func:`byte_of_codes`, as int32."""
    lane = tl.arange(0, 8 // BITS)[None, :] * BITS
    return tl.reshape((packed.to(tl.int32)[:, None] >> lane) & ((1 << BITS) - 1), [N])


@triton.jit
def steps_below(value, inside, edges, count, N: tl.constexpr):
    """Count the edges, at most 255 and ascending, below each number; all of them are below NaN."""
    below = tl.zeros([N], tl.int32)
    # Eight halvings search 255 edges.
    for half in tl.static_range(8):
        middle = below + (128 >> half)
        edge = tl.load(edges + middle - 1, mask=inside & (middle <= count), other=0)
        below = tl.where((middle <= count) & ((edge < value) | (value != value)), middle, below)
    return below


@triton.jit
def marks_at(coded, base, size, N: tl.constexpr):
    """Return 1 for each of N elements from ``base`` on, a multiple of 8, whose bit is set."""
    byte = tl.arange(0, N // 8)
    pointer = (coded + base // 8).to(tl.pointer_type(tl.uint8))
    packed = tl.load(pointer + byte, mask=byte * 8 < size - base, other=0)
    return codes_of_byte(packed, 1, N) & (tl.arange(0, N) < size - base).to(tl.int32)


@triton.jit
def first_from(coded, width, k, least):
    """Count the positions below ``least`` among k ascending ones, in 32 or 16 bits."""
    low, high = tl.full([], 0, tl.int32), k
    while low < high:
        middle = (low + high) // 2
        if width == 4:
            found = tl.load(coded.to(tl.pointer_type(tl.int32)) + middle)
        else:
            found = tl.load(coded.to(tl.pointer_type(tl.uint16)) + middle).to(tl.int32)
        low, high = tl.where(found < least, middle + 1, low), tl.where(found < least, high, middle)
    return low


@triton.jit
def count_bits(counts, bitmap, n, steps, N: tl.constexpr):
    """Count the bits in each program's part of a bitmap."""
    base, many = tl.program_id(0).to(tl.int64) * steps * N, tl.full([], 0, tl.int32)
    for step in range(steps):
        many += tl.sum(marks_at(bitmap.to(tl.int64), base + step * N, n, N), 0)
    tl.store(counts + tl.program_id(0), many)


@triton.jit(do_not_specialize=("count",))
def write_positions(out, counts, bitmap, n, count, steps, N: tl.constexpr):
    """Write the places of the first ``count`` bits; -1 for missing ones."""
    base, before, place = tl.program_id(0).to(tl.int64) * steps * N, tl.full([], 0, tl.int32), tl.arange(0, N)
    for low in range(0, tl.program_id(0), N):
        others = low + place
        before += tl.sum(tl.load(counts + others, mask=others < tl.program_id(0), other=0), 0)
    for step in range(steps):
        bits = marks_at(bitmap.to(tl.int64), base + step * N, n, N)
        at = before + tl.cumsum(bits, 0) - bits
        tl.store(out + at, (base + step * N + place).to(tl.int32), mask=(bits > 0) & (at < count))
        before += tl.sum(bits, 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for low in range(before, count, N):
            tl.store(out + low + place, tl.full([N], -1, tl.int32), mask=low + place < count)
