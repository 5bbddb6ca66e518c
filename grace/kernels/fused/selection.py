"""Elements of large magnitude, as compiled loops: exact top-k, and what exceeds a threshold.

Magnitudes are compared as bit patterns, in whose order they are: NaN above Inf. 32 elements are looked at together, and
then one by one those that were found among them.
"""

import numpy as np

from grace.kernels.fused.lanes import LANES, lowest, magnitudes_within
from grace.kernels.fused.loops import INF_BITS, LOW31, compiled, i32, u32

END = u32(0x80000000)  # above all magnitudes


@compiled
def _count_digits(bits, prefix, known, width):
    """Of the magnitudes whose upper ``31 - known`` bits are the prefix: how often the next ``width`` bits are what."""
    shift, mask = u32(known - width), u32((1 << width) - 1)
    tables = np.zeros((4, 1 << width), np.uint32)  # an element need not wait for the one before it to be counted
    full = bits.size // LANES * LANES
    low, span = u32(prefix << u32(known)), u32(1 << known)
    if known == 31:
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
    """The bit pattern of the k-th largest magnitude, and how many are larger: radix select."""
    prefix, known, remaining, larger = u32(0), 31, k, 0
    while known:
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
    """Positions above the threshold and the first ``ties`` positions at it, ascending."""
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
def _filter(bits, threshold, indices, found):
    """Positions and patterns of magnitudes at or above the threshold; -1 when there are too many."""
    count, full, span = 0, bits.size // LANES * LANES, u32(END - threshold)
    most = indices.size - LANES
    for start in range(0, full, LANES):
        lanes = magnitudes_within(bits, start, threshold, span)
        if count > most:
            return -1
        i = start + lowest(lanes)  # most blocks have none or one, and a branch would often be foreseen wrongly
        indices[count], found[count] = i, bits[i] & LOW31
        count += lanes != u32(0)
        lanes = u32(lanes & (lanes - u32(1)))
        while lanes:
            i = start + lowest(lanes)
            indices[count], found[count] = i, bits[i] & LOW31
            count += 1
            lanes = u32(lanes & (lanes - u32(1)))
    if count > most:
        return -1
    for i in range(full, bits.size):
        if bits[i] & LOW31 >= threshold:
            indices[count], found[count] = i, bits[i] & LOW31
            count += 1
    return count


@compiled
def _above(bits, threshold, out):
    """Positions of the finite and infinite magnitudes above a bit pattern; returns how many."""
    count, full, low = 0, bits.size // LANES * LANES, u32(threshold + u32(1))
    span = u32(INF_BITS - threshold) if threshold < INF_BITS else u32(0)  # nothing is above NaN
    for start in range(0, full, LANES):
        lanes = magnitudes_within(bits, start, low, span)
        out[count] = start + lowest(lanes)  # as above
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
def _topk(bits, k):
    """Exact top-k in one pass over the tensor, as a rule.

    1. Guess a threshold that a little more than k elements reach, from an evenly spread sample.
    2. Collect those candidates in one pass; 3. select exactly among them. If the guess failed (too few
    candidates, or far too many), select over the whole tensor instead: the result is the same.
    """
    n, out = bits.size, np.empty(k, np.int32)
    if k * 8 <= n and n >= 1 << 14:
        stride = max(1, min(n // 2048, k // 64, 512))
        sample, shift = np.empty(n // stride, np.uint32), 0
        for j in range(sample.size):
            sample[j] = bits[j * stride + shift]
            shift += 7 % stride
            shift -= stride if shift >= stride else 0
        expected = sample.size * k / n
        rank = min(sample.size, i32(expected + 4 * np.sqrt(expected) + 4))
        guess, _ = _kth_largest(sample, rank)
        capacity = min(n, 4 * k + 1024) + LANES
        indices, found = np.empty(capacity, np.int32), np.empty(capacity, np.uint32)
        count = _filter(bits, guess, indices, found)
        if count >= k:
            threshold, larger = _kth_largest(found[:count], k)
            _collect(found[:count], threshold, k - larger, out)
            for j in range(k):
                out[j] = indices[out[j]]
            return out
    threshold, larger = _kth_largest(bits, k)
    _collect(bits, threshold, k - larger, out)
    return out
