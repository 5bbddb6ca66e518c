"""Table of addresses that kernels of whole buckets share, and their reads and writes.

A bucket's table (int64) has a row for each of its variables, and behind the rows the addresses of wires, or of one and
of its headers (:func:`write_statuses`). Where variables are cut into pieces, these have rows, the first pieces of all
variables first. Each program works on a part of one variable, which ``owners`` names (int32, one a program). Whole
parts at addresses that are multiples of 16 are read and written 16 bytes at a time; the ends of variables, and parts at
other addresses, element by element.
"""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import magnitude_bits

GRADIENT, KEPT, NEXT, SIZE, FIRST, SECOND, MORE = (tl.constexpr(i) for i in range(7))
"""Addresses of x's parts (to decode: where the mean goes), elements, byte offsets of the payload's tensors in a wire,
and a number of the method's."""
START, FACTORS, KEY, DRAW, FLOATS, CODES, WIDTH = (tl.constexpr(i) for i in range(7, 14))
"""First program; a and b; words of random numbers; 1 if all floats, and 1 if the first tensor of the payload in all
wires, begin where wide reads may; and bytes of a position."""
FOLDED, JOINED = tl.constexpr(14), tl.constexpr(15)
"""First programs of launches that work on other parts."""
KEPT_SIDES, NEXT_SIDES = FOLDED, JOINED
"""Addresses of the values still to be subtracted from residuals, for signs, which have no such launches."""
COUNT = FOLDED
"""Byte offset in a wire of the number of entries above a threshold, for threshold, which has no such launches."""
SCALE = FOLDED
"""Factor that receivers multiply values by, a float32's bits, for random-k, which has no such launches."""
COLUMNS = tl.constexpr(16)


@triton.jit
def locate(table, owners):
    """Return this program's variable, its row, and the program's number among those of the variable (int64)."""
    variable = tl.load(owners + tl.program_id(0))
    row = table + variable * COLUMNS
    return variable, row, tl.program_id(0) - tl.load(row + START)


@triton.jit
def wire_at(table, variables, rank):
    """Return the address of a wire."""
    return tl.load(table + variables * COLUMNS + rank)


@triton.jit
def part(row, program, N: tl.constexpr):
    """Return a program's part of a variable: the first element, and which of the N from there on exist (int32 places);
    True if floats, and if the payload's first tensor, may be read wide."""
    base, place = program * N, tl.arange(0, N)
    left = tl.load(row + SIZE) - base
    whole = left >= N
    return base, place, place < left, whole & (tl.load(row + FLOATS) != 0), whole & (tl.load(row + CODES) != 0)


@triton.jit
def read(address, wide, place, inside, Type: tl.constexpr, BYTES: tl.constexpr = 16):
    """Return elements behind an address; wide: all of them exist, and it is a multiple of BYTES."""
    pointer = address.to(tl.pointer_type(Type))
    if wide:
        found = tl.load(tl.multiple_of(pointer, BYTES) + place)
    else:
        found = tl.load(pointer + place, mask=inside, other=0)
    return found


@triton.jit
def write(address, value, wide, place, inside, Type: tl.constexpr, BYTES: tl.constexpr = 16):
    """Invert :func:`read`."""
    pointer = address.to(tl.pointer_type(Type))
    if wide:
        tl.store(tl.multiple_of(pointer, BYTES) + place, value)
    else:
        tl.store(pointer + place, value, mask=inside)


@triton.jit
def floats(column, base, wide, place, inside):
    """Return elements from ``base`` on of the tensor whose address a column holds."""
    return read(tl.load(column) + 4 * base, wide, place, inside, tl.float32)


@triton.jit
def write_floats(column, value, base, wide, place, inside):
    write(tl.load(column) + 4 * base, value, wide, place, inside, tl.float32)


@triton.jit
def finished_residual(row, x):
    """Return the residual of which x was kept: less the value of numbers below 0, or of others (zeros once it is
    done)."""
    sides = tl.load(row + KEPT_SIDES).to(tl.pointer_type(tl.float32))
    return x - tl.where(x >= 0, tl.load(sides + 1), tl.load(sides))


@triton.jit
def compensated(row, given, base, wide, place, inside, KEEPS: tl.constexpr, UNFINISHED: tl.constexpr = False):
    """Return x = a residual + b gradient; the gradient itself if no residual is kept."""
    if KEEPS:
        # Two float32s in an int64: the gradient's factor above, the residual's below.
        factors = tl.load(row + FACTORS)
        given = given * (factors >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if tl.load(row + KEPT) != 0:
            residual = floats(row + KEPT, base, wide, place, inside)
            if UNFINISHED:
                residual = tl.where(inside, finished_residual(row, residual), 0.0)
            given = residual * factors.to(tl.int32).to(tl.float32, bitcast=True) + given
    return given


@triton.jit
def deny(flags, variable, x, most, LOOKS: tl.constexpr):
    """Leave a flag if a magnitude is larger than the one of these bits."""
    # All programs store the same 1, so no atomic is needed.
    if LOOKS and tl.max(magnitude_bits(x)) > most:
        tl.store(flags + variable, 1)


@triton.jit
def store_as(header, value, place, inside, Type: tl.constexpr):
    """Store marks and places, which all types hold, behind the payloads."""
    if tl.bfloat16 == Type:
        bits = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(header.to(tl.pointer_type(tl.uint16)) + place, bits, mask=inside)
    else:
        tl.store(header.to(tl.pointer_type(Type)) + place, value.to(Type), mask=inside)


@triton.jit
def write_statuses(flags, in_range, marks, table, rows, pieces, received, place, size, overflow, Type: tl.constexpr):
    """Write one or some of the ``size`` numbers of a wire's header, of which the first are the variables' statuses.

    A variable has overflowed if a flag of its ``pieces`` says so, or a status that was received. Behind the wire's
    address in the table stand those of as many headers as there are pieces, all of which are alike, then those of the
    ``received`` statuses of ranks, which are bytes.
    """
    variables, none = rows // pieces, place * 0
    overflowed, is_status = none, place < variables
    for piece in range(pieces):
        own = flags + piece * variables + place
        overflowed |= tl.load(own, mask=is_status, other=0)
        tl.store(own, none, mask=is_status)  # for the next step
    for rank in range(received):
        statuses = wire_at(table, rows, 1 + pieces + rank).to(tl.pointer_type(tl.uint8))
        overflowed |= (tl.load(statuses + place, mask=is_status, other=0).to(tl.float32) >= overflow).to(tl.int32)
    tl.store(in_range + place, tl.where(overflowed != 0, 0.0, 1.0), mask=is_status)
    mark = tl.load(marks + place, mask=place < size, other=0)
    write_to_headers(tl.where((overflowed != 0) & (mark > 0), overflow, mark), table, rows, pieces, place, size, Type)


@triton.jit
def write_to_headers(mark, table, rows, pieces, place, size, Type: tl.constexpr):
    for piece in range(pieces):
        store_as(wire_at(table, rows, 1 + piece), mark, place, place < size, Type)


@triton.jit(do_not_specialize=("rows", "pieces", "received", "size"))
def write_header(
    flags, table, in_range, marks, rows, pieces, received, size, overflow, N: tl.constexpr, Type: tl.constexpr
):  # fmt: skip
    """Write the header of a wire, or of several."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    write_statuses(flags, in_range, marks, table, rows, pieces, received, place, size, overflow, Type)


@triton.jit
def write_header_part(flags, in_range, marks, table, rows, row, pieces, received, size, overflow, Type: tl.constexpr):
    """Write one variable's part of the header, by the program of its first piece; the first variable's program writes
    the rest."""
    if row < rows // pieces:
        write_statuses(flags, in_range, marks, table, rows, pieces, received, row, size, overflow, Type)
    if row == 0:
        for place in range(rows // pieces, size):
            write_to_headers(tl.load(marks + place), table, rows, pieces, place, size, Type)
