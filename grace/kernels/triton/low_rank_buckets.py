"""PowerSGD's whole buckets: matrices of all shapes in the same launches, each read as often as the method must.

A variable is a matrix M of rows x columns; P is of rows x rank, Q of columns x rank. Programs take tiles of R x C
elements of M. What a tile adds to a product is written beside what the others add, and added up by one more launch, in
one order: nothing is added atomically. P and Q that products are taken with lie transposed, each column padded with
zeros to whole tiles, so that reads of them need no mask. See :mod:`~grace.kernels.triton.bucket_tables` for what a
bucket's table holds; ``shapes`` (int64), which never changes, has a row for each variable, too.
"""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import INF_BITS, MAX_BITS, magnitude_bits
from grace.kernels.triton.bucket_tables import (
    COLUMNS,
    DRAW,
    FACTORS,
    FLOATS,
    GRADIENT,
    KEPT,
    KEY,
    MORE,
    NEXT,
    WIDTH,
    deny,
    wire_at,
)
from grace.kernels.triton.random import philox, uniform, words_at

Q_KEPT, Q_NEXT = MORE, WIDTH
"""Places in a bucket's table of the addresses of the last step's Q, and of where this one's goes; 0 for none."""
ROWS, ACROSS, RANK_OF, P_AT, Q_AT = (tl.constexpr(i) for i in range(5))
"""Rows, columns and rank; where P and Q stand in their wires, in elements."""
LEFT, LEFT_STEP, RIGHT, RIGHT_STEP, P_PARTS, Q_PARTS = (tl.constexpr(i) for i in range(5, 11))
"""Beginnings of the transposed P and Q, and steps from column to column; beginnings of the parts of P and of Q."""
TILES, P_ADDS, Q_ADDS, Q_TILES = (tl.constexpr(i) for i in range(11, 15))
"""The first programs of launches over tiles, parts of P, parts of Q, and rows of Q."""
SHAPE = tl.constexpr(16)
DEPENDENT = tl.constexpr(1e-12)
"""A column of which so much of its squared norm is left, or less, depends on those before it."""


@triton.jit
def place_of(shapes, owners, FIRST_PROGRAM: tl.constexpr):
    """Return this program's variable, its row in ``shapes``, and the program's number among those of the variable
    (int64)."""
    variable = tl.load(owners + tl.program_id(0))
    shape = shapes + variable * SHAPE
    return variable, shape, tl.program_id(0) - tl.load(shape + FIRST_PROGRAM)


@triton.jit
def corner_of(table, shapes, owners, R: tl.constexpr, C: tl.constexpr):
    """Return, for a program's tile: variable, row of the table, row of shapes, first row and column, and True if rows
    begin where wide reads may."""
    variable, shape, program = place_of(shapes, owners, TILES)
    row, columns = table + variable * COLUMNS, tl.load(shape + ACROSS)
    across = (columns + C - 1) // C
    wide = (columns % 4 == 0) & (tl.load(row + FLOATS) != 0)
    return variable, row, shape, program // across * R, program % across * C, wide


@triton.jit
def tile_at(column, shape, top, start, R: tl.constexpr):
    """Return the address of a tile of the matrix that a column of the table locates, and its elements that exist."""
    columns = tl.load(shape + ACROSS)
    down, along = (tl.load(shape + ROWS) - top).to(tl.int32), (columns - start).to(tl.int32)
    return tl.load(column) + 4 * (top * columns + start), columns.to(tl.int32), tl.arange(0, R)[:, None] < down, along


@triton.jit
def read_tile(column, shape, top, start, wide, R: tl.constexpr, C: tl.constexpr):
    """Return a tile; zeros where the matrix ends."""
    address, columns, there, along = tile_at(column, shape, top, start, R)
    pointer = address.to(tl.pointer_type(tl.float32))
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    if wide:  # what is multiplied by 4 is known to be a multiple of it
        place, inside = i * (columns // 4 * 4) + j, there & (j < along // 4 * 4)
        found = tl.load(tl.multiple_of(pointer, 16) + place, mask=inside, other=0.0)
    else:
        found = tl.load(pointer + (i * columns + j), mask=there & (j < along), other=0.0)
    return found


@triton.jit
def write_tile(column, shape, value, top, start, wide, R: tl.constexpr, C: tl.constexpr):
    """Invert :func:`read_tile`."""
    address, columns, there, along = tile_at(column, shape, top, start, R)
    pointer = address.to(tl.pointer_type(tl.float32))
    i, j = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    if wide:
        place, inside = i * (columns // 4 * 4) + j, there & (j < along // 4 * 4)
        tl.store(tl.multiple_of(pointer, 16) + place, value, mask=inside)
    else:
        tl.store(pointer + (i * columns + j), value, mask=there & (j < along))


@triton.jit
def column_of(factors, at, step, k, first, N: tl.constexpr):
    """Return N elements of the k-th column of a transposed factor; ``first`` is a multiple of N."""
    begin = tl.multiple_of(at + k * step + first, 16)
    return tl.load(factors + begin + tl.arange(0, N))


# -- Q to start from ---------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_q(shape, program, J: tl.constexpr, RP: tl.constexpr):
    """Return a program's J rows of Q: their places, the columns', which exist, and the elements' offsets (int64)."""
    j, k, rank = program * J + tl.arange(0, J), tl.arange(0, RP), tl.load(shape + RANK_OF)
    inside = (j < tl.load(shape + ACROSS))[:, None] & (k < rank)[None, :]
    return j, k, inside, j[:, None] * rank + k[None, :]


@triton.jit
def judge_factors(found, table, shapes, owners, most, J: tl.constexpr, RP: tl.constexpr):
    """Mark each column of the last Q that has a number that is not zero, and each that has a number out of range."""
    variable, shape, program = place_of(shapes, owners, Q_TILES)
    _, k, inside, place = rows_of_q(shape, program, J, RP)
    kept = tl.load(table + variable * COLUMNS + Q_KEPT)
    if kept != 0:
        value = tl.load(kept.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
        alive, beyond = tl.where(value == 0, 0, 1), tl.where(tl.abs(value) <= most, 0, 1)
        one, own = tl.full([RP], 1, tl.int32), found + variable * 2 * RP + k
        tl.store(own, one, mask=tl.max(alive, 0) > 0)
        tl.store(own + RP, one, mask=tl.max(beyond, 0) > 0)


@triton.jit(do_not_specialize=("step",))
def start_factors(right, found, table, shapes, owners, step, J: tl.constexpr, RP: tl.constexpr):
    """Write Q, transposed: the last one's columns, and random numbers in place of columns that are zero or out of
    range."""
    variable, shape, program = place_of(shapes, owners, Q_TILES)
    j, k, inside, place = rows_of_q(shape, program, J, RP)
    row, own = table + variable * COLUMNS, found + variable * 2 * RP + k
    kept, value = tl.load(row + Q_KEPT), tl.zeros([J, RP], tl.float32)
    if kept != 0:
        value = tl.load(kept.to(tl.pointer_type(tl.float32)) + place, mask=inside, other=0.0)
    lost = (tl.load(own) == 0) | (tl.load(own + RP) != 0)
    if tl.max((lost & (k < tl.load(shape + RANK_OF))).to(tl.int32), 0) > 0:
        key = tl.load(row + KEY)
        words = words_at(place, key, key >> 32, step, tl.load(row + DRAW))
        value = tl.where(lost[None, :], uniform(words) * 2.0 - 1.0, value)
    target = right + tl.load(shape + RIGHT) + k[None, :] * tl.load(shape + RIGHT_STEP) + j[:, None]
    tl.store(target, value, mask=inside)


# -- products ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("most",))
def multiply_rows(
    flags, found, parts, right, table, shapes, owners, most,
    LOOKS: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write x = a residual + b gradient where the next residual goes, and this tile's part of P = x Q."""
    variable, row, shape, top, start, wide = corner_of(table, shapes, owners, R, C)
    factors = tl.load(row + FACTORS)
    x = read_tile(row + GRADIENT, shape, top, start, wide, R, C)
    x = x * (factors >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if tl.load(row + KEPT) != 0:
        residual = read_tile(row + KEPT, shape, top, start, wide, R, C)
        x = residual * factors.to(tl.int32).to(tl.float32, bitcast=True) + x
    deny(flags, variable, x, most, LOOKS)
    write_tile(row + NEXT, shape, x, top, start, wide, R, C)
    if top + start == 0:  # what was judged has been used
        tl.store(found + variable * 2 * RP + tl.arange(0, 2 * RP), tl.zeros([2 * RP], tl.int32))
    i, rows, rank = top + tl.arange(0, R), tl.load(shape + ROWS), tl.load(shape + RANK_OF)
    own = parts + tl.load(shape + P_PARTS) + start // C * rank * rows + i
    at, step = tl.load(shape + RIGHT), tl.load(shape + RIGHT_STEP)
    for k in tl.static_range(RANK):
        q = column_of(right, at, step, k, start, C)
        tl.store(own + k * rows, tl.sum(x * q[None, :], 1), mask=(i < rows) & (k < rank))


@triton.jit
def multiply_columns(
    parts, left, table, shapes, owners, RANK: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Write a tile's part of Q = x^T P."""
    _, row, shape, top, start, wide = corner_of(table, shapes, owners, R, C)
    x = read_tile(row + NEXT, shape, top, start, wide, R, C)
    j, columns, rank = start + tl.arange(0, C), tl.load(shape + ACROSS), tl.load(shape + RANK_OF)
    own = parts + tl.load(shape + Q_PARTS) + top // R * rank * columns + j
    at, step = tl.load(shape + LEFT), tl.load(shape + LEFT_STEP)
    for k in tl.static_range(RANK):
        p = column_of(left, at, step, k, top, R)
        tl.store(own + k * columns, tl.sum(x * p[:, None], 0), mask=(j < columns) & (k < rank))


@triton.jit
def added(parts, length, tiles, f, inside, N: tl.constexpr, T: tl.constexpr):
    """Return the sums of N elements over tiles, T at a time."""
    total = tl.zeros([N], tl.float32)
    for low in range(0, tiles, T):
        t = low + tl.arange(0, T)
        there = (t < tiles)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + t[:, None] * length + f[None, :], mask=there, other=0.0), 0)
    return total


@triton.jit(do_not_specialize=("variables",))
def add_rows(
    flags, parts, table, shapes, owners, variables,
    LOOKS: tl.constexpr, C: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write P into its wire, as the sum of the tiles' parts."""
    variable, shape, program = place_of(shapes, owners, P_ADDS)
    f, rows, rank = program * N + tl.arange(0, N), tl.load(shape + ROWS), tl.load(shape + RANK_OF)
    inside, tiles = f < rows * rank, (tl.load(shape + ACROSS) + C - 1) // C
    p = added(parts + tl.load(shape + P_PARTS), rows * rank, tiles, f, inside, N, T)
    deny(flags, variable, p, MAX_BITS, LOOKS)
    wire = wire_at(table, variables, 0).to(tl.pointer_type(tl.float32)) + tl.load(shape + P_AT)
    tl.store(wire + f % rows * rank + f // rows, p, mask=inside)


@triton.jit(do_not_specialize=("offset", "size"))
def add_columns(wire, parts, shapes, owners, marks, offset, size, R: tl.constexpr, N: tl.constexpr, T: tl.constexpr):
    """Write Q into its wire, and the header at the end: ``size`` numbers behind ``offset`` elements."""
    _, shape, program = place_of(shapes, owners, Q_ADDS)
    f, columns, rank = program * N + tl.arange(0, N), tl.load(shape + ACROSS), tl.load(shape + RANK_OF)
    inside, tiles = f < columns * rank, (tl.load(shape + ROWS) + R - 1) // R
    q = added(parts + tl.load(shape + Q_PARTS), columns * rank, tiles, f, inside, N, T)
    tl.store(wire + tl.load(shape + Q_AT) + f % columns * rank + f // columns, q, mask=inside)
    if tl.program_id(0) == 0:
        for low in range(0, size, N):
            place = low + tl.arange(0, N)
            tl.store(wire + offset + place, tl.load(marks + place, mask=place < size), mask=place < size)


# -- P of all ranks ----------------------------------------------------------------------------------------------------


@triton.jit
def mean_rows(sums, low, rows, rank, count, lost, ROWS_: tl.constexpr, RP: tl.constexpr):
    """Return rows of the mean P, with columns of numbers without any pattern in place of lost ones."""
    i, k = low + tl.arange(0, ROWS_), tl.arange(0, RP)
    inside = (i < rows)[:, None] & (k < rank)[None, :]
    p = tl.load(sums + i[:, None] * rank + k[None, :], mask=inside, other=0.0)
    p = tl.div_rn(p, tl.zeros([ROWS_, RP], tl.float32) + count)
    if tl.max(lost, 0) > 0:
        zero = tl.zeros([ROWS_, RP], tl.uint32)
        key, place = tl.full([], 0, tl.uint32), zero + i.to(tl.uint32)[:, None]
        a, _, _, _ = philox(place, zero + k.to(tl.uint32)[None, :], zero, zero, key, key)
        p = tl.where((lost > 0)[None, :] & inside, uniform(a) * 2.0 - 1.0, p)
    return p


@triton.jit
def squares(p):
    """Return the products of every two numbers of each row, in float64."""
    wide = p.to(tl.float64)
    return wide[:, :, None] * wide[:, None, :]


@triton.jit
def combined(p, factor):
    """Return P times a small matrix, in float64, rounded once."""
    return tl.sum(p.to(tl.float64)[:, :, None] * factor[None, :, :], 1).to(tl.float32)


@triton.jit
def orthogonal(gram, rank, RP: tl.constexpr):
    """Return T such that the columns of P T are orthonormal, from P^T P, by Gram and Schmidt; and the columns that
    depend on those before them, or have NaN: theirs in T are zeros."""
    place = tl.arange(0, RP)
    found, lost = tl.zeros([RP, RP], tl.float64), tl.zeros([RP], tl.int32)
    for k in range(RP):
        at = place == k
        products = tl.sum(tl.where(at[None, :], gram, 0.0), 1)
        square = tl.sum(tl.where(at, products, 0.0), 0)
        along = tl.sum(tl.where(found != 0, found * products[:, None], 0.0), 0)
        rest = tl.where(at, 1.0, 0.0) - tl.sum(found * along[None, :], 1)
        left = tl.zeros([RP], tl.float64) + (square - tl.sum(along * along, 0))
        enough = left > square * DEPENDENT  # not of NaN
        rest, here = rest / tl.sqrt(tl.where(enough, left, 1.0)), at & (place < rank)
        found = tl.where((here & enough)[None, :], rest[:, None], found)
        lost = tl.where(here, tl.where(enough, 0, 1), lost)
    return found, lost


@triton.jit(do_not_specialize=("variables",))
def orthogonalize_bucket(
    finite, left, sums, shapes, count, variables, ROWS_: tl.constexpr, RP: tl.constexpr
):  # fmt: skip
    """Write orthonormal columns that span those of each variable's mean P, transposed; 1.0 if all sums are finite, and
    1.0 for the sums of Q, which come later. Twice in float64, so that they are orthonormal to float32 rounding."""
    variable = tl.program_id(0)
    shape = shapes + variable * SHAPE
    rows, rank, own = tl.load(shape + ROWS), tl.load(shape + RANK_OF), sums + tl.load(shape + P_AT)
    lost, largest = tl.zeros([RP], tl.int32), tl.full([], 0, tl.int32)
    gram = tl.zeros([ROWS_, RP, RP], tl.float64)
    for low in range(0, rows, ROWS_):
        p = mean_rows(own, low, rows, rank, count, lost, ROWS_, RP)
        largest = tl.maximum(largest, tl.max(magnitude_bits(p)))
        gram += squares(p)
    tl.store(finite + variable, tl.where(largest < INF_BITS, 1.0, 0.0))
    tl.store(finite + variables + variable, 1.0)
    first, lost = orthogonal(tl.sum(gram, 0), rank, RP)
    if tl.max(lost, 0) > 0:
        gram = tl.zeros([ROWS_, RP, RP], tl.float64)
        for low in range(0, rows, ROWS_):
            gram += squares(mean_rows(own, low, rows, rank, count, lost, ROWS_, RP))
        first, _ = orthogonal(tl.sum(gram, 0), rank, RP)
    gram = tl.zeros([ROWS_, RP, RP], tl.float64)
    for low in range(0, rows, ROWS_):
        p = combined(mean_rows(own, low, rows, rank, count, lost, ROWS_, RP), first)
        gram += squares(p)
    second, _ = orthogonal(tl.sum(gram, 0), rank, RP)
    k = tl.arange(0, RP)
    target = left + tl.load(shape + LEFT) + k[None, :] * tl.load(shape + LEFT_STEP)
    for low in range(0, rows, ROWS_):
        p = combined(mean_rows(own, low, rows, rank, count, lost, ROWS_, RP), first)
        i = low + tl.arange(0, ROWS_)
        inside = (i < rows)[:, None] & (k < rank)[None, :]
        tl.store(target + i[:, None], combined(p, second), mask=inside)


# -- Q of all ranks, and the mean --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("variables",))
def take_factors(finite, right, sums, table, shapes, owners, count, variables, J: tl.constexpr, RP: tl.constexpr):
    """Write the mean Q, transposed, and for the start of the next step; 0.0 where a sum is not finite."""
    variable, shape, program = place_of(shapes, owners, Q_TILES)
    j, k, inside, place = rows_of_q(shape, program, J, RP)
    q = tl.load(sums + tl.load(shape + Q_AT) + place, mask=inside, other=0.0)
    q = tl.div_rn(q, tl.zeros([J, RP], tl.float32) + count)
    if tl.max(magnitude_bits(q)) >= INF_BITS:
        tl.store(finite + variables + variable, 0.0)
    target = right + tl.load(shape + RIGHT) + k[None, :] * tl.load(shape + RIGHT_STEP) + j[:, None]
    tl.store(target, q, mask=inside)
    tl.store(tl.load(table + variable * COLUMNS + Q_NEXT).to(tl.pointer_type(tl.float32)) + place, q, mask=inside)


@triton.jit
def decode_products(left, right, table, shapes, owners, R: tl.constexpr, C: tl.constexpr):
    """Write P Q^T, and x - P Q^T in place of x."""
    _, row, shape, top, start, wide = corner_of(table, shapes, owners, R, C)
    p_at, p_step = tl.load(shape + LEFT), tl.load(shape + LEFT_STEP)
    q_at, q_step = tl.load(shape + RIGHT), tl.load(shape + RIGHT_STEP)
    mean = tl.zeros([R, C], tl.float32)
    for k in range(tl.load(shape + RANK_OF)):
        p, q = column_of(left, p_at, p_step, k, top, R), column_of(right, q_at, q_step, k, start, C)
        mean += p[:, None] * q[None, :]
    x = read_tile(row + NEXT, shape, top, start, wide, R, C)
    write_tile(row + GRADIENT, shape, mean, top, start, wide, R, C)
    write_tile(row + NEXT, shape, x - mean, top, start, wide, R, C)
