"""Arrays at addresses, and x = a * residual + b * gradient, which all codecs of whole buckets share."""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from grace.kernels.numba.loops import LOW31, _max_bits, compiled, u32, u64
from grace.kernels.numba.simd import intrinsic, part, pattern_of, prefetch, prefetch_to_write

GRADIENT, KEPT, NEXT = 0, 1, 2
"""Columns of addresses."""
SIZE, FIRST, SECOND, MORE = 0, 1, 2, 3
"""Columns of numbers: elements, byte offsets of the payload's tensors, and a number of the method's."""

LINE = 16
"""Elements of a cache line."""
AHEAD = 128
"""Elements that are computed between requests for memory: so few that requests do not wait for each other."""


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


@njit(inline="always")
def _at(address, n, dtype):
    # A view of memory that a framework owns: nothing is copied, or freed with it.
    return carray(_pointer(u64(address)), (n,), dtype)


@compiled
def _add_kept(x, gradient, kept, a, b):
    """Write x, and return its largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(x.size):
        value = a * kept[i] + b * gradient[i]
        x[i] = value
        magnitude = u32(pattern_of(value) & LOW31)
        largest = magnitude if magnitude > largest else largest
    return largest


@compiled
def _scaled(x, gradient, b):
    """Write x where nothing was kept, and return its largest magnitude as a bit pattern."""
    largest = u32(0)
    for i in range(x.size):
        value = b * gradient[i]
        x[i] = value
        magnitude = u32(pattern_of(value) & LOW31)
        largest = magnitude if magnitude > largest else largest
    return largest


@njit(inline="always")
def _compensated(row, factors, n, low, high):
    """Return x between two elements, in its place as the next residual or the gradient itself, and its largest
    magnitude as a bit pattern."""
    gradient = part(_at(row[GRADIENT], n, np.float32), low, high)
    if row[NEXT] == 0:  # no residual is kept: x is the gradient itself
        return gradient, _max_bits(gradient.view(np.uint32))
    x = part(_at(row[NEXT], n, np.float32), low, high)
    if row[KEPT] == 0:  # the first step
        return x, _scaled(x, gradient, factors[1])
    return x, _add_kept(x, gradient, part(_at(row[KEPT], n, np.float32), low, high), factors[0], factors[1])


@njit(inline="always")
def _x_of(row, n):
    """Return all of x, once :func:`_compensated` has computed it."""
    return _at(row[GRADIENT] if row[NEXT] == 0 else row[NEXT], n, np.float32)


@compiled
def _fetch_ahead(row, low, high):
    """Request the memory of elements that :func:`_compensated` takes soon; they may lie beyond the end."""
    for i in range(low, high, LINE):
        place = u64(4 * i)
        prefetch(row[GRADIENT] + place)
        if row[NEXT] != 0:
            prefetch_to_write(row[NEXT] + place)
        if row[KEPT] != 0:
            prefetch(row[KEPT] + place)
