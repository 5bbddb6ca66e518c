"""What the codecs of whole buckets share: arrays at addresses, and x = a * residual + b * gradient."""

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
def _add_kept(x, gradient, kept, a, b):
    for i in range(x.size):
        x[i] = a * kept[i] + b * gradient[i]


@compiled
def _scaled(x, gradient, b):
    for i in range(x.size):
        x[i] = b * gradient[i]


@njit(inline="always")
def _compensated(row, factors, n, low, high):
    """x between two elements: in its place as the next residual, or the gradient itself."""
    gradient = part(_at(row[GRADIENT], n, np.float32), low, high)
    if row[NEXT] == 0:
        return gradient
    x = part(_at(row[NEXT], n, np.float32), low, high)
    if row[KEPT] == 0:
        _scaled(x, gradient, factors[1])
    else:
        _add_kept(x, gradient, part(_at(row[KEPT], n, np.float32), low, high), factors[0], factors[1])
    return x
