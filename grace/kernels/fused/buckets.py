"""Codecs of a whole bucket as single passes over memory: gradients and residuals in, bytes on the wire out, and back.

Each call takes all variables of a bucket, or parts of them: for each a row of addresses (its gradient, its residual,
where the next residual goes; 0 for none) and a row of numbers (elements, where its payload tensors stand in the wire,
and what else its codec needs). Encoding computes x = factor * residual + gradient, writes the payload of x into the
wire and x - C(x) where the next residual goes; without one x is the gradient, which stays as it is. Operations are
those of the kernels that compressors call one by one, in the same order, so that the bits are the same.
"""

import numpy as np
from numba import njit

from grace.kernels.fused.addresses import FIRST, NEXT, SECOND, SIZE, _at, _compensated, _float
from grace.kernels.fused.loops import SHIFT8, TILE, UNIT, _max_bits, _random_blocks, f32, f64, i32, u8, u32
from grace.kernels.fused.primitives import _pack, _pack_signs, _sum_abs, _sum_squares, _unpack

FINITE = np.float32(np.finfo(np.float32).max)

# -- signs -------------------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _subtract_signs(x, amount):
    for i in range(x.size):
        x[i] += -amount if x[i] >= 0 else amount


@njit(nogil=True, cache=True)
def encode_signs(rows, factors, plan, wire, most, scaled, sound):
    for v in range(rows.shape[0]):
        row, n = rows[v], plan[v, SIZE]
        packed = _at(wire + plan[v, FIRST], (n + 7) // 8, np.uint8)
        total, largest = f64(0), u32(0)
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            x = _compensated(row, factors[v], n, low, high)
            largest = max(largest, _max_bits(x.view(np.uint32)))
            if scaled:
                total += _sum_abs(x)
            _pack_signs(x, packed[low // 8 : (high + 7) // 8])
        sound[v] = largest <= most
        amount = f32(1)
        if scaled:
            amount = f32(total / n) if n else f32(0)
            _at(wire + plan[v, SECOND], 1, np.float32)[0] = amount
        if row[NEXT] != 0:
            _subtract_signs(_at(row[NEXT], n, np.float32), amount)


@njit(nogil=True, cache=True)
def _write_signs(out, packed, amount):
    for i in range(out.size):
        out[i] = f32(0) + (amount if (packed[i >> 3] >> (i & 7)) & 1 else -amount)


@njit(nogil=True, cache=True)
def _add_signs(out, packed, amount):
    for i in range(out.size):
        out[i] += amount if (packed[i >> 3] >> (i & 7)) & 1 else -amount


@njit(nogil=True, cache=True)
def _vote(out, unit):
    for i in range(out.size):
        out[i] = unit if out[i] >= 0 else -unit


@njit(nogil=True, cache=True)
def decode_signs(outs, wires, plan, weight, scaled, unit):
    """The mean of scaled signs; else the sign of the sum, times ``unit``."""
    for v in range(outs.size):
        n = plan[v, SIZE]
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            out = _at(outs[v], n, np.float32)[low:high]
            for rank in range(wires.size):
                packed = _at(wires[rank] + plan[v, FIRST], (n + 7) // 8, np.uint8)[low // 8 : (high + 7) // 8]
                amount = weight
                if scaled:
                    amount = weight * _at(wires[rank] + plan[v, SECOND], 1, np.float32)[0]
                if rank == 0:
                    _write_signs(out, packed, amount)
                else:
                    _add_signs(out, packed, amount)
            if not scaled:
                _vote(out, unit)
    return True


# -- levels ------------------------------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize_part(x, codes, random, divisor, levels):
    top, middle = f32(levels), i32(levels)
    for i in range(x.size):
        value = x[i]
        u = f32(i32(random[i] >> SHIFT8)) * UNIT
        code = i32(abs(value) / divisor * top + u)
        code = code if code < middle else middle
        codes[i] = u8(middle + (code if value >= 0 else -code))


@njit(nogil=True, cache=True, error_model="numpy")
def _add_levels(out, codes, factor, middle):
    for i in range(out.size):
        out[i] += factor * ((f32(i32(codes[i])) - middle) / middle)


@njit(nogil=True, cache=True, error_model="numpy")
def _write_levels(out, codes, factor, middle):
    for i in range(out.size):
        out[i] = f32(0) + factor * ((f32(i32(codes[i])) - middle) / middle)


@njit(nogil=True, cache=True)
def encode_levels(rows, factors, plan, streams, wire, most, levels, bits, bucket_size, l2, spare, sound):
    random = np.empty(TILE + 4, np.uint32)
    middle = f32(levels)
    for v in range(rows.shape[0]):
        row, n, largest = rows[v], plan[v, SIZE], u32(0)
        size = max(1, min(bucket_size, n))
        scales = _at(wire + plan[v, SECOND], (n + size - 1) // size, np.float32)
        codes = _at(wire + plan[v, FIRST], n, np.uint8) if bits == 8 else spare[:n]
        for bucket in range(scales.size):
            start, stop = bucket * size, min((bucket + 1) * size, n)
            x = _compensated(row, factors[v], n, start, stop)
            top = _max_bits(x.view(np.uint32))
            largest = max(largest, top)
            if l2:
                scale = f32(min(np.sqrt(_sum_squares(x)), f64(FINITE)))
            else:
                scale = min(_float(top), FINITE)
            scales[bucket] = scale
            divisor = scale if scale > 0 else f32(1)
            for low in range(start, stop, TILE):
                high = min(low + TILE, stop)
                offset = low % 4
                blocks = (high - low + offset + 3) // 4
                _random_blocks(
                    random[: 4 * blocks], low // 4, streams[v, 0], streams[v, 1], streams[v, 2], streams[v, 3]
                )
                part = x[low - start : high - start]
                _quantize_part(part, codes[low:high], random[offset : offset + high - low], divisor, levels)
                if row[NEXT] != 0:
                    _add_levels(part, codes[low:high], scale * f32(-1), middle)
        if bits != 8:
            _pack(codes, bits, _at(wire + plan[v, FIRST], (n * bits + 7) // 8, np.uint8))
        sound[v] = largest <= most


@njit(nogil=True, cache=True)
def decode_levels(outs, wires, plan, weight, levels, bits, bucket_size, spare):
    middle = f32(levels)
    for v in range(outs.size):
        n = plan[v, SIZE]
        size = max(1, min(bucket_size, n))
        buckets = (n + size - 1) // size
        out = _at(outs[v], n, np.float32)
        if bits != 8:
            out[:] = 0
        for rank in range(wires.size if bits != 8 else 0):
            _unpack(_at(wires[rank] + plan[v, FIRST], (n * bits + 7) // 8, np.uint8), bits, spare[:n])
            scales = _at(wires[rank] + plan[v, SECOND], buckets, np.float32)
            for bucket in range(buckets):
                start, stop = bucket * size, min((bucket + 1) * size, n)
                _add_levels(out[start:stop], spare[start:stop], scales[bucket] * weight, middle)
        for bucket in range(buckets if bits == 8 else 0):
            start, stop = bucket * size, min((bucket + 1) * size, n)
            for rank in range(wires.size):
                codes = _at(wires[rank] + plan[v, FIRST], n, np.uint8)[start:stop]
                factor = _at(wires[rank] + plan[v, SECOND], buckets, np.float32)[bucket] * weight
                if rank == 0:
                    _write_levels(out[start:stop], codes, factor, middle)
                else:
                    _add_levels(out[start:stop], codes, factor, middle)
    return True
