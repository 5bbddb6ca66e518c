"""Kernels that find the largest elements by their digits, and add values at places."""

import triton
import triton.language as tl

from grace.kernels.triton.arithmetic import LOW31, magnitude_bits

FIRSTS, DIGITS, LASTS = tl.constexpr(128), tl.constexpr(1024), tl.constexpr(32)
"""Magnitudes have 31 bits: digits of 7, 10, 10 and 4; of the last one there is a 17th, of all larger magnitudes."""
SAMPLE = tl.constexpr(4096)
"""Elements of the sample that the guess is made from."""
TOTALS = tl.constexpr(128 + 2 * 1024)
KNOWN = tl.constexpr(128 + 2 * 1024 + 32)
"""Beginnings of a search's counts of last digits, and of what is known: how many elements are above the guess, and
equal it, the upper digits and the rank after each of three passes, how many are above a threshold, and the guess."""
STATE = tl.constexpr(128 + 2 * 1024 + 32 + 10)
"""Numbers (int32) of a search."""


@triton.jit
def digit_of(counts, k, BINS: tl.constexpr):
    """Return the digit of the k-th largest, given the count of each digit, and its rank among those of its digit."""
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # this digit or a larger one
    bins = tl.arange(0, BINS)
    digit = tl.max(tl.where(from_here >= k, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, counts, 0), 0)
    return digit, k - above


# -- a guess -----------------------------------------------------------------------------------------------------------


@triton.jit
def sampled(n):
    """Return the places of a sample, of all if there are not more; and which of them exist."""
    place = tl.arange(0, SAMPLE)
    # The place within a stride moves, lest a period of the tensor's be sampled alone.
    stride = tl.maximum(n // SAMPLE, 1)
    return place.to(tl.int64) * stride + place * 7919 % stride, place < n


@triton.jit
def guess(counts, bits, inside, n, k, least):
    """Begin a search: of a sample of n magnitudes the one that most likely hardly more than k elements are above; it is
    the k-th largest if all are sampled. Never less than ``least``."""
    # Programs of later launches add to these counts.
    for low in tl.static_range(0, STATE, DIGITS):
        place = low + tl.arange(0, DIGITS)
        tl.store(counts + place, tl.zeros([DIGITS], tl.int32), mask=place < STATE - 1)
    rank = k.to(tl.int32)
    if n > SAMPLE:
        rank = (k.to(tl.int64) * SAMPLE // n).to(tl.int32)
        rank += rank // 8 + 32  # four standard deviations
    found = tl.full([], 0, tl.int32)
    for shift in tl.static_range(24, -1, -8):
        alike = inside & ((bits >> shift >> 8) == found)
        digit, rank = digit_of(tl.histogram((bits >> shift) & 255, 256, mask=alike), rank, 256)
        found = (found << 8) | digit
    tl.store(counts + STATE - 1, tl.maximum(found, least))


@triton.jit
def listed_of(patterns, places, x, place, inside, guessed, many, tied, room):
    """List the elements above a guess, patterns and places, as far as there is room; return their number by now, and
    the number of those equal to it."""
    bits = magnitude_bits(x)
    taken = (inside & (bits > guessed)).to(tl.int32)
    at = many + tl.cumsum(taken, 0) - taken
    fits = (taken > 0) & (at < room)
    tl.store(patterns + at, x.to(tl.int32, bitcast=True), mask=fits)
    tl.store(places + at, place.to(tl.int16), mask=fits)
    return many + tl.sum(taken, 0), tied + tl.sum((inside & (bits == guessed)).to(tl.int32), 0)


@triton.jit
def report(counts, listed, ties, program, found, many, tied):
    """Add a program's findings to the search's counts."""
    # Sums of integers do not depend on the order of atomics.
    tl.atomic_add(counts + tl.arange(0, FIRSTS), found, mask=found > 0)
    tl.atomic_add(counts + KNOWN, many)
    tl.atomic_add(counts + KNOWN + 1, tied)
    tl.store(listed + program, many)
    tl.store(ties + program, tied)


@triton.jit
def check_guess(counts, k):
    """Return True if all of the k largest are above the guess, and True if the smallest of them is the guess."""
    above, equal = tl.load(counts + KNOWN), tl.load(counts + KNOWN + 1)
    return above >= k, (above < k) & (above + equal >= k)


# -- digit by digit ----------------------------------------------------------------------------------------------------


@triton.jit
def narrowed(counts, k, program, PASS: tl.constexpr):
    """Return the upper digits of the k-th largest that are known after so many passes; stored with its rank among those
    that have them."""
    state = counts + KNOWN + 2 * PASS
    if PASS == 1:
        prefix, rank = digit_of(tl.load(counts + tl.arange(0, FIRSTS)), k.to(tl.int32), FIRSTS)
    else:
        prefix, rank = tl.load(state - 2), tl.load(state - 1)
        found = tl.load(counts + FIRSTS + (PASS - 2) * DIGITS + tl.arange(0, DIGITS))
        digit, rank = digit_of(found, rank, DIGITS)
        prefix = prefix * DIGITS + digit
    if PASS == 3:
        _, is_guess = check_guess(counts, k)
        prefix = tl.where(is_guess, tl.load(counts + STATE - 1) >> 4, prefix)
    if program == 0:
        tl.store(state, prefix)
        tl.store(state + 1, rank)
    return prefix


@triton.jit
def read_candidates(source, low, many, wide, N: tl.constexpr):
    """Return the patterns of N candidates from ``low`` on, and which of them exist."""
    first, place = source + low, tl.arange(0, N)
    if (many - low >= N) & (wide != 0):
        bits = tl.load(tl.multiple_of(first, 16) + place)
    else:
        bits = tl.load(first + place, mask=place < many - low, other=0)
    return bits, place < many - low


@triton.jit
def candidates(patterns, listed, counts, x, n, k, program, steps, room, wide, N: tl.constexpr):
    """Return the address of a program's candidates, and their number: its list, or all of its elements; True if they
    are listed, and True if they may be read wide, as x may."""
    base, many = program.to(tl.int64) * steps * N, tl.load(listed + program)
    above, _ = check_guess(counts, k)
    is_listed = above & (many <= room)  # where lists begin is a multiple of 16
    all_of_them = tl.minimum(n - base, steps * N).to(tl.int32)
    whole = x.to(tl.pointer_type(tl.int32), bitcast=True) + base
    source = tl.where(is_listed, patterns + program.to(tl.int64) * room, whole)
    return source, tl.where(is_listed, many, all_of_them), is_listed, is_listed | (wide != 0)


@triton.jit
def counted(patterns, listed, counts, x, n, k, program, steps, room, wide, PASS: tl.constexpr, N: tl.constexpr):
    """Count the next digit of those whose upper ones are those of the k-th largest; nothing if that is the guess."""
    prefix, shift = narrowed(counts, k, program, PASS), 24 - 10 * PASS
    source, many, _, wide = candidates(patterns, listed, counts, x, n, k, program, steps, room, wide, N)
    _, is_guess = check_guess(counts, k)
    found = tl.zeros([DIGITS], tl.int32)
    for low in range(0, tl.where(is_guess, 0, many), N):
        bits, inside = read_candidates(source, low, many, wide, N)
        digits = (bits & LOW31) >> shift
        found += tl.histogram(digits & (DIGITS - 1), DIGITS, mask=inside & ((digits >> 10) == prefix))
    at = counts + FIRSTS + (PASS - 1) * DIGITS + tl.arange(0, DIGITS)
    tl.atomic_add(at, found, mask=found > 0)


@triton.jit
def counted_last(
    rows, patterns, listed, ties, counts, x, n, k, program, steps, room, wide, N: tl.constexpr
):  # fmt: skip
    """Count the last 4 bits, by each program for itself too, and the elements that are larger by their upper digits."""
    prefix, bins = narrowed(counts, k, program, 3), tl.arange(0, LASTS)
    source, many, _, wide = candidates(patterns, listed, counts, x, n, k, program, steps, room, wide, N)
    _, is_guess = check_guess(counts, k)
    found = tl.zeros([LASTS], tl.int32)
    if is_guess:
        found += tl.where(bins == 16, tl.load(listed + program), 0)
        found += tl.where(bins == (tl.load(counts + STATE - 1) & 15), tl.load(ties + program), 0)
    else:
        for low in range(0, many, N):
            bits, inside = read_candidates(source, low, many, wide, N)
            bits &= LOW31
            digit = tl.where((bits >> 4) > prefix, 16, bits & 15)
            found += tl.histogram(digit, LASTS, mask=inside & ((bits >> 4) >= prefix))
    tl.store(rows + program.to(tl.int64) * LASTS + bins, found.to(tl.int16))  # of at most 32768
    tl.atomic_add(counts + TOTALS + bins, found, mask=found > 0)


@triton.jit
def kth_and_before(counts, rows, k, program, P: tl.constexpr):
    """Return the k-th largest magnitude, and the number of its equals to take; the numbers of larger ones and equals
    that programs before this one have."""
    bins, before = tl.arange(0, LASTS), tl.zeros([LASTS], tl.int32)
    digit, rank = digit_of(tl.load(counts + TOTALS + bins), k.to(tl.int32), LASTS)
    digit = tl.minimum(digit, 15)  # of k = 0
    for low in range(0, program, P):
        other = low + tl.arange(0, P)
        at = other.to(tl.int64)[:, None] * LASTS + bins[None, :]
        # A count of 32768 was stored as a negative int16.
        before += tl.sum(tl.load(rows + at, mask=(other < program)[:, None], other=0).to(tl.int32) & 0xFFFF, 0)
    larger, equal = tl.sum(tl.where(bins > digit, before, 0), 0), tl.sum(tl.where(bins == digit, before, 0), 0)
    return tl.load(counts + KNOWN + 6) * 16 + digit, rank, larger, equal


@triton.jit
def taken_of(bits, inside, threshold, rank, larger_before, tied_before):
    """Return 1 for each that is among the largest, and its place among these: of those equal to the smallest of them
    the first ones; and the numbers of larger and equal ones."""
    larger, equal = (inside & (bits > threshold)).to(tl.int32), (inside & (bits == threshold)).to(tl.int32)
    ranks = tied_before + tl.cumsum(equal, 0)  # from 1
    at = larger_before + tl.cumsum(larger, 0) - larger + tl.minimum(ranks - equal, rank)
    return (larger > 0) | ((equal > 0) & (ranks <= rank)), at, tl.sum(larger, 0), tl.sum(equal, 0)


@triton.jit
def place_of(places, first, place, is_listed, inside):
    """Return the places of candidates among the elements of their program."""
    index = tl.load(places + first + place, mask=is_listed & inside, other=0).to(tl.int32) & 0xFFFF
    return tl.where(is_listed, index, place)


@triton.jit(do_not_specialize=("k",))
def guess_largest(counts, x, n, k):
    index, inside = sampled(n)
    guess(counts, magnitude_bits(tl.load(x + index, mask=inside, other=0)), inside, n, k, 0)


@triton.jit(do_not_specialize=("steps", "room"))
def list_largest(patterns, places, listed, ties, counts, x, n, steps, room, N: tl.constexpr):
    """List the elements above the guess, and count the first digit of all elements."""
    program, place, guessed = tl.program_id(0), tl.arange(0, N), tl.load(counts + STATE - 1)
    base, first = program.to(tl.int64) * steps * N, program.to(tl.int64) * room
    found, many, tied = tl.zeros([FIRSTS], tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for step in range(steps):
        inside = place < n - base - step * N
        given = tl.load(x + base + step * N + place, mask=inside, other=0)
        found += tl.histogram(magnitude_bits(given) >> 24, FIRSTS, mask=inside)
        lists = patterns + first, places + first, given, step * N + place
        many, tied = listed_of(*lists, inside, guessed, many, tied, room)
    report(counts, listed, ties, program, found, many, tied)


@triton.jit(do_not_specialize=("k", "steps", "room"))
def count_digit(patterns, listed, counts, x, n, k, steps, room, wide, PASS: tl.constexpr, N: tl.constexpr):
    counted(patterns, listed, counts, x, n, k, tl.program_id(0), steps, room, wide, PASS, N)


@triton.jit(do_not_specialize=("k", "steps", "room"))
def count_last(rows, patterns, listed, ties, counts, x, n, k, steps, room, wide, N: tl.constexpr):
    counted_last(rows, patterns, listed, ties, counts, x, n, k, tl.program_id(0), steps, room, wide, N)


@triton.jit(do_not_specialize=("k", "steps", "room"))
def write_largest(
    out, rows, places, patterns, listed, counts, x, n, k, steps, room, wide, N: tl.constexpr, P: tl.constexpr
):
    """Write the places of the k largest, ascending."""
    program = tl.program_id(0)
    threshold, rank, larger_before, tied_before = kth_and_before(counts, rows, k, program, P)
    source, many, is_listed, wide = candidates(patterns, listed, counts, x, n, k, program, steps, room, wide, N)
    base, first = program.to(tl.int64) * steps * N, program.to(tl.int64) * room
    for low in range(0, many, N):
        bits, inside = read_candidates(source, low, many, wide, N)
        index = base + place_of(places, first, low + tl.arange(0, N), is_listed, inside)
        taken, at, larger, equal = taken_of(bits & LOW31, inside, threshold, rank, larger_before, tied_before)
        tl.store(out + at, index.to(tl.int32), mask=taken)
        larger_before, tied_before = larger_before + larger, tied_before + equal


@triton.jit
def kth_of_rows(bits, wanted, ROWS: tl.constexpr):
    """Return, for each row, a pattern that so many of its magnitudes reach, and no others but equal ones, by
    halving."""
    low, high = tl.zeros([ROWS], tl.int32), tl.maximum(tl.max(bits, 1), 0)
    while tl.max((low < high).to(tl.int32), 0) > 0:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        count = tl.sum((bits >= middle[:, None]).to(tl.int32), 1)
        high = tl.where(count == wanted, middle, tl.where(count > wanted, high, middle - 1))
        low = tl.where(count >= wanted, middle, low)
    return low


@triton.jit
def largest_of_rows(bits, wanted, ROWS: tl.constexpr):
    """Return 1 for each of the largest magnitudes of a row, of equal ones the first; negative ones do not count."""
    kth = kth_of_rows(bits, wanted, ROWS)
    larger, equal = (bits > kth[:, None]).to(tl.int32), (bits == kth[:, None]).to(tl.int32)
    ties = wanted - tl.sum(larger, 1)
    return larger | (equal & (tl.cumsum(equal, 1) <= ties[:, None]).to(tl.int32))


@triton.jit
def scatter_add(out, indices, values, n, k, weight, N: tl.constexpr):
    """Add values at places; those outside of ``out`` are left out."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    index = tl.load(indices + place, mask=place < k, other=-1)
    value = tl.load(values + place, mask=place < k, other=0)
    inside = (index >= 0) & (index < n)
    kept = tl.load(out + index, mask=inside, other=0)
    tl.store(out + index, kept + value * weight, mask=inside)
