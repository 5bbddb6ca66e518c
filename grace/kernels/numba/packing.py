"""Codes as streams of bits, and what decodes them, as compiled loops.

Eight codes below 2^bits make ``bits`` bytes. Both are taken as one 64-bit number, in which neighbours are moved
together (or apart) in three steps: by one code, by two, by four. Where a byte holds two or four whole codes it is made
of these, by a loop that is vectorized.
"""

import numpy as np

from grace.kernels.numba.loops import compiled, u8, u32, u64
from grace.kernels.numba.simd import LANES, add_chosen, not_negative, part

u16 = np.uint16
ONES1, ONES2, ONES4 = u64(0x0001000100010001), u64(0x0000000100000001), u64(1)
BITS8, BITS16, BITS32 = u64(0x00FF00FF00FF00FF), u64(0x0000FFFF0000FFFF), u64(0x00000000FFFFFFFF)


@compiled
def _eight_bytes(place):
    return (
        u64(place[0]) | u64(place[1]) << u64(8) | u64(place[2]) << u64(16) | u64(place[3]) << u64(24)
        | u64(place[4]) << u64(32) | u64(place[5]) << u64(40) | u64(place[6]) << u64(48) | u64(place[7]) << u64(56)
    )  # fmt: skip


@compiled
def _joined(word, bits):
    """Join eight codes, a byte each, into one number of 8 times as many bits as a code has."""
    gap = u64(8 - bits)
    word = (word & BITS8) | ((word & ~BITS8) >> gap)
    word = (word & BITS16) | ((word & ~BITS16) >> (gap * u64(2)))
    return (word & BITS32) | ((word & ~BITS32) >> (gap * u64(4)))


@compiled
def _parted(word, bits):
    """Part such a number into eight codes, a byte each."""
    gap, b = u64(8 - bits), u64(bits)
    low4 = ((u64(1) << (b * u64(4))) - u64(1)) * ONES4
    low2 = ((u64(1) << (b * u64(2))) - u64(1)) * ONES2
    low1 = ((u64(1) << b) - u64(1)) * ONES1
    every = low1 | (low1 << b)
    word = (word & low4) | ((word & (low4 << (b * u64(4)))) << (gap * u64(4)))
    word = (word & low2) | ((word & (low2 << (b * u64(2)))) << (gap * u64(2)))
    word = word & every
    return (word & low1) | ((word & ~low1) << gap)


@compiled
def _pack_fours(codes, out):
    """Pack codes of 4 bits, two a byte."""
    pairs = part(codes, 0, codes.size // 2 * 2).view(np.uint16)
    for i in range(pairs.size):
        out[i] = u8(pairs[i] | pairs[i] >> u16(4))
    if codes.size % 2:
        out[pairs.size] = codes[codes.size - 1]


@compiled
def _unpack_fours(packed, out):
    pairs = part(out, 0, out.size // 2 * 2).view(np.uint16)
    for i in range(pairs.size):
        byte = u16(packed[i])
        pairs[i] = u16((byte | byte << u16(4)) & u16(0x0F0F))
    if out.size % 2:
        out[out.size - 1] = packed[pairs.size] & u8(0x0F)


@compiled
def _pack_twos(codes, out):
    """Pack codes of 2 bits, four a byte."""
    fours = part(codes, 0, codes.size // 4 * 4).view(np.uint32)
    for i in range(fours.size):
        word = fours[i]
        out[i] = u8(word | word >> u32(6) | word >> u32(12) | word >> u32(18))
    for i in range(4 * fours.size, codes.size):
        before = out[fours.size] if i % 4 else u8(0)
        out[fours.size] = u8(before | codes[i] << u8(2 * (i % 4)))


@compiled
def _unpack_twos(packed, out):
    fours = part(out, 0, out.size // 4 * 4).view(np.uint32)
    for i in range(fours.size):
        byte = u32(packed[i])
        fours[i] = u32((byte | byte << u32(6) | byte << u32(12) | byte << u32(18)) & u32(0x03030303))
    for i in range(4 * fours.size, out.size):
        out[i] = packed[fours.size] >> u8(2 * (i % 4)) & u8(3)


@compiled
def _pack(codes, bits, out):
    if bits == 4:
        return _pack_fours(codes, out)
    if bits == 2:
        return _pack_twos(codes, out)
    groups = codes.size // 8
    whole = max(0, min(groups, (out.size - 8) // bits + 1))  # groups behind which 8 bytes may be written
    for group in range(whole):
        word = _joined(_eight_bytes(part(codes, 8 * group, 8 * group + 8)), bits)
        place = part(out, group * bits, group * bits + 8)
        for byte in range(8):  # those that are too many are written again
            place[byte] = u8(word >> u64(8 * byte))
    for group in range(whole, groups + (codes.size % 8 > 0)):
        word = u64(0)
        for i in range(min(8, codes.size - 8 * group)):
            word |= u64(codes[8 * group + i]) << u64(bits * i)
        for byte in range(min(bits, out.size - group * bits)):
            out[group * bits + byte] = u8(word >> u64(8 * byte))


@compiled
def _unpack(packed, bits, out):
    if bits == 4:
        return _unpack_fours(packed, out)
    if bits == 2:
        return _unpack_twos(packed, out)
    # Groups behind whose start 8 bytes may be read; the others go byte by byte.
    whole = max(0, min(out.size // 8, (packed.size - 8) // bits + 1))
    for group in range(whole):
        word = _parted(_eight_bytes(part(packed, group * bits, group * bits + 8)), bits)
        place = part(out, 8 * group, 8 * group + 8)
        for byte in range(8):
            place[byte] = u8(word >> u64(8 * byte))
    mask = u64((1 << bits) - 1)
    for group in range(whole, (out.size + 7) // 8):
        word = u64(0)
        for byte in range(min(bits, packed.size - group * bits)):
            word |= u64(packed[group * bits + byte]) << u64(8 * byte)
        for i in range(min(8, out.size - 8 * group)):
            out[8 * group + i] = u8((word >> u64(bits * i)) & mask)


@compiled
def _pack_signs(x, out):
    whole = x.size // LANES
    for group in range(whole):
        bits = not_negative(x, LANES * group)
        place = part(out, 4 * group, 4 * group + 4)
        for byte in range(4):
            place[byte] = u8(bits >> u32(8 * byte))
    for last in range(4 * whole, out.size):
        eight = u8(0)
        for i in range(min(8, x.size - 8 * last)):
            eight |= u8(u8(x[8 * last + i] >= 0) << i)
        out[last] = eight


@compiled
def _add_either(out, packed, one, other):
    """Add ``one`` where the bit is set and ``other`` elsewhere."""
    whole = out.size // LANES
    for group in range(whole):
        place = part(packed, 4 * group, 4 * group + 4)
        bits = u32(place[0]) | u32(place[1]) << u32(8) | u32(place[2]) << u32(16) | u32(place[3]) << u32(24)
        add_chosen(out, LANES * group, bits, one, other)
    for i in range(LANES * whole, out.size):
        out[i] += one if (packed[i >> 3] >> (i & 7)) & 1 else other


@compiled
def _add_table(out, packed, bits, amounts):
    """Add the number that each code stands for, of a table of 256."""
    whole = max(0, min(out.size // 8, (packed.size - 8) // bits + 1))
    for group in range(whole):
        word = _parted(_eight_bytes(part(packed, group * bits, group * bits + 8)), bits)
        place = part(out, 8 * group, 8 * group + 8)
        for i in range(8):
            place[i] += amounts[u8(word >> u64(8 * i))]
    codes = np.empty(8 * max(1, out.size // 8 - whole + 1), np.uint8)
    rest = part(codes, 0, out.size - 8 * whole)
    _unpack(part(packed, whole * bits, packed.size), bits, rest)
    for i in range(rest.size):
        out[8 * whole + i] += amounts[rest[i]]
