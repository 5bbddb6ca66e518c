"""Sparse gradients: rows of a variable, and their numbers."""

from typing import NamedTuple

import numpy as np

from grace.core.compressor import Tensor
from grace.kernels import kernels_of

NOTHING = -1
"""Row number that a rank without rows sends."""


class SparseRows(NamedTuple):
    """Rows of a variable: ``values`` of shape (n, ...), and their n numbers (int32 or int64)."""

    values: Tensor
    rows: Tensor

    def slice_rows(self, start: int, stop: int) -> "SparseRows":
        """Return the rows in [start, stop), numbered from ``start``.

        >>> import numpy as np
        >>> SparseRows(np.float32([[1], [2], [4]]), np.array([3, 0, 3])).slice_rows(2, 5).rows
        array([1, 1])
        """
        inside = (self.rows >= start) & (self.rows < stop)
        return SparseRows(self.values[inside], self.rows[inside] - start)


Gradient = Tensor | SparseRows
"""Gradient, or mean, of a variable: dense, or rows."""


def sum_rows(slices: SparseRows) -> SparseRows:
    """Return rows with duplicates added up, ascending, in float32; one zero row of number -1 if there are none.

    >>> import numpy as np
    >>> sum_rows(SparseRows(np.float32([[1], [2], [4]]), np.array([3, 0, 3])))
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


def add(a: Gradient, b: Gradient) -> Gradient:
    """Return the sum of two means: tensors, or sparse rows."""
    if isinstance(a, SparseRows):
        k = kernels_of(a.values)
        return SparseRows(k.concat([a.values, b.values], 0), k.concat([a.rows, b.rows], 0))
    return kernels_of(a).add(a, b)


def scaled(value: Gradient, factor: float) -> Gradient:
    """Return a tensor, or sparse rows, times a factor, in its own dtype."""
    if factor == 1:
        return value
    if isinstance(value, SparseRows):
        return SparseRows(scaled(value.values, factor), value.rows)
    product = value * factor  # NumPy makes a scalar of a 0-d array, and float32 of bfloat16: convert back
    return np.asarray(product, value.dtype) if isinstance(value, np.ndarray) else product


def in_units(value: Gradient, factor: float) -> Gradient:
    """Return a mean, a tensor or sparse rows, times ``factor``, by which the loss scale changed; in float32."""
    if isinstance(value, SparseRows):
        return SparseRows(in_units(value.values, factor), value.rows)
    return kernels_of(value).combine(factor, value, 0.0, value)


def values_of(gradient: Gradient) -> Tensor:
    """Return the tensor of a gradient's values: the gradient itself, or the values of sparse rows."""
    return gradient.values if isinstance(gradient, SparseRows) else gradient
