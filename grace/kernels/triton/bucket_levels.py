"""Codecs of a whole bucket that round to levels, 8-bit floats or a table's values; see
:mod:`grace.kernels.triton.buckets`, whose kernels these are like.

Where a program can read a bucket of elements at once, one launch finds scales and rounds. Else a first one finds parts
of scales, a second one scales, and a third one rounds.
"""

import triton
import triton.language as tl

from grace.kernels.constants import EQUAL_DEVIATION
from grace.kernels.triton.arithmetic import MAX, finite_scale, magnitude_bits
from grace.kernels.triton.bucket_tables import (
    CODES,
    COLUMNS,
    DRAW,
    FIRST,
    FLOATS,
    FOLDED,
    GRADIENT,
    JOINED,
    KEY,
    NEXT,
    SECOND,
    SIZE,
    compensated,
    deny,
    floats,
    locate,
    part,
    read,
    wire_at,
    write,
    write_floats,
    write_header_part,
)
from grace.kernels.triton.packing import byte_of_codes, code_at, codes_of_byte, steps_below
from grace.kernels.triton.random import row_of_words, rows_of_words, uniform
from grace.kernels.triton.rounding import (
    FLOAT8,
    LEVELS_BY_NORM,
    ROTATED_ROW,
    float8_of,
    norm_of,
    rounded,
    square_sums,
    turned_rows,
)

TABLE, TERNARY = tl.constexpr(3), tl.constexpr(4)
"""More of what is rounded to, beside :mod:`grace.kernels.triton.rounding`'s: a table's values, and three levels of what
is clipped to some standard deviations."""
_EQUAL_DEVIATION = tl.constexpr(EQUAL_DEVIATION)


@triton.jit
def write_codes(target, code, aligned, place, inside, left, BITS: tl.constexpr, N: tl.constexpr):
    """Write codes, packed if they take fewer than 8 bits; those of a part that begins with a byte one behind the
    other."""
    if BITS == 8:
        write(target, code, aligned, place, inside, tl.uint8, 4)
    else:
        code = tl.reshape(tl.where(inside, code, 0), [N])  # unused bits of the last byte are zero
        if 8 % BITS == 0:
            byte = tl.arange(0, N * BITS // 8)
            write(target, byte_of_codes(code, BITS, N), aligned, byte, byte * (8 // BITS) < left, tl.uint8, 4)
        else:
            group, lane = tl.arange(0, N // 8), tl.arange(0, 8)
            word = tl.sum(tl.reshape(code.to(tl.int64), [N // 8, 8]) << (lane * BITS).to(tl.int64)[None, :], 1)
            byte = group[:, None] * BITS + lane[None, :]
            there = (lane < BITS)[None, :] & (byte * 8 < left * BITS)
            packed = (word[:, None] >> (lane * 8).to(tl.int64)[None, :]).to(tl.uint8)
            tl.store(target.to(tl.pointer_type(tl.uint8)) + byte, packed, mask=there)


@triton.jit
def read_codes(source, aligned, place, inside, left, BITS: tl.constexpr, N: tl.constexpr):
    """Invert :func:`write_codes`, as int32."""
    if BITS == 8:
        return read(source, aligned, place, inside, tl.uint8, 4).to(tl.int32)
    if 8 % BITS == 0:
        byte = tl.arange(0, N * BITS // 8)
        return codes_of_byte(read(source, aligned, byte, byte * (8 // BITS) < left, tl.uint8, 4), BITS, N)
    return code_at(source.to(tl.pointer_type(tl.uint8)), place, inside, (left * BITS + 7) // 8, BITS)


@triton.jit
def dequantized(code, scale, levels, entries, FORM: tl.constexpr):
    """Return the values of codes times a scale."""
    if FORM == TABLE:
        return tl.load(entries + code.to(tl.int32)) * scale
    if FORM == FLOAT8:
        return scale * float8_of(code.to(tl.int32))
    # Triton's own division may be less exact than IEEE's.
    return scale * tl.div_rn(code.to(tl.float32) - levels, tl.zeros_like(scale) + levels)


@triton.jit
def residual_of(x, code, scale, levels, entries, whole, FORM: tl.constexpr, ROTATED: tl.constexpr, N: tl.constexpr):
    """Return x - C(x)."""
    if ROTATED:
        # 0.0 + makes 0 of -0, as the sum with zeros does when variables are decoded one by one.
        back = tl.reshape(0.0 + dequantized(code, scale, levels, entries, FORM), [N])
        return x - tl.reshape(turned_rows(back, tl.reshape(whole, [N]), N), x.shape)
    return x - dequantized(code, scale, levels, entries, FORM)


@triton.jit(do_not_specialize=("variables", "most", "step"))
def encode_rows(
    flags, table, owners, variables, most, step, levels,
    FORM: tl.constexpr, REACH: tl.constexpr, DRAWN: tl.constexpr, ROTATED: tl.constexpr, BITS: tl.constexpr,
    WRITES: tl.constexpr, KEEPS: tl.constexpr, BUCKET: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the scales of ROWS buckets of at most COLS elements and, if these follow each other, their codes."""
    variable = tl.load(owners + tl.program_id(0))
    row = table + variable * COLUMNS
    n, first = tl.load(row + SIZE), (tl.program_id(0) - tl.load(row + FOLDED)) * ROWS
    base, line, column = first * BUCKET, tl.arange(0, ROWS), tl.arange(0, COLS)
    place = line[:, None] * BUCKET + column[None, :]
    inside = (column < BUCKET)[None, :] & (place < n - base)
    whole = (n - base >= ROWS * COLS) & (BUCKET == COLS)
    wide = whole & (tl.load(row + FLOATS) != 0)
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    deny(flags, variable, x, most, True)
    all_of: tl.constexpr = ROWS * COLS
    y, turns = x, place < n // ROTATED_ROW * ROTATED_ROW - base
    if ROTATED:
        y = tl.reshape(turned_rows(tl.reshape(x, [all_of]), tl.reshape(turns, [all_of]), all_of), [ROWS, COLS])
    if FORM == LEVELS_BY_NORM:
        scale = norm_of(square_sums(y), tl.minimum(n - base - line * BUCKET, BUCKET), REACH)
    else:
        scale = finite_scale(tl.max(magnitude_bits(y), 1))
    wire = wire_at(table, variables, 0)
    scales = (wire + tl.load(row + SECOND)).to(tl.pointer_type(tl.float32)) + first
    tl.store(scales + line, scale, mask=line < (n - base + BUCKET - 1) // BUCKET)
    if WRITES:
        offset = tl.full([ROWS, COLS], 0.5, tl.float32)
        if DRAWN:
            key, draw = tl.load(row + KEY), tl.load(row + DRAW)
            starts = (first + line) * BUCKET
            offset = uniform(rows_of_words(starts, key, key >> 32, step, draw, ROWS, COLS, BUCKET % 4 == 0))
        scale = tl.broadcast_to(scale[:, None], [ROWS, COLS])
        code = rounded(y, scale, offset, levels, FORM)
        aligned = whole & (tl.load(row + CODES) != 0)
        write_codes(
            wire + tl.load(row + FIRST) + base * BITS // 8, code, aligned, place, inside, n - base, BITS, all_of
        )
        if KEEPS:
            rest = residual_of(x, code, scale, levels, flags, turns, FORM, ROTATED, all_of)
            write_floats(row + NEXT, rest, base, wide, place, inside)


@triton.jit(do_not_specialize=("variables", "most", "bucket"))
def fold_buckets(
    flags, parts, table, owners, variables, most, bucket,
    FORM: tl.constexpr, ROTATED: tl.constexpr, FOURS: tl.constexpr, KEEPS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write each program's part of the scale of a bucket that takes many: its largest magnitude (as its bits) or sum of
    squares; or its sum, sum of squares about its own mean, and largest magnitude."""
    variable = tl.load(owners + tl.program_id(0))
    row = table + variable * COLUMNS
    n, program = tl.load(row + SIZE), tl.program_id(0) - tl.load(row + FOLDED)
    size = tl.minimum(bucket, n)
    shares = (size + N - 1) // N
    start = program % shares * N
    base, place = program // shares * size + start, tl.arange(0, N)
    left = tl.minimum(size - start, n - base)
    inside, wide = place < left, (left >= N) & (tl.load(row + FLOATS) != 0) & FOURS
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    deny(flags, variable, x, most, True)
    if ROTATED:
        x = turned_rows(x, place < n // ROTATED_ROW * ROTATED_ROW - base, N)
    if FORM == LEVELS_BY_NORM:
        tl.store(parts + tl.program_id(0), tl.sum(x.to(tl.float64) * x.to(tl.float64), 0))
    elif FORM == TERNARY:
        total = tl.sum(x.to(tl.float64), 0)
        apart = tl.where(inside, x.to(tl.float64) - total / tl.minimum(left, N).to(tl.float64), 0.0)
        tl.store(parts + 3 * tl.program_id(0), total)
        tl.store(parts + 3 * tl.program_id(0) + 1, tl.sum(apart * apart, 0))
        tl.store(parts + 3 * tl.program_id(0) + 2, tl.max(magnitude_bits(x), 0).to(tl.float64))
    else:
        tl.store(parts + tl.program_id(0), tl.max(magnitude_bits(x), 0).to(tl.float64))


@triton.jit
def clipped_to(parts, shares, n, factor, PART: tl.constexpr, N: tl.constexpr):
    """Return ``factor`` standard deviations, or the largest number if there are none."""
    totals = tl.zeros([N], tl.float64)
    for low in range(0, shares, N):
        place = low + tl.arange(0, N)
        totals += tl.load(parts + 3 * place, mask=place < shares, other=0)
    mean = tl.sum(totals, 0) / n.to(tl.float64)
    squares = tl.zeros([N], tl.float64)
    for low in range(0, shares, N):
        place = low + tl.arange(0, N)
        many = tl.minimum(n - place * PART, PART).to(tl.float64)
        apart = tl.load(parts + 3 * place, mask=place < shares, other=0) / many - mean
        squares += tl.load(parts + 3 * place + 1, mask=place < shares, other=0)
        squares += tl.where(place < shares, many * apart * apart, 0.0)
    deviation = tl.sqrt(tl.sum(squares, 0) / n.to(tl.float64))
    limit = deviation * factor
    limit = tl.where(limit > MAX, MAX, limit).to(tl.float32)
    return tl.where(deviation > tl.abs(mean) * _EQUAL_DEVIATION, limit, MAX)


@triton.jit(do_not_specialize=("variables", "pieces", "received", "size", "bucket"))
def write_scales(
    flags, in_range, marks, limits, parts, table, owners, variables, pieces, received, size, overflow, bucket, factor,
    FORM: tl.constexpr, REACH: tl.constexpr, PART: tl.constexpr, Type: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the scale of a bucket from its programs' parts. A variable's first program writes the variable's status."""
    variable = tl.load(owners + tl.program_id(0))
    row = table + variable * COLUMNS
    n, place = tl.load(row + SIZE), tl.program_id(0) - tl.load(row + JOINED)
    shares = (tl.minimum(bucket, n) + PART - 1) // PART
    first = tl.load(row + FOLDED) + place * shares
    lanes, step = tl.arange(0, N), 1
    if FORM == TERNARY:
        first, step = first * 3 + 2, 3
    found = tl.zeros([N], tl.float64)
    for low in range(0, shares, N):
        there = (low + lanes < shares) & (place * bucket < n)
        more = tl.load(parts + first + (low + lanes) * step, mask=there, other=0)
        if FORM == LEVELS_BY_NORM:
            found += more
        else:
            found = tl.maximum(found, more)
    if FORM == LEVELS_BY_NORM:
        scale = norm_of(tl.sum(found, 0), tl.minimum(n - place * bucket, bucket), REACH)
    else:
        largest = tl.max(found, 0).to(tl.int32)
        if FORM == TERNARY:
            limit = clipped_to(parts + first - 2, shares, n, factor, PART, N)
            tl.store(limits + variable, limit)
            largest = tl.minimum(largest, limit.to(tl.int32, bitcast=True))
        scale = finite_scale(largest)
    scales = (wire_at(table, variables, 0) + tl.load(row + SECOND)).to(tl.pointer_type(tl.float32))
    tl.store(scales + place, scale, mask=(place * bucket < n) | (FORM == TABLE))
    if place == 0:
        write_header_part(flags, in_range, marks, table, variables, variable, pieces, received, size, overflow, Type)


@triton.jit
def scales_of(address, base, place, inside, BUCKET: tl.constexpr, N: tl.constexpr):
    """Return the scale of each element; BUCKET is 0 if all have one."""
    pointer = address.to(tl.pointer_type(tl.float32))
    if BUCKET == 0:
        scale = tl.zeros([N], tl.float32) + tl.load(pointer)
    else:
        first = base // BUCKET
        rest = (base - first * BUCKET).to(tl.int32)
        scale = tl.load(pointer + first + (rest + place) // BUCKET, mask=inside, other=0)
    return scale


@triton.jit(do_not_specialize=("variables", "step"))
def encode_scaled(
    table, owners, variables, step, levels, limits, edges, count, entries,
    FORM: tl.constexpr, DRAWN: tl.constexpr, ROTATED: tl.constexpr, BITS: tl.constexpr, KEEPS: tl.constexpr,
    BUCKET: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write codes of buckets whose scales are in the wire."""
    variable, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    left = tl.load(row + SIZE) - base
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    y, turns = x, place < tl.load(row + SIZE) // ROTATED_ROW * ROTATED_ROW - base
    if ROTATED:
        y = turned_rows(x, turns, N)
    wire = wire_at(table, variables, 0)
    scale = scales_of(wire + tl.load(row + SECOND), base, place, inside, BUCKET, N)
    if FORM == TABLE:
        code = steps_below(tl.div_rn(y, tl.where(scale > 0, scale, 1.0)), inside, edges, count, N).to(tl.uint8)
    else:
        if FORM == TERNARY:
            most = tl.load(limits + variable)
            y = tl.where(y > most, most, tl.where(y < -most, -most, y))
        offset = tl.full([N], 0.5, tl.float32)
        if DRAWN:
            key = tl.load(row + KEY)
            offset = uniform(row_of_words(base, key, key >> 32, step, tl.load(row + DRAW), N))
        code = rounded(y, scale, offset, levels, FORM)
    write_codes(wire + tl.load(row + FIRST) + base * BITS // 8, code, aligned, place, inside, left, BITS, N)
    if KEEPS:
        rest = residual_of(x, code, scale, levels, entries, turns, FORM, ROTATED, N)
        write_floats(row + NEXT, rest, base, wide, place, inside)


@triton.jit(do_not_specialize=("variables",))
def decode_levels(
    table, owners, variables, ranks, weight, levels, entries,
    FORM: tl.constexpr, ROTATED: tl.constexpr, BITS: tl.constexpr, BUCKET: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    _, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    left = tl.load(row + SIZE) - base
    turns = place < tl.load(row + SIZE) // ROTATED_ROW * ROTATED_ROW - base
    mean = tl.zeros([N], tl.float32)
    for rank in range(ranks):
        wire = wire_at(table, variables, rank)
        code = read_codes(wire + tl.load(row + FIRST) + base * BITS // 8, aligned, place, inside, left, BITS, N)
        scale = scales_of(wire + tl.load(row + SECOND), base, place, inside, BUCKET, N)
        if ROTATED:
            mean += turned_rows(0.0 + dequantized(code, scale, levels, entries, FORM), turns, N) * weight
        else:
            mean += dequantized(code, scale * weight, levels, entries, FORM)
    write_floats(row + GRADIENT, mean, base, wide, place, inside)
