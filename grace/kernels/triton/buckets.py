"""Codecs of a whole bucket as single launches: gradients and residuals in, bytes on the wire out, and back.

See :class:`~grace.kernels.bucket_codec.BucketCodec` for what they compute, and
:mod:`grace.kernels.triton.bucket_tables` for what they are told. Signs do not depend on their scale, which is known
only when all of x was read: so x itself is kept, the scales beside it, and whoever reads the residual subtracts.
"""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import INF_BITS, narrowed_to, widened
from grace.kernels.triton.bucket_tables import (
    COLUMNS,
    DRAW,
    FIRST,
    GRADIENT,
    KEPT,
    KEY,
    NEXT,
    NEXT_SIDES,
    SECOND,
    SIZE,
    START,
    compensated,
    deny,
    finished_residual,
    floats,
    locate,
    part,
    read,
    wire_at,
    write,
    write_floats,
    write_header_part,
)
from grace.kernels.triton.packing import byte_of_codes, codes_of_byte
from grace.kernels.triton.random import row_of_words
from grace.kernels.triton.rounding import power_of, powers_rounded

# -- numbers -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("variables", "most"))
def encode_numbers(
    flags, table, owners, variables, most,
    KEEPS: tl.constexpr, LOOKS: tl.constexpr, Type: tl.constexpr, BYTES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write float32 or 16 bits, of BYTES bytes."""
    variable, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    narrow = narrowed_to(x, Type)
    back = widened(narrow)
    deny(flags, variable, x, most, LOOKS)
    deny(flags, variable, back, INF_BITS - 1, LOOKS)  # a number in range may round to Inf
    target = wire_at(table, variables, 0) + tl.load(row + FIRST) + BYTES * base
    if tl.bfloat16 == Type:
        write(target, narrow.to(tl.uint16, bitcast=True), aligned, place, inside, tl.uint16)
    else:
        write(target, narrow, aligned, place, inside, Type)
    if KEEPS:
        write_floats(row + NEXT, x - back, base, wide, place, inside)


@triton.jit
def numbers_at(address, wide, place, inside, Type: tl.constexpr):
    """Return the numbers that :func:`encode_numbers` wrote, as float32."""
    if tl.bfloat16 == Type:
        found = (read(address, wide, place, inside, tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        found = read(address, wide, place, inside, Type).to(tl.float32)
    return found


@triton.jit(do_not_specialize=("variables",))
def decode_numbers(
    table, owners, variables, ranks, weight, count, Type: tl.constexpr, BYTES: tl.constexpr, N: tl.constexpr
):
    """Write the mean of the ranks whose sum one wire is, or of the wires of several ranks."""
    _, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    offset, by = tl.load(row + FIRST) + BYTES * base, tl.full([N], 0, tl.float32) + count
    if ranks == 1:
        mean = tl.div_rn(numbers_at(wire_at(table, variables, 0) + offset, aligned, place, inside, Type), by)
    else:
        mean = tl.zeros([N], tl.float32)
        for rank in range(ranks):
            mean += numbers_at(wire_at(table, variables, rank) + offset, aligned, place, inside, Type) * weight
        if tl.float32 == Type:
            mean = tl.div_rn(mean, by)
    write_floats(row + GRADIENT, mean, base, wide, place, inside)


# -- signs -------------------------------------------------------------------------------------------------------------

SCALED, SIDED, VOTED, MOMENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Values of a bit: the mean magnitude, the mean of its side, or a vote; of a moment, which is kept as it is."""


@triton.jit(do_not_specialize=("variables", "most"))
def encode_signs(
    flags, parts, counts, table, owners, variables, most, FORM: tl.constexpr, KEEPS: tl.constexpr, N: tl.constexpr
):
    """Write bits of votes; or bits, and each program's sums in float64 from which scales are made: then x itself is
    kept."""
    variable, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    given = floats(row + GRADIENT, base, wide, place, inside)
    x = compensated(row, given, base, wide, place, inside, KEEPS, FORM < VOTED)
    deny(flags, variable, given if FORM == MOMENT else x, most, True)
    upper = inside & (x >= 0)
    target = wire_at(table, variables, 0) + tl.load(row + FIRST) + base // 8
    byte = tl.arange(0, N // 8)
    write(target, byte_of_codes(upper, 1, N), aligned, byte, byte * 8 < tl.load(row + SIZE) - base, tl.uint8, 4)
    if FORM == SCALED:
        tl.store(parts + tl.program_id(0), tl.sum(tl.abs(x.to(tl.float64)), 0))
    elif FORM == SIDED:
        tl.store(parts + 2 * tl.program_id(0), tl.sum(tl.where(upper, 0.0, x.to(tl.float64)), 0))
        tl.store(parts + 2 * tl.program_id(0) + 1, tl.sum(tl.where(upper, x.to(tl.float64), 0.0), 0))
        tl.store(counts + tl.program_id(0), tl.sum(upper.to(tl.int32), 0))
    if KEEPS:
        write_floats(row + NEXT, x - tl.where(upper, 1.0, -1.0) if FORM == VOTED else x, base, wide, place, inside)


@triton.jit(do_not_specialize=("variables", "pieces", "received", "size"))
def write_sign_scales(
    flags, in_range, marks, parts, counts, table, variables, pieces, received, size, overflow,
    FORM: tl.constexpr, KEEPS: tl.constexpr, PART: tl.constexpr, Type: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the scales of one variable, from its programs' sums, into the wire and beside x, and the variable's
    status."""
    variable = tl.program_id(0)
    row = table + variable * COLUMNS
    n, first = tl.load(row + SIZE), tl.load(row + START)
    lower, upper, many = tl.zeros([N], tl.float64), tl.zeros([N], tl.float64), tl.zeros([N], tl.int64)
    for low in range(0, (n + PART - 1) // PART, N):
        place = low + tl.arange(0, N)
        inside = place * PART < n
        if FORM == SCALED:
            upper += tl.load(parts + first + place, mask=inside, other=0)
        else:
            lower += tl.load(parts + 2 * (first + place), mask=inside, other=0)
            upper += tl.load(parts + 2 * (first + place) + 1, mask=inside, other=0)
            many += tl.load(counts + first + place, mask=inside, other=0)
    scale = (wire_at(table, variables, 0) + tl.load(row + SECOND)).to(tl.pointer_type(tl.float32))
    if FORM == SCALED:
        one = (tl.sum(upper, 0) / tl.maximum(n, 1).to(tl.float64)).to(tl.float32)
        other = -one
        tl.store(scale, one)
    else:
        above = tl.sum(many, 0)
        below = n - above
        other = (tl.sum(lower, 0) / tl.maximum(below, 1).to(tl.float64)).to(tl.float32)
        one = (tl.sum(upper, 0) / tl.maximum(above, 1).to(tl.float64)).to(tl.float32)
        tl.store(scale, other)
        tl.store(scale + 1, one)
    if KEEPS:
        sides = tl.load(row + NEXT_SIDES).to(tl.pointer_type(tl.float32))
        tl.store(sides, other)
        tl.store(sides + 1, one)
    write_header_part(flags, in_range, marks, table, variables, variable, pieces, received, size, overflow, Type)


@triton.jit
def sides_at(address, FORM: tl.constexpr):
    """Return the values of a set bit and of another: scales at an address, or votes."""
    if FORM == SCALED:
        one = tl.load(address.to(tl.pointer_type(tl.float32)))
        other = -one
    elif FORM == SIDED:
        means = address.to(tl.pointer_type(tl.float32))
        other, one = tl.load(means), tl.load(means + 1)
    else:
        one, other = tl.full([], 1.0, tl.float32), tl.full([], -1.0, tl.float32)
    return one, other


@triton.jit
def subtract_signs(table, owners, N: tl.constexpr):
    """Write x - C(x) in place of x."""
    _, row, program = locate(table, owners)
    base, place, inside, wide, _ = part(row, program, N)
    x = floats(row + KEPT, base, wide, place, inside)
    write_floats(row + KEPT, finished_residual(row, x), base, wide, place, inside)


@triton.jit(do_not_specialize=("variables",))
def decode_signs(table, owners, variables, ranks, weight, unit, FORM: tl.constexpr, N: tl.constexpr):
    """Write the mean of scaled signs; of votes the sign of their sum, times ``unit``."""
    _, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    byte = tl.arange(0, N // 8)
    there = byte * 8 < tl.load(row + SIZE) - base
    total = tl.zeros([N], tl.float32)
    for rank in range(ranks):
        wire = wire_at(table, variables, rank)
        packed = read(wire + tl.load(row + FIRST) + base // 8, aligned, byte, there, tl.uint8, 4)
        one, other = sides_at(wire + tl.load(row + SECOND), FORM)
        if FORM < VOTED:
            one, other = weight * one, weight * other
        total += tl.where(codes_of_byte(packed, 1, N) == 1, one, other)
    if FORM >= VOTED:
        total = tl.where(total >= 0, unit, -unit)
    write_floats(row + GRADIENT, total, base, wide, place, inside)


# -- powers of two -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("variables", "most", "step"))
def encode_powers(
    flags, table, owners, variables, most, step, KEEPS: tl.constexpr, LOOKS: tl.constexpr, N: tl.constexpr
):
    variable, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    deny(flags, variable, x, most, LOOKS)
    key = tl.load(row + KEY)
    code = powers_rounded(x, row_of_words(base, key, key >> 32, step, tl.load(row + DRAW), N))
    target = wire_at(table, variables, 0) + tl.load(row + FIRST) + base
    write(target, code, aligned, place, inside, tl.uint8, 4)
    if KEEPS:
        write_floats(row + NEXT, x - power_of(code), base, wide, place, inside)


@triton.jit(do_not_specialize=("variables",))
def decode_powers(table, owners, variables, ranks, weight, N: tl.constexpr):
    _, row, program = locate(table, owners)
    base, place, inside, wide, aligned = part(row, program, N)
    mean = tl.zeros([N], tl.float32)
    for rank in range(ranks):
        source = wire_at(table, variables, rank) + tl.load(row + FIRST) + base
        mean += power_of(read(source, aligned, place, inside, tl.uint8, 4)) * weight
    write_floats(row + GRADIENT, mean, base, wide, place, inside)
