"""Tensors of variables between a graph and its Python functions."""

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import tensorflow as tf

from grace.core.variable import Variable
from grace.exchange.sparse_rows import SparseRows
from grace.tensorflow.sharding import Gradient, Pair

T = TypeVar("T")


def concatenated(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the items of all lists as one list.

    >>> concatenated([[1], [2, 3]])
    [1, 2, 3]
    """
    return [item for some in lists for item in some]


def split_by_counts(items: Sequence[T], counts: Sequence[int]) -> list[Sequence[T]]:
    """Split items into lists of these lengths.

    >>> split_by_counts([1, 2, 3], [1, 2])
    [[1], [2, 3]]
    """
    return [items[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


@functools.cache
def flags() -> list[tf.Tensor]:
    """Return the tensors False and True, made once: to make a tensor takes as long as to compress a small one."""
    return [tf.constant(False), tf.constant(True)]


def zeros(variable: Variable) -> Gradient:
    """Return zeros of a variable's shape; no rows for a sparse variable."""
    if variable.sparse:
        return SparseRows(tf.zeros([0, *variable.shape[1:]], tf.float32), tf.zeros([0], tf.int64))
    return tf.zeros(variable.shape, variable.dtype)


def flattened(variable: Variable, value: Gradient | None) -> list[tf.Tensor]:
    """Return a variable's result, None if no rank had a gradient, as the tensors that :func:`dtypes_of` lists."""
    found = flags()[value is not None]
    if value is None:
        value = zeros(variable)
    if isinstance(value, SparseRows):
        return [tf.cast(value.values, tf.float32), tf.cast(value.rows, tf.int32), found]
    # tf.cast takes as long as to compress a small tensor, also where it has nothing to do.
    return [value if value.dtype.name == variable.dtype else tf.cast(value, variable.dtype), found]


def dtypes_of(variables: Sequence[Variable]) -> list[tf.DType]:
    """Return the dtypes of what a Python function returns to the graph for these variables: each variable's value (and
    rows), in float32 or its own dtype, and a flag that is True if any rank had a gradient."""
    kinds: list[tf.DType] = []
    for variable in variables:
        kinds += [tf.float32, tf.int32] if variable.sparse else [tf.as_dtype(variable.dtype)]
        kinds.append(tf.bool)
    return kinds


def packed(variables: Sequence[Variable], flat: Sequence[tf.Tensor]) -> dict[str, Pair]:
    """Return the tensors that such a function returned to the graph, as pairs by the variables' names."""
    rest, pairs = iter(flat), {}
    for variable in variables:
        tensor = next(rest)
        value: Gradient = tensor
        if variable.sparse:
            tensor.set_shape([None, *variable.shape[1:]])
            rows = next(rest)
            rows.set_shape([None])
            value = SparseRows(tensor, rows)
        else:
            tensor.set_shape(variable.shape)
        found = next(rest)
        found.set_shape([])
        pairs[variable.name] = (value, found)
    return pairs
