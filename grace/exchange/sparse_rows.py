"""Sparse gradients: some rows of a variable, and their numbers."""

from typing import Any, NamedTuple

import numpy as np

from grace.core.compressor import Tensor
from grace.kernels import kernels_of

NOTHING = -1
"""The row number of a rank that has no rows."""


class SparseRows(NamedTuple):
    """Rows of a variable: ``values`` of shape (n, ...), and their n numbers (int32 or int64)."""

    values: Tensor
    rows: Tensor

    def between(self, start: int, stop: int) -> "SparseRows":
        """The rows in [start, stop), numbered from ``start``.

        >>> import numpy as np
        >>> SparseRows(np.float32([[1], [2], [4]]), np.array([3, 0, 3])).between(2, 5).rows
        array([1, 1])
        """
        inside = (self.rows >= start) & (self.rows < stop)
        return SparseRows(self.values[inside], self.rows[inside] - start)


def summed(slices: SparseRows) -> SparseRows:
    """The same with distinct rows, ascending, in float32; one zero row of number -1 if there are none.

    >>> import numpy as np
    >>> summed(SparseRows(np.float32([[1], [2], [4]]), np.array([3, 0, 3])))
    SparseRows(values=array([[2.],
           [5.]], dtype=float32), rows=array([0, 3], dtype=int32))
    """
    k = kernels_of(slices.values)
    shape = tuple(slices.values.shape)
    if shape[0] == 0:
        return SparseRows(k.zeros((1, *shape[1:]), "float32", slices.values), k.full([NOTHING], "int32", slices.values))
    rows, places = k.distinct(slices.rows)
    out = k.zeros((rows.shape[0], *shape[1:]), "float32", slices.values)
    return SparseRows(k.add_rows(out, places, k.cast(slices.values, "float32"), 1.0), k.cast(rows, "int32"))


def add(a: Any, b: Any) -> Any:
    """The sum of two means: tensors, or rows of sparse ones."""
    if isinstance(a, SparseRows):
        k = kernels_of(a.values)
        return SparseRows(k.concat([a.values, b.values], 0), k.concat([a.rows, b.rows], 0))
    return kernels_of(a).add(a, b)


def scaled(value: Any, factor: float) -> Any:
    """A tensor, or rows, times a factor, in its own dtype."""
    if factor == 1:
        return value
    if isinstance(value, SparseRows):
        return SparseRows(scaled(value.values, factor), value.rows)
    product = value * factor  # which NumPy makes a scalar where the array is 0-d, and float32 of bfloat16
    return np.asarray(product, value.dtype) if isinstance(value, np.ndarray) else product


def in_units(value: Any, factor: float) -> Any:
    """A mean, of a tensor or of rows, in the units of another loss scale: in float32."""
    if isinstance(value, SparseRows):
        return SparseRows(in_units(value.values, factor), value.rows)
    return kernels_of(value).combine(factor, value, 0.0, value)


def values_of(gradient: Any) -> Any:
    """The tensor that a gradient's values are in."""
    return gradient.values if isinstance(gradient, SparseRows) else gradient
