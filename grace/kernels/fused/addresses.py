"""What the codecs of whole buckets share: arrays at addresses, and x = factor * residual + gradient."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from grace.kernels.fused.lanes import intrinsic, part
from grace.kernels.fused.loops import compiled, u64

GRADIENT, KEPT, NEXT = 0, 1, 2
"""Columns of addresses."""
SIZE, FIRST, SECOND, MORE = 0, 1, 2, 3
"""Columns of numbers: elements, byte offsets of the payload's tensors, and a number of the method's."""


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


@njit(inline="always")
def _at(address, n, dtype):
    return carray(_pointer(u64(address)), (n,), dtype)


@compiled
def _add_kept(x, gradient, kept, factor):
    for i in range(x.size):
        x[i] = factor * kept[i] + gradient[i]


@njit(inline="always")
def _compensated(row, factor, n, low, high):
    """x between two elements: in its place as the next residual, or the gradient itself."""
    gradient = part(_at(row[GRADIENT], n, np.float32), low, high)
    if row[NEXT] == 0:
        return gradient
    x = part(_at(row[NEXT], n, np.float32), low, high)
    if row[KEPT] == 0:
        x[:] = gradient
    else:
        _add_kept(x, gradient, part(_at(row[KEPT], n, np.float32), low, high), factor)
    return x
