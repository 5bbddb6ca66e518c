"""What kernels of whole buckets share: a table of addresses, and reads and writes of what stands there.

A bucket's table (int64) has a row for each of its variables, and behind the rows the addresses of wires, or of one and
of its ends (:func:`put_ends`). Where variables are cut into pieces, these have rows, the first pieces of all variables
first. Each program works on a part of one variable, which ``owners`` names (int32, one a program). Whole parts at
addresses that are multiples of 16 are read and written 16 bytes at a time; the ends of variables, and what begins
elsewhere, element by element.
"""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import magnitude_bits

GRADIENT, KEPT, NEXT, SIZE, FIRST, SECOND, MORE = (tl.constexpr(i) for i in range(7))
"""Addresses of x's parts (to decode: where the mean goes), elements, byte offsets of the payload's tensors in a wire,
and a number of the method's."""
START, FACTORS, KEY, DRAW, FLOATS, CODES, WIDTH = (tl.constexpr(i) for i in range(7, 14))
"""The first program; a and b; of random numbers; whether all floats, and whether the first tensor of the payload in all
wires, begin where wide reads may; and bytes of a position."""
FOLDED, JOINED = tl.constexpr(14), tl.constexpr(15)
"""The first programs of launches that work on other parts."""
KEPT_SIDES, NEXT_SIDES = FOLDED, JOINED
"""Of signs, which have no such launches: addresses of what is still to be subtracted from residuals."""
COUNT = FOLDED
"""Of what is above a threshold, likewise: the byte offset in a wire of how many entries there are."""
SCALE = FOLDED
"""Of random-k, likewise: the factor that receivers multiply values by, a float32's bits."""
COLUMNS = tl.constexpr(16)


@triton.jit
def here(table, owners):
    """This program's variable, its row, and the number of the program among those of the variable (int64)."""
    variable = tl.load(owners + tl.program_id(0))
    row = table + variable * COLUMNS
    return variable, row, tl.program_id(0) - tl.load(row + START)


@triton.jit
def wire_at(table, variables, rank):
    """The address of a wire."""
    return tl.load(table + variables * COLUMNS + rank)


@triton.jit
def part(row, program, N: tl.constexpr):
    """A program's part of a variable: the first element, and which of the N from there on are there (int32 places);
    whether floats may be read wide, and the payload's first tensor."""
    base, place = program * N, tl.arange(0, N)
    left = tl.load(row + SIZE) - base
    whole = left >= N
    return base, place, place < left, whole & (tl.load(row + FLOATS) != 0), whole & (tl.load(row + CODES) != 0)


@triton.jit
def read(address, wide, place, inside, Type: tl.constexpr, BYTES: tl.constexpr = 16):
    """Elements behind an address; wide: all of them are there, and it is a multiple of BYTES."""
    pointer = address.to(tl.pointer_type(Type))
    if wide:
        found = tl.load(tl.multiple_of(pointer, BYTES) + place)
    else:
        found = tl.load(pointer + place, mask=inside, other=0)
    return found


@triton.jit
def write(address, value, wide, place, inside, Type: tl.constexpr, BYTES: tl.constexpr = 16):
    """The inverse of :func:`read`."""
    pointer = address.to(tl.pointer_type(Type))
    if wide:
        tl.store(tl.multiple_of(pointer, BYTES) + place, value)
    else:
        tl.store(pointer + place, value, mask=inside)


@triton.jit
def floats(column, base, wide, place, inside):
    """Elements from ``base`` on of what a column of a row is the address of."""
    return read(tl.load(column) + 4 * base, wide, place, inside, tl.float32)


@triton.jit
def write_floats(column, value, base, wide, place, inside):
    write(tl.load(column) + 4 * base, value, wide, place, inside, tl.float32)


@triton.jit
def finished(row, x):
    """The residual of which x was kept: less what stands for numbers below 0, or for others (zeros once it is done)."""
    sides = tl.load(row + KEPT_SIDES).to(tl.pointer_type(tl.float32))
    return x - tl.where(x >= 0, tl.load(sides + 1), tl.load(sides))


@triton.jit
def compensated(row, given, base, wide, place, inside, KEEPS: tl.constexpr, UNFINISHED: tl.constexpr = False):
    """x = a residual + b gradient; the gradient itself where nothing is kept."""
    if KEEPS:
        factors = tl.load(row + FACTORS)
        given = given * (factors >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        if tl.load(row + KEPT) != 0:
            residual = floats(row + KEPT, base, wide, place, inside)
            if UNFINISHED:
                residual = tl.where(inside, finished(row, residual), 0.0)
            given = residual * factors.to(tl.int32).to(tl.float32, bitcast=True) + given
    return given


@triton.jit
def deny(flags, variable, x, most, LOOKS: tl.constexpr):
    """Leave a flag if a magnitude is larger than the one of these bits."""
    if LOOKS and tl.max(magnitude_bits(x)) > most:
        tl.store(flags + variable, 1)


@triton.jit
def put(end, value, place, inside, Type: tl.constexpr):
    """Marks and places, which all types hold, behind the payloads."""
    if tl.bfloat16 == Type:
        bits = (value.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store(end.to(tl.pointer_type(tl.uint16)) + place, bits, mask=inside)
    else:
        tl.store(end.to(tl.pointer_type(Type)) + place, value.to(Type), mask=inside)


@triton.jit
def put_ends(flags, sound, marks, table, rows, pieces, heard, place, size, overflow, Type: tl.constexpr):
    """One or some of the ``size`` numbers at the end of a wire, of which the first are the variables' statuses.

    A variable is spoilt if a flag of its ``pieces`` says so, or a status that was received. Behind the wire's address
    in the table stand those of as many ends as there are pieces, all of which are alike, then those of the ``heard``
    statuses of ranks, which are bytes.
    """
    variables, none = rows // pieces, place * 0
    spoilt, is_status = none, place < variables
    for piece in range(pieces):
        own = flags + piece * variables + place
        spoilt |= tl.load(own, mask=is_status, other=0)
        tl.store(own, none, mask=is_status)
    for rank in range(heard):
        told = wire_at(table, rows, 1 + pieces + rank).to(tl.pointer_type(tl.uint8))
        spoilt |= (tl.load(told + place, mask=is_status, other=0).to(tl.float32) >= overflow).to(tl.int32)
    tl.store(sound + place, tl.where(spoilt != 0, 0.0, 1.0), mask=is_status)
    mark = tl.load(marks + place, mask=place < size, other=0)
    put_marks(tl.where((spoilt != 0) & (mark > 0), overflow, mark), table, rows, pieces, place, size, Type)


@triton.jit
def put_marks(mark, table, rows, pieces, place, size, Type: tl.constexpr):
    for piece in range(pieces):
        put(wire_at(table, rows, 1 + piece), mark, place, place < size, Type)


@triton.jit(do_not_specialize=("rows", "pieces", "heard", "size"))
def write_end(
    flags, table, sound, marks, rows, pieces, heard, size, overflow, N: tl.constexpr, Type: tl.constexpr
):  # fmt: skip
    """The end of a wire, or of several."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    put_ends(flags, sound, marks, table, rows, pieces, heard, place, size, overflow, Type)


@triton.jit
def end_of_one(flags, sound, marks, table, rows, row, pieces, heard, size, overflow, Type: tl.constexpr):
    """What :func:`write_end` does of one variable, by the program of its first piece; the first one's program does it
    of the rest."""
    if row < rows // pieces:
        put_ends(flags, sound, marks, table, rows, pieces, heard, row, size, overflow, Type)
    if row == 0:
        for place in range(rows // pieces, size):
            put_marks(tl.load(marks + place), table, rows, pieces, place, size, Type)
