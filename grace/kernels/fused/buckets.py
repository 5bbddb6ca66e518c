"""Codecs of a whole bucket as single passes over memory: gradients and residuals in, bytes on the wire out, and back.

Each call takes all variables of a bucket, or parts of them: for each a row of addresses (its gradient, its residual,
where the next residual goes; 0 for none) and a row of numbers (elements, where its payload tensors stand in the wire,
and what else its codec needs). Encoding computes x = factor * residual + gradient, writes the payload of x into the
wire and x - C(x) where the next residual goes; without one x is the gradient, which stays as it is. Operations are
those of the kernels that compressors call one by one, in the same order, so that the bits are the same.
"""

import numpy as np

from grace.kernels.fused.addresses import FIRST, NEXT, SECOND, SIZE, _at, _compensated
from grace.kernels.fused.halves import _from_brain, _from_half, _to_brain, _to_half, _widen_brain, _widen_half
from grace.kernels.fused.lanes import part, pattern_of
from grace.kernels.fused.loops import TILE, _max_bits, _random_blocks, compiled, f32, f64, u32
from grace.kernels.fused.packing import _add_signs, _pack, _pack_signs, _unpack
from grace.kernels.fused.primitives import _sum_abs
from grace.kernels.fused.rounding import _dequantize_bucket, _reciprocal, _round_bucket, _scale

# -- numbers -----------------------------------------------------------------------------------------------------------

FLOAT, HALF, BRAIN = 0, 1, 2


@compiled
def _narrow_half(x, out, kept):
    for i in range(x.size):
        out[i] = _to_half(pattern_of(x[i]))
        if kept:
            x[i] += -_from_half(out[i])


@compiled
def _narrow_brain(x, out, kept):
    for i in range(x.size):
        out[i] = _to_brain(pattern_of(x[i]))
        if kept:
            x[i] += -_from_brain(out[i])


@compiled
def encode_numbers(rows, factors, plan, wire, form):
    for v in range(rows.shape[0]):
        row, n, kept = rows[v], plan[v, SIZE], rows[v, NEXT] != 0
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            x = _compensated(row, factors[v], n, low, high)
            if form == FLOAT:
                part(_at(wire + plan[v, FIRST], n, np.float32), low, high)[:] = x
                if kept:
                    for i in range(x.size):
                        x[i] += -x[i]
            elif form == HALF:
                _narrow_half(x, part(_at(wire + plan[v, FIRST], n, np.uint16), low, high), kept)
            else:
                _narrow_brain(x, part(_at(wire + plan[v, FIRST], n, np.uint16), low, high), kept)


@compiled
def _divide(out, x, by):
    for i in range(out.size):
        out[i] = x[i] / by


@compiled
def decode_numbers(outs, wire, plan, by, form):
    """The mean of which the wire is the sum."""
    for v in range(outs.size):
        n = plan[v, SIZE]
        out, place = _at(outs[v], n, np.float32), wire + plan[v, FIRST]
        if form == FLOAT:
            _divide(out, _at(place, n, np.float32), by)
        elif form == HALF:
            _widen_half(out, _at(place, n, np.uint16), by)
        else:
            _widen_brain(out, _at(place, n, np.uint16), by)


# -- signs -------------------------------------------------------------------------------------------------------------


@compiled
def _subtract_signs(x, amount):
    for i in range(x.size):
        x[i] += -amount if x[i] >= 0 else amount


@compiled
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
            _pack_signs(x, part(packed, low // 8, (high + 7) // 8))
        sound[v] = largest <= most
        amount = f32(1)
        if scaled:
            amount = f32(total / n) if n else f32(0)
            _at(wire + plan[v, SECOND], 1, np.float32)[0] = amount
        if row[NEXT] != 0:
            _subtract_signs(_at(row[NEXT], n, np.float32), amount)


@compiled
def _vote(out, unit):
    for i in range(out.size):
        out[i] = unit if out[i] >= 0 else -unit


@compiled
def decode_signs(outs, wires, plan, weight, scaled, unit):
    """The mean of scaled signs; else the sign of the sum, times ``unit``."""
    for v in range(outs.size):
        n = plan[v, SIZE]
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            out = part(_at(outs[v], n, np.float32), low, high)
            out[:] = 0  # a tile, which stays in the cache
            for rank in range(wires.size):
                packed = part(_at(wires[rank] + plan[v, FIRST], (n + 7) // 8, np.uint8), low // 8, (high + 7) // 8)
                amount = weight
                if scaled:
                    amount = weight * _at(wires[rank] + plan[v, SECOND], 1, np.float32)[0]
                _add_signs(out, packed, amount)
            if not scaled:
                _vote(out, unit)
    return True


# -- levels ------------------------------------------------------------------------------------------------------------


@compiled
def encode_levels(rows, factors, plan, streams, wire, most, levels, bits, bucket_size, l2, spare, sound):
    random, middle = np.empty(TILE + 4, np.uint32), f32(levels)
    reciprocal, rest = _reciprocal(levels)
    for v in range(rows.shape[0]):
        row, n, largest = rows[v], plan[v, SIZE], u32(0)
        size = max(1, min(bucket_size, n))
        scales = _at(wire + plan[v, SECOND], (n + size - 1) // size, np.float32)
        codes = _at(wire + plan[v, FIRST], n, np.uint8) if bits == 8 else part(spare, 0, n)
        k0, k1, step, draw = streams[v, 0], streams[v, 1], streams[v, 2], streams[v, 3]
        span = max(1, TILE // size) * size  # several small buckets share a tile, a large one has several
        for low in range(0, n, span):
            high = min(low + span, n)
            x = _compensated(row, factors[v], n, low, high)
            largest = max(largest, _max_bits(x.view(np.uint32)))
            for start in range(low, high, size):
                scales[start // size] = _scale(part(x, start - low, min(start + size, high) - low), l2)
            for tile in range(low, high, TILE):
                stop, skip = min(tile + TILE, high), tile % 4
                _random_blocks(part(random, 0, (stop - tile + skip + 3) // 4 * 4), tile // 4, k0, k1, step, draw)
                for start in range(tile, stop, size):
                    end, scale = min(start + size, stop), scales[start // size]
                    drawn, divisor = (
                        part(random, start - tile + skip, end - tile + skip),
                        scale if scale > 0 else f32(1),
                    )
                    values, coded = part(x, start - low, end - low), part(codes, start, end)
                    _round_bucket(values, drawn, divisor, levels, coded)
                    if row[NEXT] != 0:
                        _dequantize_bucket(values, coded, scale * f32(-1), middle, reciprocal, rest)
        if bits != 8:
            _pack(codes, bits, _at(wire + plan[v, FIRST], (n * bits + 7) // 8, np.uint8))
        sound[v] = largest <= most


@compiled
def decode_levels(outs, wires, plan, weight, levels, bits, bucket_size, spare):
    middle = f32(levels)
    reciprocal, rest = _reciprocal(levels)
    for v in range(outs.size):
        n = plan[v, SIZE]
        size = max(1, min(bucket_size, n))
        buckets = (n + size - 1) // size
        whole = _at(outs[v], n, np.float32)
        packed = bits != 8  # then rank by rank, else all ranks' codes of a bucket while its means are in the cache
        for first in range(wires.size if packed else 1):
            if packed:
                _unpack(_at(wires[first] + plan[v, FIRST], (n * bits + 7) // 8, np.uint8), bits, part(spare, 0, n))
            for bucket in range(buckets):
                start, stop = bucket * size, min((bucket + 1) * size, n)
                out = part(whole, start, stop)
                if first == 0:
                    out[:] = 0
                for rank in range(first, first + 1 if packed else wires.size):
                    codes = part(spare, 0, n) if packed else _at(wires[rank] + plan[v, FIRST], n, np.uint8)
                    factor = _at(wires[rank] + plan[v, SECOND], buckets, np.float32)[bucket] * weight
                    _dequantize_bucket(out, part(codes, start, stop), factor, middle, reciprocal, rest)
    return True
