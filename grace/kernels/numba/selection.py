"""Elements of large magnitude, as compiled loops: exact top-k, and what exceeds a threshold.

Magnitudes are compared as bit patterns, in whose order they are: NaN above Inf. 32 elements are looked at together, and
then one by one those that were found among them.
"""

import numpy as np

from grace.kernels.numba.loops import INF_BITS, LOW31, TILE, _max_bits, compiled, f32, i32, u32
from grace.kernels.numba.simd import LANES, float_of, lowest, magnitudes_within, part, pattern_of

END = u32(0x80000000)  # above all magnitudes
SAMPLED = 1 << 14  # elements from which on a threshold is guessed
LOWERED = f32(0.9)  # what the last threshold is multiplied by to guess the next one


@compiled
def _count_digits(bits, prefix, known, width):
    """Count the values of the next ``width`` bits of magnitudes whose upper ``31 - known`` bits are the prefix."""
    shift, mask = u32(known - width), u32((1 << width) - 1)
    tables = np.zeros((4, 1 << width), np.uint32)  # an element need not wait for the one before it to be counted
    full = bits.size // LANES * LANES
    low, span = u32(prefix << u32(known)), u32(1 << known)
    if known == 31:  # of the first digit all elements count
        for i in range(0, full, 4):
            tables[0, (bits[i] >> shift) & mask] += 1
            tables[1, (bits[i + 1] >> shift) & mask] += 1
            tables[2, (bits[i + 2] >> shift) & mask] += 1
            tables[3, (bits[i + 3] >> shift) & mask] += 1
    else:
        for start in range(0, full, LANES):
            found = magnitudes_within(bits, start, low, span)
            while found:
                tables[0, (bits[start + lowest(found)] >> shift) & mask] += 1
                found = u32(found & (found - u32(1)))
    for i in range(full, bits.size):
        if u32((bits[i] & LOW31) - low) < span:
            tables[0, (bits[i] >> shift) & mask] += 1
    return tables[0] + tables[1] + tables[2] + tables[3]


@compiled
def _kth_largest(bits, k):
    """Return the bit pattern of the k-th largest magnitude, and the number of larger ones: radix select."""
    prefix, known, remaining, larger = u32(0), 31, k, 0
    while known:
        # Fewer passes over many elements; for few ones 2^11 counts would take longer than a pass.
        width = min(known, 11 if bits.size > 4096 else 8)
        counts = _count_digits(bits, prefix, known, width)
        digit = (1 << width) - 1
        while counts[digit] < remaining:
            remaining -= counts[digit]
            larger += counts[digit]
            digit -= 1
        prefix = u32(u32(prefix << u32(width)) | u32(digit))
        known -= width
    return prefix, larger


@compiled
def _collect(bits, threshold, ties, out):
    """Write the positions above the threshold and the first ``ties`` positions at it, ascending."""
    count, full, span = 0, bits.size // LANES * LANES, u32(END - threshold)
    for start in range(0, full, LANES):
        found = magnitudes_within(bits, start, threshold, span)
        while found:
            i = start + lowest(found)
            found = u32(found & (found - u32(1)))
            if bits[i] & LOW31 == threshold:
                if ties == 0:
                    continue
                ties -= 1
            out[count] = i
            count += 1
        if count == out.size:
            return
    for i in range(full, bits.size):
        if (bits[i] & LOW31 > threshold) or (bits[i] & LOW31 == threshold and ties > 0):
            ties -= bits[i] & LOW31 == threshold
            out[count] = i
            count += 1


@compiled
def _filter_part(bits, threshold, first, indices, found, count):
    """Append positions and patterns at or above the threshold; returns how many there are then."""
    full, span = bits.size // LANES * LANES, u32(END - threshold)
    for start in range(0, full, LANES):
        lanes = magnitudes_within(bits, start, threshold, span)
        i = start + lowest(lanes)  # most blocks have none or one, and a branch would often be foreseen wrongly
        indices[count], found[count] = first + i, bits[i] & LOW31
        count += lanes != u32(0)
        lanes = u32(lanes & (lanes - u32(1)))
        while lanes:
            i = start + lowest(lanes)
            indices[count], found[count] = first + i, bits[i] & LOW31
            count += 1
            lanes = u32(lanes & (lanes - u32(1)))
    for i in range(full, bits.size):
        if bits[i] & LOW31 >= threshold:
            indices[count], found[count] = first + i, bits[i] & LOW31
            count += 1
    return count


@compiled
def _filter(bits, threshold, room, indices, found):
    """Write positions and patterns at or above the threshold; return their number, or more than ``room`` if there is no
    room for all of them."""
    count = 0
    for low in range(0, bits.size, TILE):
        if count <= room:
            count = _filter_part(part(bits, low, min(low + TILE, bits.size)), threshold, low, indices, found, count)
    return count


@compiled
def _room(k):
    """Return the number of elements that may be listed for k: a guess is most likely a little too low."""
    return 4 * k + 1024


@compiled
def _stride(n, k, widest):
    """Return the distance of the elements of a sample of n, of which about k are searched."""
    return max(1, min(n // 2048, k // 64, widest))


@compiled
def _guess(bits, k, sample, stride):
    """Return a pattern that a little more than k magnitudes most likely reach, by a sample of evenly spread ones."""
    size, shift = bits.size // stride, 0
    for j in range(size):
        sample[j] = bits[j * stride + shift]
        # The place within a stride moves, lest a period of the tensor's be sampled alone.
        shift += 7 % stride
        shift -= stride if shift >= stride else 0
    expected = size * k / bits.size
    # Four standard deviations more, so that hardly ever fewer than k reach the guess.
    rank = min(size, i32(expected + 4 * np.sqrt(expected) + 4))
    guess, _ = _kth_largest(part(sample, 0, size), rank)
    return guess


@compiled
def _take_largest(bits, k, out):
    """Write the positions of the k largest, ascending; return the smallest one's pattern."""
    kth, larger = _kth_largest(bits, k)
    _collect(bits, kth, k - larger, out)
    return kth


@compiled
def _take_listed(indices, found, count, k, out):
    """Write the positions of the k largest of ``count`` listed elements; return the smallest one's pattern."""
    kth = _take_largest(part(found, 0, count), k, out)
    for j in range(k):
        out[j] = indices[out[j]]
    return kth


@compiled
def _above(bits, threshold, out):
    """Write the positions of the finite and infinite magnitudes above a bit pattern; return their number."""
    count, full, low = 0, bits.size // LANES * LANES, u32(threshold + u32(1))
    span = u32(INF_BITS - threshold) if threshold < INF_BITS else u32(0)  # nothing is above NaN
    for start in range(0, full, LANES):
        lanes = magnitudes_within(bits, start, low, span)
        out[count] = start + lowest(lanes)  # without a branch, as in _filter_part
        count += lanes != u32(0)
        lanes = u32(lanes & (lanes - u32(1)))
        while lanes:
            out[count] = start + lowest(lanes)
            count += 1
            lanes = u32(lanes & (lanes - u32(1)))
    for i in range(full, bits.size):
        if u32((bits[i] & LOW31) - low) < span:
            out[count] = i
            count += 1
    return count


@compiled
def _kth_of_few(bits, k):
    """Return a pattern that the k largest magnitudes reach, and no others but equal ones, by halving: few elements are
    in the cache, and no memory is allocated."""
    low, high = u32(0), _max_bits(bits)
    while low < high:
        middle, count = u32(low + (high - low + 1) // 2), u32(0)
        for i in range(bits.size):
            count = u32(count + u32((bits[i] & LOW31) >= middle))
        if count == k:
            return middle
        if count > k:
            low = middle
        else:
            high = u32(middle - u32(1))
    return low


@compiled
def _count_above(bits, pattern):
    count = u32(0)
    for i in range(bits.size):
        count = u32(count + u32((bits[i] & LOW31) > pattern))
    return i32(count)


@compiled
def _take_chunk(bits, guess, first, indices, found, out):
    """Write the positions of a chunk's largest, as many as ``out`` has room for; return the smallest one's pattern.

    Only elements that reach a guess are searched, if there are enough of them.
    """
    count = _filter_part(bits, guess, first, indices, found, 0)
    whole = count < out.size
    among = bits if whole else part(found, 0, count)
    kth = _kth_of_few(among, out.size)
    _collect(among, kth, out.size - _count_above(among, kth), out)
    for j in range(out.size):
        out[j] = first + out[j] if whole else indices[out[j]]
    return kth


@compiled
def _topk_chunks(bits, chunk, k):
    count = -(-k * bits.size // chunk)
    out, indices, found = np.empty(count, np.int32), np.empty(chunk + 1, np.int32), np.empty(chunk + 1, np.uint32)
    guess, done = u32(0), 0
    for low in range(0, bits.size, chunk):
        mine = min(k, count - done)
        here = part(bits, low, min(low + chunk, bits.size))
        kth = _take_chunk(here, guess, low, indices, found, part(out, done, done + mine))
        guess, done = pattern_of(float_of(kth) * LOWERED), done + mine
    return out


@compiled
def _topk(bits, k):
    """Return exact top-k, as a rule in one pass over the tensor.

    1. Guess a threshold that a little more than k elements reach.
    2. List these candidates in one pass; 3. select exactly among them. If the guess failed (too few
    candidates, or far too many), select over the whole tensor instead: the result is the same.
    """
    n, out = bits.size, np.empty(k, np.int32)
    if k * 8 <= n and n >= SAMPLED:
        stride = _stride(n, k, 512)
        guess = _guess(bits, k, np.empty(n // stride, np.uint32), stride)
        room = _room(k)
        indices, found = np.empty(room + TILE + 1, np.int32), np.empty(room + TILE + 1, np.uint32)
        count = _filter(bits, guess, room, indices, found)
        if k <= count <= room:
            _take_listed(indices, found, count, k, out)
            return out
    _take_largest(bits, k, out)
    return out
