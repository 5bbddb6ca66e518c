"""The codec of whole buckets for the largest elements; see :mod:`grace.kernels.fused.buckets`."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from grace.kernels.fused.addresses import FIRST, GRADIENT, MORE, NEXT, SECOND, SIZE, _at, _compensated, _float, _pattern
from grace.kernels.fused.loops import LOW31, TILE, _max_bits, f32, i32, u8, u32, u64
from grace.kernels.fused.primitives import _collect, _kth_largest

u16, i64 = np.uint16, np.int64
BLOCK = 32
SAMPLED = 1 << 14  # elements from which on a threshold is guessed
LOWERED = f32(0.9)


@intrinsic
def _reaching(typing: Any, address: Any, threshold: Any) -> Any:
    """A bit for each of the 32 magnitudes from an address on: whether its pattern is at or above a threshold."""

    def generate(context, builder, signature, args):
        word, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), BLOCK)
        load = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=4)
        magnitudes = builder.and_(load, ir.Constant(vector, [int(LOW31)] * BLOCK))
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], ir.Constant(word, 0))
        every = builder.shuffle_vector(one, one, ir.Constant(vector, [0] * BLOCK))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, every), word)

    return types.uint32(types.uint64, types.uint32), generate


@intrinsic
def _lowest(typing: Any, mask: Any) -> Any:
    """The number of the lowest bit that is set."""

    def generate(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), generate


@njit(nogil=True, cache=True)
def _filter_part(x, threshold, first, indices, found, count):
    """Append positions and patterns at or above the threshold; returns how many there are then."""
    bits, whole = x.view(np.uint32), x.size // BLOCK * BLOCK
    address = u64(x.ctypes.data)
    for start in range(0, whole, BLOCK):
        mask = _reaching(address + u64(4 * start), threshold)  # type: ignore
        while mask:
            i = start + i64(_lowest(mask))
            indices[count], found[count] = first + i, bits[i] & LOW31
            count += 1
            mask &= mask - u32(1)
    for i in range(whole, x.size):
        b = bits[i] & LOW31
        if b >= threshold:
            indices[count], found[count] = first + i, b
            count += 1
    return count


@njit(nogil=True, cache=True)
def _guess(x, k, sample):
    """A magnitude's pattern that a little more than k elements reach, by a sample of evenly spread ones."""
    stride = max(1, min(x.size // 2048, k // 64, 128))
    bits, size = x.view(np.uint32), x.size // stride
    for j in range(size):
        sample[j] = bits[j * stride + (j * 7) % stride]
    expected = size * k / x.size
    rank = min(size, i32(expected + 4 * np.sqrt(expected) + 4))
    guess, _ = _kth_largest(sample[:size], rank)
    return guess


@njit(nogil=True, cache=True)
def encode_largest(rows, factors, plan, wire, most, last, indices, found, sample, chosen, sound):
    """Exact top-k. What the last step's threshold, a little lowered, lets through is collected in the pass that
    computes x; if that is too little or too much, what one guessed from a sample does; else all is looked at."""
    for v in range(rows.shape[0]):
        row, n, k, width = rows[v], plan[v, SIZE], plan[v, MORE], plan[v, MORE + 1]
        guessing = k * 8 <= n and n >= SAMPLED
        room = 4 * k + 1024
        threshold = _pattern(_float(last[v]) * LOWERED)
        largest, count = u32(0), room + 1 if last[v] == 0 else 0
        for low in range(0, n, TILE):
            x = _compensated(row, factors[v], n, low, min(low + TILE, n))
            largest = max(largest, _max_bits(x.view(np.uint32)))
            if guessing and count <= room:
                count = _filter_part(x, threshold, low, indices, found, count)
        sound[v] = largest <= most
        x = _at(row[GRADIENT] if row[NEXT] == 0 else row[NEXT], n, np.float32)
        if guessing and not k <= count <= room:
            threshold, count = _guess(x, k, sample), 0
            for low in range(0, n, TILE):
                if count <= room:
                    count = _filter_part(x[low : min(low + TILE, n)], threshold, low, indices, found, count)
        out = chosen[:k]
        if guessing and k <= count <= room:
            last[v], larger = _kth_largest(found[:count], k)
            _collect(found[:count], last[v], k - larger, out)
            for j in range(k):
                out[j] = indices[out[j]]
        elif k:
            last[v], larger = _kth_largest(x.view(np.uint32), k)
            _collect(x.view(np.uint32), last[v], k - larger, out)
        _write_sparse(x, out, width, row[NEXT] != 0, wire + plan[v, FIRST], wire + plan[v, SECOND])


@njit(inline="always")
def _write_sparse(x, chosen, width, subtract, values_at, coded_at):
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


@njit(nogil=True, cache=True)
def _add_sparse(out, values, coded, weight):
    for j in range(values.size):
        index = i32(coded[j])
        if index < 0 or index >= out.size:
            return False
        out[u64(index)] += weight * values[j]
    return True


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def decode_sparse(outs, wires, plan, weight):
    """Whether all positions were such ones."""
    for v in range(outs.size):
        n, k, width = plan[v, SIZE], plan[v, MORE], plan[v, MORE + 1]
        out = _at(outs[v], n, np.float32)
        out[:] = 0
        for rank in range(wires.size):
            values, coded = _at(wires[rank] + plan[v, FIRST], k, np.float32), wires[rank] + plan[v, SECOND]
            if width == 4:
                well = _add_sparse(out, values, _at(coded, k, np.int32), weight)
            elif width == 2:
                well = _add_sparse(out, values, _at(coded, k, np.uint16), weight)
            else:
                well = _add_marked(out, values, _at(coded, (n + 7) // 8, np.uint8), weight)
            if not well:
                return False
    return True
