"""Codecs of a whole bucket for the largest elements: of each chunk in one launch, of each variable digit by digit; and
for those at random places. See
:mod:`grace.kernels.triton.buckets`, whose kernels these are like, and :mod:`grace.kernels.triton.selection`.

A variable's payload is values, and its positions as :mod:`grace.kernels.index_coding` codes them: WIDTH is the bytes of
one, or 1 of a bitmap.
"""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import LOW31, magnitude_bits
from grace.kernels.triton.bucket_tables import (
    COLUMNS,
    COUNT,
    DRAW,
    FACTORS,
    FIRST,
    FLOATS,
    GRADIENT,
    KEY,
    MORE,
    NEXT,
    SCALE,
    SECOND,
    SIZE,
    START,
    WIDTH,
    compensated,
    deny,
    floats,
    locate,
    part,
    wire_at,
    write,
    write_floats,
)
from grace.kernels.triton.packing import byte_of_codes, first_from, marks_at
from grace.kernels.triton.random import walked
from grace.kernels.triton.selection import (
    FIRSTS,
    LASTS,
    STATE,
    candidates,
    counted,
    counted_last,
    guess,
    kth_and_before,
    largest_of_rows,
    listed_of,
    place_of,
    read_candidates,
    report,
    sampled,
    taken_of,
)


@triton.jit
def write_entries(values, coded, width, at, index, value, taken):
    """Write values, and their positions in 32 bits or the lower 16, as entries of a payload."""
    tl.store(values.to(tl.pointer_type(tl.float32)) + at, value, mask=taken)
    if width == 4:
        tl.store(coded.to(tl.pointer_type(tl.int32)) + at, index.to(tl.int32), mask=taken)
    elif width == 2:
        tl.store(coded.to(tl.pointer_type(tl.int16)) + at, index.to(tl.int16), mask=taken)


@triton.jit
def write_marks(coded, taken, base, size, N: tl.constexpr):
    """Write the bits of N elements from ``base`` on, a multiple of 8."""
    byte = tl.arange(0, N // 8)
    write(coded + base // 8, byte_of_codes(taken, 1, N), False, byte, byte * 8 < size - base, tl.uint8)


# -- of chunks ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("variables", "most", "k"))
def encode_chunks(
    flags, table, owners, variables, most, k,
    KEEPS: tl.constexpr, LOOKS: tl.constexpr, CHUNK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the k largest of each chunk."""
    rows: tl.constexpr = N // CHUNK
    variable, row, program = locate(table, owners)
    base, place, inside, wide, _ = part(row, program, N)
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    deny(flags, variable, x, most, LOOKS)
    bits = tl.reshape(tl.where(inside, magnitude_bits(x), -1), [rows, CHUNK])
    first = (program * rows + tl.arange(0, rows)) * k
    wanted = tl.maximum(tl.minimum(tl.load(row + MORE) - first, k), 0).to(tl.int32)
    taken = largest_of_rows(bits, wanted, rows)
    at = tl.reshape(first[:, None] + tl.cumsum(taken, 1) - taken, [N])
    chosen = tl.reshape(taken, [N]) > 0
    wire, width = wire_at(table, variables, 0), tl.load(row + WIDTH)
    values, coded = wire + tl.load(row + FIRST), wire + tl.load(row + SECOND)
    write_entries(values, coded, width, at, base + place, x, chosen)
    if width == 1:
        write_marks(coded, chosen, base, tl.load(row + SIZE), N)
    if KEEPS:
        # x - x: of NaN or Inf it is NaN, as x - C(x) is.
        write_floats(row + NEXT, tl.where(chosen, x - x, x), base, wide, place, inside)


# -- of all, digit by digit --------------------------------------------------------------------------------------------


@triton.jit
def searched(table, owners, counts, ABOVE: tl.constexpr):
    """Return this program's row, x, its size, the number of entries to send, the program's number, the variable's
    counts, and True if x may be read wide. ABOVE a threshold no more are sent than there are."""
    variable, row, program = locate(table, owners)
    where = tl.load(row + NEXT)
    x = tl.where(where == 0, tl.load(row + GRADIENT), where).to(tl.pointer_type(tl.float32))
    k, own = tl.load(row + MORE).to(tl.int32), counts + variable * STATE
    if ABOVE:
        k = tl.minimum(k, tl.load(own + STATE - 2))
    return row, x, tl.load(row + SIZE), k, program.to(tl.int32), own, tl.load(row + FLOATS) != 0


@triton.jit(do_not_specialize=("least",))
def guess_of_bucket(counts, table, least, KEEPS: tl.constexpr):
    """Begin the search of each variable, by one program."""
    row = table + tl.program_id(0) * COLUMNS
    n = tl.load(row + SIZE)
    index, inside = sampled(n)
    x = compensated(row, floats(row + GRADIENT, 0, False, index, inside), 0, False, index, inside, KEEPS)
    guess(counts + tl.program_id(0) * STATE, magnitude_bits(x), inside, n, tl.load(row + MORE), least)


@triton.jit(do_not_specialize=("variables", "most", "least", "steps", "room"))
def list_of_bucket(
    flags, patterns, places, listed, ties, counts, table, owners, variables, most, least, steps, room,
    ABOVE: tl.constexpr, KEEPS: tl.constexpr, LOOKS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write x where the next residual goes, list the elements above the guess, count first digits, and write zeros for
    bitmaps."""
    variable, row, program = locate(table, owners)
    own, start, width = counts + variable * STATE, tl.load(row + START), tl.load(row + WIDTH)
    coded, first = wire_at(table, variables, 0) + tl.load(row + SECOND), (start + program) * room
    guessed, found = tl.load(own + STATE - 1), tl.zeros([FIRSTS], tl.int32)
    many, tied, above = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for step in range(steps):
        base, place, inside, wide, _ = part(row, program * steps + step, N)
        x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
        deny(flags, variable, x, most, LOOKS)
        if KEEPS:
            write_floats(row + NEXT, x, base, wide, place, inside)
        if width == 1:
            write_marks(coded, place < 0, base, tl.load(row + SIZE), N)
        found += tl.histogram(magnitude_bits(x) >> 24, FIRSTS, mask=inside)
        lists = patterns + first, places + first, x, step * N + place
        many, tied = listed_of(*lists, inside, guessed, many, tied, room)
        if ABOVE:
            above += tl.sum((inside & (magnitude_bits(x) > least)).to(tl.int32), 0)
    report(own, listed + start, ties + start, program, found, many, tied)
    if ABOVE:
        tl.atomic_add(own + STATE - 2, above)


@triton.jit(do_not_specialize=("steps", "room"))
def digit_of_bucket(
    patterns, listed, counts, table, owners, steps, room, ABOVE: tl.constexpr, PASS: tl.constexpr, N: tl.constexpr
):
    row, x, n, k, program, own, wide = searched(table, owners, counts, ABOVE)
    start = tl.load(row + START)
    counted(patterns + start * room, listed + start, own, x, n, k, program, steps, room, wide, PASS, N)


@triton.jit(do_not_specialize=("steps", "room"))
def last_of_bucket(
    rows, patterns, listed, ties, counts, table, owners, steps, room, ABOVE: tl.constexpr, N: tl.constexpr
):
    row, x, n, k, program, own, wide = searched(table, owners, counts, ABOVE)
    start = tl.load(row + START)
    lists = rows + start * LASTS, patterns + start * room, listed + start, ties + start
    counted_last(*lists, own, x, n, k, program, steps, room, wide, N)


@triton.jit(do_not_specialize=("variables", "steps", "room"))
def write_of_bucket(
    rows, places, patterns, listed, counts, table, owners, variables, steps, room,
    ABOVE: tl.constexpr, KEEPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write the entries, ascending. ABOVE a threshold there may be fewer than there is room for, which zeros of no
    element fill, and their number is sent."""
    row, x, n, k, program, own, wide = searched(table, owners, counts, ABOVE)
    start = tl.load(row + START)
    threshold, rank, larger_before, tied_before = kth_and_before(own, rows + start * LASTS, k, program, P)
    lists = patterns + start * room, listed + start
    source, many, is_listed, wide = candidates(*lists, own, x, n, k, program, steps, room, wide, N)
    wire, width = wire_at(table, variables, 0), tl.load(row + WIDTH)
    values, coded = wire + tl.load(row + FIRST), wire + tl.load(row + SECOND)
    base, first = program.to(tl.int64) * steps * N, (start + program) * room
    if ABOVE:
        size, programs = tl.load(row + MORE).to(tl.int32), ((n + steps * N - 1) // (steps * N)).to(tl.int32)
        for low in range(k + program * N, size, programs * N):
            at, zero = low + tl.arange(0, N), tl.zeros([N], tl.int64)
            write_entries(values, coded, width, at, zero + n, zero.to(tl.float32), at < size)
        if program == 0:
            tl.store((wire + tl.load(row + COUNT)).to(tl.pointer_type(tl.int32)), k)
    for low in range(0, many, N):
        given, inside = read_candidates(source, low, many, wide, N)
        index = base + place_of(places, first, low + tl.arange(0, N), is_listed, inside)
        taken, at, larger, equal = taken_of(given & LOW31, inside, threshold, rank, larger_before, tied_before)
        value = given.to(tl.float32, bitcast=True)
        write_entries(values, coded, width, at, index, value, taken)
        if width == 1:
            # Bitmaps begin at any byte, and atomics take aligned words of 32 bits.
            byte = coded + index // 8
            bit = ((byte & 3) * 8 + (index & 7)).to(tl.int32)
            tl.atomic_or((byte - (byte & 3)).to(tl.pointer_type(tl.int32)), 1 << bit, mask=taken)
        if KEEPS:
            tl.store(x + index, value - value, mask=taken)
        larger_before, tied_before = larger_before + larger, tied_before + equal


# -- decoding ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=("variables", "ranks", "programs"))
def count_marks(marked, table, owners, variables, ranks, programs, N: tl.constexpr):
    """Count the bits in each program's part of each rank's bitmaps."""
    _, row, program = locate(table, owners)
    if tl.load(row + WIDTH) == 1:
        for rank in range(ranks):
            coded = wire_at(table, variables, rank) + tl.load(row + SECOND)
            bits = marks_at(coded, program * N, tl.load(row + SIZE), N)
            tl.store(marked + rank * programs + tl.program_id(0), tl.sum(bits, 0))


@triton.jit(do_not_specialize=("variables", "ranks", "programs", "kept"))
def decode_entries(
    marked, table, owners, variables, ranks, programs, weight, kept,
    CHUNK: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the mean, a part of it in each program: rank by rank, as everywhere, so that sums have the same bits.
    Positions that are not ascending, or of no element, are left out."""
    _, row, program = locate(table, owners)
    base, place, inside, wide, _ = part(row, program, N)
    size, k, width = tl.load(row + SIZE), tl.load(row + MORE).to(tl.int32), tl.load(row + WIDTH)
    out = tl.load(row + GRADIENT).to(tl.pointer_type(tl.float32))
    if width == 1:
        total, first = tl.zeros([N], tl.float32), tl.load(row + START)
        for rank in range(ranks):
            wire = wire_at(table, variables, rank)
            before = tl.full([], 0, tl.int32)
            for low in range(0, program.to(tl.int32), B):
                others = low + tl.arange(0, B)
                counts = marked + rank * programs + first
                before += tl.sum(tl.load(counts + others, mask=others < program, other=0), 0)
            bits = marks_at(wire + tl.load(row + SECOND), base, size, N)
            at = before + tl.cumsum(bits, 0) - bits
            there = (bits > 0) & (at < k)
            values = (wire + tl.load(row + FIRST)).to(tl.pointer_type(tl.float32))
            value = tl.load(values + at, mask=there, other=0)
            total = tl.where(there, total + weight * value, total)
        write_floats(row + GRADIENT, total, base, wide, place, inside)
    else:
        write_floats(row + GRADIENT, tl.zeros([N], tl.float32), base, wide, place, inside)
        # A thread adds to zeros, and then to sums, that other threads of the program have written.
        tl.debug_barrier()
        for rank in range(ranks):
            wire = wire_at(table, variables, rank)
            values, coded = wire + tl.load(row + FIRST), wire + tl.load(row + SECOND)
            if (CHUNK > 0) & (width == 2):
                begin = tl.minimum(base // CHUNK * kept, k).to(tl.int32)
                end = tl.minimum(((base + N - 1) // CHUNK + 1) * kept, k).to(tl.int32)
            else:
                begin = first_from(coded, width, k, base)
                end = first_from(coded, width, k, tl.minimum(base + N, size))  # without what fills room
            for low in range(begin, end, B):
                entry = low + tl.arange(0, B)
                there = entry < end
                if width == 4:
                    index = tl.load(coded.to(tl.pointer_type(tl.int32)) + entry, mask=there, other=0).to(tl.int64)
                else:
                    index = tl.load(coded.to(tl.pointer_type(tl.uint16)) + entry, mask=there, other=0).to(tl.int64)
                    if CHUNK > 0:
                        index |= (entry // kept * CHUNK & ~0xFFFF).to(tl.int64)
                there = there & (index >= base) & (index < base + N) & (index < size)
                value = tl.load(values.to(tl.pointer_type(tl.float32)) + entry, mask=there, other=0)
                held = tl.load(out + index, mask=there, other=0)
                tl.store(out + index, held + weight * value, mask=there)
            tl.debug_barrier()


# -- of random places --------------------------------------------------------------------------------------------------


@triton.jit
def drawn(row, program, step, N: tl.constexpr):
    """Return N entries of a program, which of them exist, and the places that all ranks draw alike."""
    value = program * N + tl.arange(0, N)
    there = value < tl.load(row + MORE)
    bits = tl.load(row + WIDTH)
    n, key = tl.load(row + SIZE).to(tl.uint32), tl.load(row + KEY)
    given = tl.where(there, value, 0).to(tl.uint32)
    words = key, key >> 32, step, tl.load(row + DRAW)
    return value, there, walked(given, n, *words, bits & 0xFF, bits >> 8).to(tl.int64)


@triton.jit(do_not_specialize=("most",))
def compensate_bucket(flags, table, owners, most, KEEPS: tl.constexpr, LOOKS: tl.constexpr, N: tl.constexpr):
    """Write x where the next residual goes."""
    variable, row, program = locate(table, owners)
    base, place, inside, wide, _ = part(row, program, N)
    x = compensated(row, floats(row + GRADIENT, base, wide, place, inside), base, wide, place, inside, KEEPS)
    deny(flags, variable, x, most, LOOKS)
    if KEEPS:
        write_floats(row + NEXT, x, base, wide, place, inside)


@triton.jit(do_not_specialize=("variables", "step"))
def encode_drawn(table, owners, variables, step, KEEPS: tl.constexpr, N: tl.constexpr):
    _, row, program = locate(table, owners)
    value, there, index = drawn(row, program - tl.load(row + SECOND) + tl.load(row + START), step, N)
    x = tl.load(row + (NEXT if KEEPS else GRADIENT)).to(tl.pointer_type(tl.float32)) + index
    found = tl.load(x, mask=there, other=0)
    target = (wire_at(table, variables, 0) + tl.load(row + FIRST)).to(tl.pointer_type(tl.float32))
    tl.store(target + value, found, mask=there)
    if KEEPS:
        scale = tl.load(row + SCALE).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(x, found - scale * found, mask=there)


@triton.jit
def zero_bucket(table, owners, N: tl.constexpr):
    _, row, program = locate(table, owners)
    base, place, inside, wide, _ = part(row, program, N)
    write_floats(row + GRADIENT, tl.zeros([N], tl.float32), base, wide, place, inside)


@triton.jit(do_not_specialize=("variables", "ranks", "step"))
def decode_drawn(table, owners, variables, ranks, step, N: tl.constexpr):
    """Write the mean at drawn places; all others are zero."""
    _, row, program = locate(table, owners)
    value, there, index = drawn(row, program - tl.load(row + SECOND) + tl.load(row + START), step, N)
    weight, total = tl.load(row + FACTORS).to(tl.int32).to(tl.float32, bitcast=True), tl.zeros([N], tl.float32)
    for rank in range(ranks):
        wire = (wire_at(table, variables, rank) + tl.load(row + FIRST)).to(tl.pointer_type(tl.float32))
        total += weight * tl.load(wire + value, mask=there, other=0)
    tl.store(tl.load(row + GRADIENT).to(tl.pointer_type(tl.float32)) + index, total, mask=there)
