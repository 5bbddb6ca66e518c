"""Codecs of a whole bucket as single passes over memory: gradients and residuals in, bytes on the wire out, and back.

See :class:`~grace.kernels.bucket_codec.BucketCodec` for what they compute, and
:class:`~grace.kernels.numba.bucket_codecs.Codec` for their arguments. ``plan`` has a row for each variable: elements,
where its payload tensors stand in the wire, and what else the method needs.
"""

import numpy as np
from numba import carray, njit

from grace.kernels.constants import ANY_BITS
from grace.kernels.numba.half_precision import _add_half, _from_half, _to_half, _widen
from grace.kernels.numba.loops import INF_BITS, LOW31, TILE, _max_bits, _random_blocks, compiled, f32, f64, u32, u64
from grace.kernels.numba.packing import _add_either, _pack, _pack_signs, _unpack
from grace.kernels.numba.primitives import _add, _sum_abs
from grace.kernels.numba.quantization import _add_powers, _clip, _deviation_limit, _round_powers_tile, _side_sums, _sum
from grace.kernels.numba.rounding import (
    MAX,
    MAX_BITS,
    _dequantize_bucket,
    _dequantize_to,
    _reciprocal,
    _round_bucket,
    _round_nearest,
    _round_to_two_bits,
    _scale,
    _threshold,
)
from grace.kernels.numba.simd import float_of, part, pattern_of, pointer_of, prefetch, prefetch_to_write

# -- x = a residual + b gradient, of arrays at addresses ---------------------------------------------------------------

GRADIENT, KEPT, NEXT = 0, 1, 2
"""Columns of addresses."""
SIZE, FIRST, SECOND, MORE = 0, 1, 2, 3
"""Columns of numbers: elements, byte offsets of the payload's tensors, and a number of the method's."""
LINE = 16
"""Elements of a cache line."""
AHEAD = 128
"""Elements that are computed between requests for memory: so few that requests do not wait for each other."""


@njit(inline="always")
def _at(address, n, dtype):
    # A view of memory that a framework owns: nothing is copied, or freed with it.
    return carray(pointer_of(u64(address)), (n,), dtype)


@compiled
def _add_kept(x, gradient, kept, a, b):
    """Write x, and return its largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(x.size):
        value = a * kept[i] + b * gradient[i]
        x[i] = value
        magnitude = u32(pattern_of(value) & LOW31)
        largest = magnitude if magnitude > largest else largest
    return largest


@compiled
def _scaled(x, gradient, b):
    """Write x where nothing was kept, and return its largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(x.size):
        value = b * gradient[i]
        x[i] = value
        magnitude = u32(pattern_of(value) & LOW31)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(inline="always")
def _compensated(row, factors, n, low, high):
    """Return x between two elements, in its place as the next residual or the gradient itself, and its largest
    magnitude as a bit pattern."""
    gradient = part(_at(row[GRADIENT], n, np.float32), low, high)
    if row[NEXT] == 0:  # no residual is kept: x is the gradient itself
        return gradient, _max_bits(gradient.view(np.uint32))
    x = part(_at(row[NEXT], n, np.float32), low, high)
    if row[KEPT] == 0:  # the first step
        return x, _scaled(x, gradient, factors[1])
    return x, _add_kept(x, gradient, part(_at(row[KEPT], n, np.float32), low, high), factors[0], factors[1])


@njit(inline="always")
def _x_of(row, n):
    """Return all of x, once :func:`_compensated` has computed it."""
    return _at(row[GRADIENT] if row[NEXT] == 0 else row[NEXT], n, np.float32)


@compiled
def _fetch_ahead(row, low, high):
    """Request the memory of elements that :func:`_compensated` takes soon; they may lie beyond the end."""
    for i in range(low, high, LINE):
        place = u64(4 * i)
        prefetch(row[GRADIENT] + place)
        if row[NEXT] != 0:
            prefetch_to_write(row[NEXT] + place)
        if row[KEPT] != 0:
            prefetch(row[KEPT] + place)


# -- numbers -----------------------------------------------------------------------------------------------------------

FLOAT32 = 0
"""Beside the forms of :mod:`grace.kernels.numba.half_precision`."""


@compiled
def _encode_half(x, out, kept, form):
    for i in range(x.size):
        out[i] = _to_half(pattern_of(x[i]), form)
        if kept:
            x[i] += -_from_half(out[i], form)


@compiled
def encode_numbers(rows, factors, plan, streams, wire, most, in_range, form):
    for v in range(rows.shape[0]):
        row, by, n, kept, largest = rows[v], factors[v], plan[v, SIZE], rows[v, NEXT] != 0, u32(0)
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            # Nothing is added, and any number is in range: the gradient is only copied.
            if row[NEXT] == 0 and most == ANY_BITS:
                x = part(_at(row[GRADIENT], n, np.float32), low, high)
            else:
                x, top = _compensated(row, by, n, low, high)
                largest = max(largest, top)
            if form == FLOAT32:
                part(_at(wire + plan[v, FIRST], n, np.float32), low, high)[:] = x
                if kept:
                    for i in range(x.size):
                        x[i] += -x[i]
            else:
                _encode_half(x, part(_at(wire + plan[v, FIRST], n, np.uint16), low, high), kept, form)
        sent = float_of(largest)
        if form != FLOAT32:  # which may be Inf
            sent = _from_half(_to_half(largest, form), form)
        in_range[v] = largest <= most and pattern_of(sent) < INF_BITS


@compiled
def _divide(out, x, by):
    for i in range(out.size):
        out[i] = x[i] / by


@compiled
def decode_numbers(outs, wires, plan, count, form):
    """Write the mean of the ranks whose sum one wire is, or of the wires of several ranks."""
    weight = f32(1 / count)
    for v in range(outs.size):
        n = plan[v, SIZE]
        whole, place = _at(outs[v], n, np.float32), wires[0] + plan[v, FIRST]
        if wires.size > 1:
            for low in range(0, n, TILE):
                high = min(low + TILE, n)
                out = part(whole, low, high)
                out[:] = 0
                for rank in range(wires.size):
                    place = wires[rank] + plan[v, FIRST]
                    if form == FLOAT32:
                        _add(out, part(_at(place, n, np.float32), low, high), f32(1))
                    else:
                        _add_half(out, part(_at(place, n, np.uint16), low, high), weight, form)
                if form == FLOAT32:
                    _divide(out, out, f32(count))
        elif form == FLOAT32:
            _divide(whole, _at(place, n, np.float32), f32(count))
        else:
            _widen(whole, _at(place, n, np.uint16), f32(count), form)


# -- signs -------------------------------------------------------------------------------------------------------------

SCALED, SIDED, VOTED, MOMENT = 0, 1, 2, 3
"""Values of a bit: the mean magnitude, the mean of its side, or a vote; of a moment, which is kept as it is."""


@compiled
def _subtract_signs(x, one, other):
    for i in range(x.size):
        x[i] += -one if x[i] >= 0 else -other


@compiled
def encode_signs(rows, factors, plan, streams, wire, most, in_range, form):
    for v in range(rows.shape[0]):
        row, by, n = rows[v], factors[v], plan[v, SIZE]
        packed = _at(wire + plan[v, FIRST], (n + 7) // 8, np.uint8)
        lower, upper, count, largest = f64(0), f64(0), 0, u32(0)
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            x, top = _compensated(row, by, n, low, high)
            if form == MOMENT:
                top = _max_bits(part(_at(row[GRADIENT], n, np.uint32), low, high))
            largest = max(largest, top)
            if form == SCALED:
                upper += _sum_abs(x)
            elif form == SIDED:
                below, above, many = _side_sums(x)
                lower, upper, count = lower + below, upper + above, count + many
            _pack_signs(x, part(packed, low // 8, (high + 7) // 8))
        in_range[v] = largest <= most
        one, other = f32(1), f32(-1)
        if form == SCALED:
            one = f32(upper / n) if n else f32(0)
            other = -one
            _at(wire + plan[v, SECOND], 1, np.float32)[0] = one
        elif form == SIDED:
            one, other = f32(upper / max(1, count)), f32(lower / max(1, n - count))
            means = _at(wire + plan[v, SECOND], 2, np.float32)
            means[0], means[1] = other, one
        if row[NEXT] != 0 and form != MOMENT:
            _subtract_signs(_at(row[NEXT], n, np.float32), one, other)


@compiled
def _vote(out, unit):
    for i in range(out.size):
        out[i] = unit if out[i] >= 0 else -unit


@compiled
def decode_signs(outs, wires, plan, weight, form, unit):
    """Write the mean of scaled signs; of votes the sign of their sum, times ``unit``."""
    for v in range(outs.size):
        n = plan[v, SIZE]
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            out = part(_at(outs[v], n, np.float32), low, high)
            out[:] = 0  # a tile, which stays in the cache
            for rank in range(wires.size):
                packed = part(_at(wires[rank] + plan[v, FIRST], (n + 7) // 8, np.uint8), low // 8, (high + 7) // 8)
                one, other = f32(1), f32(-1)
                if form == SCALED:
                    one = weight * _at(wires[rank] + plan[v, SECOND], 1, np.float32)[0]
                    other = -one
                elif form == SIDED:
                    means = _at(wires[rank] + plan[v, SECOND], 2, np.float32)
                    one, other = weight * means[1], weight * means[0]
                _add_either(out, packed, one, other)
            if form >= VOTED:
                _vote(out, unit)


# -- levels ------------------------------------------------------------------------------------------------------------


@njit(inline="always")
def _words_of(streams, v):
    return streams[v, 0], streams[v, 1], streams[v, 2], streams[v, 3]


@compiled
def _pack_held(held, count, bits, packed, done):
    """Pack the held codes that fill whole bytes, behind the ``done`` ones before them.

    Return the number of codes that are still held, at the beginning, and the number of packed ones.
    """
    whole = count // 8 * 8
    _pack(part(held, 0, whole), bits, part(packed, done * bits // 8, packed.size))
    for i in range(count - whole):
        held[i] = held[whole + i]
    return count - whole, done + whole


@compiled
def encode_levels(
    rows, factors, plan, streams, wire, most, in_range, levels, bits, bucket_size, norm, reach, nearest, held
):
    """Round to levels. Codes of fewer than 8 bits are held, a tile and up to 7 more, until they fill whole bytes."""
    random, middle = np.empty(TILE + 4, np.uint32), f32(levels)
    reciprocal, rest = _reciprocal(levels)
    for v in range(rows.shape[0]):
        row, by, n, largest = rows[v], factors[v], plan[v, SIZE], u32(0)
        size = max(1, min(bucket_size, n))
        scales = _at(wire + plan[v, SECOND], (n + size - 1) // size, np.float32)
        packed = _at(wire + plan[v, FIRST], (n * bits + 7) // 8, np.uint8)
        x = _x_of(row, n)
        span = max(1, TILE // size) * size  # several small buckets share a tile, a large one has several
        count, done = 0, 0
        for low in range(0, n, span):
            high = min(low + span, n)
            # The largest magnitude comes with x; other norms take a pass of their own, below.
            for start in range(low, high, size if norm == MAX else span):
                _, top = _compensated(row, by, n, start, min(start + (size if norm == MAX else span), high))
                largest = max(largest, top)
                if norm == MAX:
                    scales[start // size] = float_of(min(top, MAX_BITS))
            if norm != MAX:
                for start in range(low, high, size):
                    scales[start // size] = _scale(part(x, start, min(start + size, high)), norm, reach)
            for tile in range(low, high, TILE):
                # Philox makes blocks of 4 numbers, and a tile may begin within one.
                stop, skip = min(tile + TILE, high), tile % 4
                if not nearest:
                    words = _words_of(streams, v)
                    _random_blocks(part(random, 0, (stop - tile + skip + 3) // 4 * 4), tile // 4, *words)
                codes = part(packed, tile, stop) if bits == 8 else part(held, count, count + stop - tile)
                for start in range(tile, stop, size):
                    end, scale = min(start + size, stop), scales[start // size]
                    divisor, factor = scale if scale > 0 else f32(1), scale * f32(-1)
                    compares = bits == 2 and nearest and row[NEXT] != 0
                    threshold = _threshold(divisor, levels) if compares else f32(0)
                    for first in range(start, end, AHEAD):
                        last = min(first + AHEAD, end)
                        values, coded = part(x, first, last), part(codes, first - tile, last - tile)
                        if compares:
                            _round_to_two_bits(values, threshold, levels, coded, factor, reciprocal, rest)
                        elif nearest:
                            subtracts = row[NEXT] != 0
                            _round_nearest(values, divisor, levels, coded, factor, reciprocal, rest, subtracts)
                        else:
                            drawn = part(random, first - tile + skip, last - tile + skip)
                            _round_bucket(values, drawn, divisor, levels, coded)
                            if row[NEXT] != 0:
                                _dequantize_bucket(values, coded, factor, middle, reciprocal, rest)
                        if span <= TILE:
                            _fetch_ahead(row, first + span, last + span)
                if bits != 8:
                    count, done = _pack_held(held, count + stop - tile, bits, packed, done)
        if count > 0:
            _pack(part(held, 0, count), bits, part(packed, done * bits // 8, packed.size))
        in_range[v] = largest <= most


@compiled
def decode_levels(outs, wires, plan, weight, levels, bits, bucket_size, held):
    middle = f32(levels)
    reciprocal, rest = _reciprocal(levels)
    for v in range(outs.size):
        n = plan[v, SIZE]
        size = max(1, min(bucket_size, n))
        nbytes, buckets = (n * bits + 7) // 8, (n + size - 1) // size
        for low in range(0, n, TILE):  # of whole bytes; all ranks' codes of it while its means are in the cache
            high = min(low + TILE, n)
            out = part(_at(outs[v], n, np.float32), low, high)
            for rank in range(wires.size):
                packed = part(_at(wires[rank] + plan[v, FIRST], nbytes, np.uint8), low * bits // 8, nbytes)
                scales = _at(wires[rank] + plan[v, SECOND], buckets, np.float32)
                codes = part(packed if bits == 8 else held, 0, high - low)
                if bits != 8:
                    _unpack(packed, bits, codes)
                start = low
                while start < high:
                    stop = min((start // size + 1) * size, high)
                    places = part(out, start - low, stop - low), part(codes, start - low, stop - low)
                    factor = scales[start // size] * weight
                    # The first rank's values are written, not added, so that nobody fills the mean with zeros.
                    if rank == 0:
                        _dequantize_to(*places, factor, middle, reciprocal, rest)
                        for i in range(start, stop, LINE):
                            prefetch_to_write(outs[v] + u64(4 * (i + TILE)))
                    else:
                        _dequantize_bucket(*places, factor, middle, reciprocal, rest)
                    start = stop


@compiled
def encode_ternary(rows, factors, plan, streams, wire, most, in_range, clip):
    """Round to levels -1, 0 and 1, in two bits, after clipping to so many standard deviations. Decoded as levels
    are."""
    random, clipped, codes = np.empty(TILE, np.uint32), np.empty(TILE, np.float32), np.empty(TILE, np.uint8)
    reciprocal, rest = _reciprocal(1.0)
    for v in range(rows.shape[0]):
        row, by, n, total, largest = rows[v], factors[v], plan[v, SIZE], f64(0), u32(0)
        for low in range(0, n, TILE):
            x, top = _compensated(row, by, n, low, min(low + TILE, n))
            largest, total = max(largest, top), total + _sum(x)
        in_range[v] = largest <= most
        x = _x_of(row, n)
        # Clipping takes a second pass: its limit follows from all of x.
        limit = _deviation_limit(x, total, clip)
        scale = float_of(min(largest, pattern_of(limit)))  # of magnitudes that are clipped, the largest
        packed = _at(wire + plan[v, FIRST], (n + 3) // 4, np.uint8)
        if n:
            _at(wire + plan[v, SECOND], 1, np.float32)[0] = scale
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            values, y, coded = part(x, low, high), part(clipped, 0, high - low), part(codes, 0, high - low)
            _clip(values, limit, y)
            _random_blocks(part(random, 0, (high - low + 3) // 4 * 4), low // 4, *_words_of(streams, v))
            _round_bucket(y, random, scale if scale > 0 else f32(1), 1.0, coded)
            _pack(coded, 2, part(packed, low // 4, packed.size))
            if row[NEXT] != 0:
                _dequantize_bucket(values, coded, scale * f32(-1), f32(1), reciprocal, rest)


# -- powers of two -----------------------------------------------------------------------------------------------------


@compiled
def encode_powers(rows, factors, plan, streams, wire, most, in_range):
    random = np.empty(TILE, np.uint32)
    for v in range(rows.shape[0]):
        row, by, n, largest = rows[v], factors[v], plan[v, SIZE], u32(0)
        codes = _at(wire + plan[v, FIRST], n, np.uint8)
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            (x, top), coded = _compensated(row, by, n, low, high), part(codes, low, high)
            largest = max(largest, top)
            _random_blocks(part(random, 0, (high - low + 3) // 4 * 4), low // 4, *_words_of(streams, v))
            _round_powers_tile(x.view(np.uint32), random, coded)
            if row[NEXT] != 0:
                _add_powers(x, coded, f32(-1))
        in_range[v] = largest <= most


@compiled
def decode_powers(outs, wires, plan, weight):
    for v in range(outs.size):
        n = plan[v, SIZE]
        for low in range(0, n, TILE):
            high = min(low + TILE, n)
            out = part(_at(outs[v], n, np.float32), low, high)
            out[:] = 0
            for rank in range(wires.size):
                _add_powers(out, part(_at(wires[rank] + plan[v, FIRST], n, np.uint8), low, high), weight)
