"""Loops of codecs of whole buckets for top-k and its like; see :mod:`grace.kernels.numba.buckets`."""

import numpy as np
from numba import njit

from grace.kernels.numba.buckets import FIRST, MORE, NEXT, SECOND, SIZE, _at, _compensated, _x_of
from grace.kernels.numba.loops import TILE, compiled, i32, u8, u32, u64
from grace.kernels.numba.primitives import _random_indices, _scatter_add
from grace.kernels.numba.selection import (
    LOWERED,
    SAMPLED,
    _filter,
    _filter_part,
    _guess,
    _room,
    _stride,
    _take_chunk,
    _take_largest,
    _take_listed,
)
from grace.kernels.numba.simd import float_of, part, pattern_of
from grace.kernels.random import FEISTEL_DRAW

u16, PERMUTING = np.uint16, u32(FEISTEL_DRAW)


@compiled
def encode_largest(rows, factors, plan, streams, wire, most, in_range, last, indices, found, sample, chosen):
    """Write exact top-k. The pass that computes x lists what reaches the last step's threshold, a little lowered; if
    that is too little or too much, a second pass lists what reaches a guess from a sample; else all is searched."""
    for v in range(rows.shape[0]):
        row, by, n, k, width = rows[v], factors[v], plan[v, SIZE], plan[v, MORE], plan[v, MORE + 1]
        guessing = k * 8 <= n and n >= SAMPLED
        room = _room(k)
        threshold = pattern_of(float_of(last[v]) * LOWERED)
        # Without a last threshold nothing is listed, as if there were no room.
        largest, count = u32(0), room + 1 if last[v] == 0 else 0
        for low in range(0, n, TILE):
            x, top = _compensated(row, by, n, low, min(low + TILE, n))
            largest = max(largest, top)
            if guessing and count <= room:
                count = _filter_part(x.view(np.uint32), threshold, low, indices, found, count)
        in_range[v] = largest <= most
        x = _x_of(row, n)
        bits, out = x.view(np.uint32), part(chosen, 0, k)
        if guessing and not k <= count <= room:
            count = _filter(bits, _guess(bits, k, sample, _stride(n, k, 128)), room, indices, found)
        if guessing and k <= count <= room:
            last[v] = _take_listed(indices, found, count, k, out)
        elif k:
            last[v] = _take_largest(bits, k, out)
        _write_sparsified(x, out, width, row[NEXT] != 0, wire + plan[v, FIRST], wire + plan[v, SECOND])


@compiled
def encode_chunks(rows, factors, plan, streams, wire, most, in_range, chunk, kept, indices, found, chosen):
    """Write the largest of each chunk, chosen while the chunk is in the cache. The smallest of them, a little lowered,
    is the next chunk's guess."""
    for v in range(rows.shape[0]):
        row, n, count, width = rows[v], plan[v, SIZE], plan[v, MORE], plan[v, MORE + 1]
        largest, guess, done = u32(0), u32(0), 0
        for low in range(0, n, chunk):
            x, top = _compensated(row, factors[v], n, low, min(low + chunk, n))
            bits, largest = x.view(np.uint32), max(largest, top)
            mine = min(kept, count - done)
            kth = _take_chunk(bits, guess, low, indices, found, part(chosen, done, done + mine))
            guess, done = pattern_of(float_of(kth) * LOWERED), done + mine
        in_range[v] = largest <= most
        x = _x_of(row, n)
        _write_sparsified(
            x, part(chosen, 0, count), width, row[NEXT] != 0, wire + plan[v, FIRST], wire + plan[v, SECOND]
        )


@compiled
def encode_drawn(rows, factors, plan, streams, wire, most, in_range, drawn, scales):
    """Draw indices, and write the elements there.

    A receiver multiplies them by a scale, so that is what the residual loses.
    """
    start = 0
    for v in range(rows.shape[0]):
        row, by, n, largest, bits = rows[v], factors[v], plan[v, SIZE], u32(0), plan[v, MORE + 1]
        indices = part(drawn, start, start + plan[v, MORE])
        words = streams[v, 0], streams[v, 1], streams[v, 2], u32(streams[v, 3] | PERMUTING)
        _random_indices(indices, n, bits & 0xFF, bits >> 8, *words)
        for low in range(0, n, TILE):
            largest = max(largest, _compensated(row, by, n, low, min(low + TILE, n))[1])
        x = _x_of(row, n)
        values = _at(wire + plan[v, FIRST], indices.size, np.float32)
        for j in range(indices.size):
            values[j] = x[indices[j]]
            if row[NEXT] != 0:
                x[indices[j]] -= scales[v] * values[j]
        in_range[v] = largest <= most
        start += indices.size


@compiled
def decode_drawn(outs, wires, plan, weights, drawn):
    start = 0
    for v in range(outs.size):
        indices = part(drawn, start, start + plan[v, MORE])
        out = _at(outs[v], plan[v, SIZE], np.float32)
        out[:] = 0
        for rank in range(wires.size):
            # Positions were drawn when this rank encoded: nothing of the wire can be out of range.
            _scatter_add(out, indices, _at(wires[rank] + plan[v, FIRST], indices.size, np.float32), weights[v])
        start += indices.size


@njit(inline="always")
def _write_sparsified(x, chosen, width, subtract, values_at, coded_at):
    values = _at(values_at, chosen.size, np.float32)
    for j in range(chosen.size):
        values[j] = x[chosen[j]]
        if subtract:
            x[chosen[j]] -= values[j]
    if width == 4:
        _at(coded_at, chosen.size, np.int32)[:] = chosen
    elif width == 2:
        narrow = _at(coded_at, chosen.size, np.uint16)
        for j in range(chosen.size):
            narrow[j] = u16(chosen[j])
    else:
        bitmap = _at(coded_at, (x.size + 7) // 8, np.uint8)
        bitmap[:] = 0
        for j in range(chosen.size):
            bitmap[chosen[j] >> 3] |= u8(1 << (chosen[j] & 7))


@compiled
def _add_chunks(out, values, coded, chunk, kept, weight):
    """Add values at positions of which the lower 16 bits are given; return False if one is outside."""
    for j in range(values.size):
        # Never negative, since both parts are unsigned.
        index = i32((j // kept * chunk & ~0xFFFF) | coded[j])
        if index >= out.size:
            return False
        out[u64(index)] += weight * values[j]
    return True


@compiled
def _add_marked(out, values, bitmap, weight):
    used = 0
    for byte in range(bitmap.size):
        if bitmap[byte]:
            for bit in range(8):
                if bitmap[byte] >> bit & 1:
                    index = 8 * byte + bit
                    if used == values.size or index >= out.size:
                        return False
                    out[index] += weight * values[used]
                    used += 1
    return used == values.size


@compiled
def decode_sparsified(outs, wires, plan, weight, chunk, kept):
    """Write means; return False if a position is invalid. ``chunk`` is 0 where there are no chunks."""
    for v in range(outs.size):
        n, k, width = plan[v, SIZE], plan[v, MORE], plan[v, MORE + 1]
        out = _at(outs[v], n, np.float32)
        out[:] = 0
        for rank in range(wires.size):
            values, coded = _at(wires[rank] + plan[v, FIRST], k, np.float32), wires[rank] + plan[v, SECOND]
            if width == 4:
                well = _scatter_add(out, _at(coded, k, np.int32), values, weight) == k
            elif width == 2 and chunk:
                well = _add_chunks(out, values, _at(coded, k, np.uint16), chunk, kept, weight)
            elif width == 2:
                well = _scatter_add(out, _at(coded, k, np.uint16), values, weight) == k
            else:
                well = _add_marked(out, values, _at(coded, (n + 7) // 8, np.uint8), weight)
            if not well:
                return False
    return True
