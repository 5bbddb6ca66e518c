"""Kernels that find elements: the largest ones by their digits, those above a threshold, and places in tensors."""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import LOW31, magnitude_bits

DIGITS = tl.constexpr(256)
"""Magnitudes have 31 bits: digits of 8, 8, 8 and 7."""


@triton.jit
def digit_of(counts, k, BINS: tl.constexpr):
    """The digit of the k-th largest of which there are so many of each digit, and its rank among those of its digit."""
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # this digit or a larger one
    bins = tl.arange(0, BINS)
    digit = tl.max(tl.where(from_here >= k, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, counts, 0), 0)
    return digit, k - above


@triton.jit
def narrowed(counts, state, k, program, PASS: tl.constexpr):
    """The upper digits of the k-th largest that are known before a pass, and its rank among those that have them."""
    prefix, rank = tl.full([], 0, tl.int32), k.to(tl.int32)
    if PASS > 0:
        if PASS > 1:
            prefix, rank = tl.load(state + 2 * PASS - 2), tl.load(state + 2 * PASS - 1)
        found = tl.load(counts + (PASS - 1) * DIGITS + tl.arange(0, DIGITS))
        digit, rank = digit_of(found, rank, DIGITS)
        prefix = prefix * DIGITS + digit
        if program == 0:
            tl.store(state + 2 * PASS, prefix)
            tl.store(state + 2 * PASS + 1, rank)
    return prefix, rank


@triton.jit
def count_first(counts, x, n, steps, N: tl.constexpr):
    """Count the first digit of all elements."""
    base = tl.program_id(0).to(tl.int64) * steps * N
    place = tl.arange(0, N)
    found = tl.zeros([DIGITS], tl.int32)
    for step in range(steps):
        inside = place < n - base - step * N
        bits = magnitude_bits(tl.load(x + base + step * N + place, mask=inside, other=0))
        found += tl.histogram(bits >> 23, DIGITS, mask=inside)
    tl.atomic_add(counts + tl.arange(0, DIGITS), found, mask=found > 0)


@triton.jit
def some(source, low, many, wide, N: tl.constexpr):
    """Patterns of N candidates from one on, and which of them are there."""
    first, place = source + low, tl.arange(0, N)
    if (many - low >= N) & (wide != 0):
        bits = tl.load(tl.multiple_of(first, 16) + place)
    else:
        bits = tl.load(first + place, mask=place < many - low, other=0)
    return bits, place < many - low


@triton.jit
def collected(patterns, places, located, listed, counts, state, x, n, k, program, steps, room, wide, N: tl.constexpr):
    """List what has the first digit of the k-th largest or a larger one, patterns and places, and count its second one.

    Each program has room for so many; where there are more, the list is not used, but what it is of. ``listed`` are how
    many there are, and ``located`` is whether places are of use.
    """
    prefix, _ = narrowed(counts, state, k, program, 1)
    base, first = program.to(tl.int64) * steps * N, program.to(tl.int64) * room
    place, many, found = tl.arange(0, N), tl.full([], 0, tl.int32), tl.zeros([DIGITS], tl.int32)
    source, there = x.to(tl.pointer_type(tl.int32), bitcast=True) + base, tl.minimum(n - base, steps * N).to(tl.int32)
    for low in range(0, there, N):
        given, inside = some(source, low, there, wide, N)
        bits = given & LOW31
        taken = (inside & ((bits >> 23) >= prefix)).to(tl.int32)
        at = many + tl.cumsum(taken, 0) - taken
        tl.store(patterns + first + at, given, mask=(taken > 0) & (at < room))
        tl.store(places + first + at, low + place, mask=(taken > 0) & (at < room) & located)
        found += tl.histogram((bits >> 15) & (DIGITS - 1), DIGITS, mask=inside & ((bits >> 23) == prefix))
        many += tl.sum(taken, 0)
    tl.store(listed + program, many)
    tl.atomic_add(counts + DIGITS + tl.arange(0, DIGITS), found, mask=found > 0)


@triton.jit
def candidates(patterns, listed, x, n, program, steps, room, wide, N: tl.constexpr):
    """Where a program's candidates are, and how many: those that it has listed, or all of its elements; whether they
    may be read wide, as x may."""
    base, many = program.to(tl.int64) * steps * N, tl.load(listed + program)
    is_listed = many <= room  # where lists begin is a multiple of 16
    all_of_them = tl.minimum(n - base, steps * N).to(tl.int32)
    whole = x.to(tl.pointer_type(tl.int32), bitcast=True) + base
    source = tl.where(is_listed, patterns + program.to(tl.int64) * room, whole)
    return source, tl.where(is_listed, many, all_of_them), is_listed | (wide != 0)


@triton.jit
def counted_third(patterns, listed, counts, state, x, n, k, program, steps, room, wide, N: tl.constexpr):
    """Count the third digit of those whose upper two are those of the k-th largest."""
    prefix, _ = narrowed(counts, state, k, program, 2)
    source, many, wide = candidates(patterns, listed, x, n, program, steps, room, wide, N)
    found = tl.zeros([DIGITS], tl.int32)
    for low in range(0, many, N):
        bits, inside = some(source, low, many, wide, N)
        bits &= LOW31
        found += tl.histogram((bits >> 7) & (DIGITS - 1), DIGITS, mask=inside & ((bits >> 15) == prefix))
    tl.atomic_add(counts + 2 * DIGITS + tl.arange(0, DIGITS), found, mask=found > 0)


@triton.jit
def counted_last(rows, above, patterns, listed, counts, state, x, n, k, program, steps, room, wide, N: tl.constexpr):
    """The last 7 bits, counted by each program for itself, and how many elements are larger by their upper digits."""
    prefix, _ = narrowed(counts, state, k, program, 3)
    source, many, wide = candidates(patterns, listed, x, n, program, steps, room, wide, N)
    found, larger = tl.zeros([128], tl.int32), tl.zeros([N], tl.int32)
    for low in range(0, many, N):
        bits, inside = some(source, low, many, wide, N)
        bits &= LOW31
        larger += (inside & ((bits >> 7) > prefix)).to(tl.int32)
        found += tl.histogram(bits & 127, 128, mask=inside & ((bits >> 7) == prefix))
    tl.store(rows + program * 128 + tl.arange(0, 128), found)
    tl.store(above + program, tl.sum(larger, 0))


@triton.jit
def placed_programs(starts, ties, state, rows, above, programs, P: tl.constexpr):
    """What is taken whole, and from where each program writes: larger elements first counted, then equal ones."""
    prefix, rank = tl.load(state + 6), tl.load(state + 7)
    bins, program = tl.arange(0, 128), tl.arange(0, P)
    counts = tl.zeros([128], tl.int32)
    for low in range(0, programs, P):
        at = (low + program)[:, None] * 128 + bins[None, :]
        counts += tl.sum(tl.load(rows + at, mask=(low + program < programs)[:, None], other=0), 0)
    digit, rank = digit_of(counts, rank, 128)
    tl.store(state + 8, prefix * 128 + digit)
    tl.store(state + 9, rank)
    started, tied = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for low in range(0, programs, P):
        here = low + program < programs
        at = (low + program)[:, None] * 128 + bins[None, :]
        found = tl.load(rows + at, mask=here[:, None], other=0)
        larger = tl.load(above + low + program, mask=here, other=0)
        larger += tl.sum(tl.where((bins > digit)[None, :], found, 0), 1)
        equal = tl.sum(tl.where((bins == digit)[None, :], found, 0), 1)
        tl.store(starts + low + program, started + tl.cumsum(larger, 0) - larger, mask=here)
        tl.store(ties + low + program, tied + tl.cumsum(equal, 0) - equal, mask=here)
        started, tied = started + tl.sum(larger, 0), tied + tl.sum(equal, 0)


@triton.jit
def taken_of(bits, inside, threshold, rank, larger_before, tied_before):
    """1 for each that is among the largest, and its place among these: of those equal to the smallest of them the first
    ones; how many larger and equal ones there are."""
    larger, equal = (inside & (bits > threshold)).to(tl.int32), (inside & (bits == threshold)).to(tl.int32)
    ranks = tied_before + tl.cumsum(equal, 0)  # from 1
    at = larger_before + tl.cumsum(larger, 0) - larger + tl.minimum(ranks - equal, rank)
    return (larger > 0) | ((equal > 0) & (ranks <= rank)), at, tl.sum(larger, 0), tl.sum(equal, 0)


@triton.jit
def collect(patterns, places, listed, counts, state, x, n, k, steps, room, wide, N: tl.constexpr):
    collected(patterns, places, True, listed, counts, state, x, n, k, tl.program_id(0), steps, room, wide, N)


@triton.jit
def count_third(patterns, listed, counts, state, x, n, k, steps, room, wide, N: tl.constexpr):
    counted_third(patterns, listed, counts, state, x, n, k, tl.program_id(0), steps, room, wide, N)


@triton.jit
def count_last(rows, above, patterns, listed, counts, state, x, n, k, steps, room, wide, N: tl.constexpr):
    counted_last(rows, above, patterns, listed, counts, state, x, n, k, tl.program_id(0), steps, room, wide, N)


@triton.jit
def place_programs(starts, ties, state, rows, above, programs, P: tl.constexpr):
    placed_programs(starts, ties, state, rows, above, programs, P)


@triton.jit
def write_largest(out, starts, ties, state, places, patterns, listed, x, n, steps, room, wide, N: tl.constexpr):
    """The places of the k largest, ascending."""
    program = tl.program_id(0)
    threshold, rank = tl.load(state + 8), tl.load(state + 9)
    larger_before, tied_before = tl.load(starts + program), tl.load(ties + program)
    source, many, wide = candidates(patterns, listed, x, n, program, steps, room, wide, N)
    is_listed = tl.load(listed + program) <= room
    base, first = program.to(tl.int64) * steps * N, program.to(tl.int64) * room
    for low in range(0, many, N):
        place = low + tl.arange(0, N)
        bits, inside = some(source, low, many, wide, N)
        bits &= LOW31
        index = tl.load(places + first + place, mask=is_listed & inside, other=0)
        index = base + tl.where(is_listed, index, place)
        taken, at, larger, equal = taken_of(bits, inside, threshold, rank, larger_before, tied_before)
        tl.store(out + at, index.to(tl.int32), mask=taken)
        larger_before, tied_before = larger_before + larger, tied_before + equal


@triton.jit
def kth_of_rows(bits, wanted, ROWS: tl.constexpr):
    """Of each row a pattern that so many of its magnitudes reach, and no others but such as equal it, by halving."""
    low, high = tl.zeros([ROWS], tl.int32), tl.maximum(tl.max(bits, 1), 0)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        count = tl.sum((bits >= middle[:, None]).to(tl.int32), 1)
        high = tl.where(count == wanted, middle, tl.where(count > wanted, high, middle - 1))
        low = tl.where(count >= wanted, middle, low)
    return low


@triton.jit
def largest_of_rows(bits, wanted, ROWS: tl.constexpr):
    """1 for each of the largest magnitudes of a row, of equal ones the first; what is negative is none."""
    kth = kth_of_rows(bits, wanted, ROWS)
    larger, equal = (bits > kth[:, None]).to(tl.int32), (bits == kth[:, None]).to(tl.int32)
    ties = wanted - tl.sum(larger, 1)
    return larger | (equal & (tl.cumsum(equal, 1) <= ties[:, None]).to(tl.int32))


@triton.jit
def write_of_chunks(out, x, n, k, count, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """The places of the k largest of each chunk, of ``count`` in all."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = tl.program_id(0).to(tl.int64) * ROWS * CHUNK
    place = tl.arange(0, ROWS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = place < n - base
    bits = magnitude_bits(tl.load(x + base + place, mask=inside, other=0))
    wanted = tl.maximum(tl.minimum(count - row * k, k), 0)
    taken = largest_of_rows(tl.where(inside, bits, -1), wanted, ROWS)
    at = (row * k)[:, None] + tl.cumsum(taken, 1) - taken
    tl.store(out + at, (base + place).to(tl.int32), mask=taken > 0)


@triton.jit
def widen_chunks(out, narrow, count, k, CHUNK: tl.constexpr, N: tl.constexpr):
    """The places of which these are the lower 16 bits."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    low = tl.load(narrow + place, mask=place < count, other=0).to(tl.int32) & 0xFFFF
    tl.store(out + place, (place // k * CHUNK & ~0xFFFF) | low, mask=place < count)


@triton.jit
def chosen(x, base, place, n, value, N: tl.constexpr):
    """1 for each element above a threshold in magnitude, or of codes (uint8) that equals one."""
    inside = place < n - base
    given = tl.load(x + base + place, mask=inside, other=0)
    if x.dtype.element_ty == tl.uint8:
        return (inside & (given == value)).to(tl.int32)
    return (inside & (tl.abs(given) > value)).to(tl.int32)


@triton.jit
def count_chosen(counts, x, n, value, N: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * N
    tl.store(counts + tl.program_id(0), tl.sum(chosen(x, base, tl.arange(0, N), n, value, N), 0))


@triton.jit
def write_chosen(out, ends, x, n, value, count, N: tl.constexpr):
    """The places of the first ``count``, behind those of the programs before: ``ends`` are sums of counts."""
    base = tl.program_id(0).to(tl.int64) * N
    place = tl.arange(0, N)
    taken = chosen(x, base, place, n, value, N)
    at = tl.load(ends + tl.program_id(0)) - tl.sum(taken, 0) + tl.cumsum(taken, 0) - taken
    tl.store(out + at, (base + place).to(tl.int32), mask=(taken > 0) & (at < count))


@triton.jit
def scatter_add(out, indices, values, n, k, weight, N: tl.constexpr):
    """Places outside of ``out`` are left out."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    index = tl.load(indices + place, mask=place < k, other=-1)
    value = tl.load(values + place, mask=place < k, other=0)
    inside = (index >= 0) & (index < n)
    kept = tl.load(out + index, mask=inside, other=0)
    tl.store(out + index, kept + value * weight, mask=inside)


@triton.jit
def scatter_one(out, indices, value, n, k, weight, N: tl.constexpr):
    """One value to all places; zeros where there is none."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    index = tl.load(indices + place, mask=place < k, other=-1)
    inside = (index >= 0) & (index < n)
    if value is None:
        tl.store(out + index, tl.full([N], 0, tl.float32), mask=inside)
    else:
        kept = tl.load(out + index, mask=inside, other=0)
        tl.store(out + index, kept + tl.load(value) * weight, mask=inside)
