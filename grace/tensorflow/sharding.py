"""Shards of TensorFlow's tensors, and tensors joined from shards."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Union

import tensorflow as tf

from grace.exchange.sparse_rows import SparseRows
from grace.session.sharding import Shard

Gradient = Union["tf.Tensor", SparseRows]
"""Gradient, or mean, of a variable or shard as the exchange takes it: dense, or rows."""
Flag = Union[bool, "tf.Tensor"]
"""True if any rank had a gradient: a bool, or a scalar tensor where a graph computes it."""
Pair = tuple[Gradient | None, Flag]
"""Mean of one variable or shard, and the flag; the mean is None where no rank had a gradient."""


class Mean(NamedTuple):
    """Mean (or sum) over ranks of one variable's gradients.

    ``found`` is True if any rank had a gradient: a bool, or a scalar tensor where a graph computes it. ``value`` (a
    tensor or tf.IndexedSlices) is zeros if no rank had one, or None where that is known.
    """

    value: "tf.Tensor | tf.IndexedSlices | None"
    found: Flag


def cut(shard: Shard, value: Gradient) -> Gradient:
    """Return a shard of a variable's tensor, or of its rows.

    >>> from grace.communicators import Allreduce
    >>> from grace.core.variable import Variable
    >>> part = Shard(Variable("w/part_1", (2,)), Variable("w", (5,)), Allreduce(), axis=0, start=3, stop=5)
    >>> cut(part, tf.constant([1, 2, 3, 4, 5])).numpy()
    array([4, 5], dtype=int32)
    """
    if shard.axis is None:
        return value
    if isinstance(value, SparseRows):
        inside = (value.rows >= shard.start) & (value.rows < shard.stop)
        return SparseRows(tf.boolean_mask(value.values, inside), tf.boolean_mask(value.rows, inside) - shard.start)
    return shard.slice_of(value)


def put(shard: Shard, variable: tf.Variable, value: tf.Tensor) -> None:
    """Write a shard of a variable."""
    if shard.axis is not None:
        before, _, behind = tf.split(
            tf.convert_to_tensor(variable),
            [shard.start, shard.stop - shard.start, variable.shape[shard.axis] - shard.stop],
            axis=shard.axis,
        )
        value = tf.concat([before, value, behind], shard.axis)
    variable.assign(tf.cast(value, variable.dtype))


def joined(shards: Sequence[Shard], pairs: dict[str, Pair], own: Callable[[Shard], Pair]) -> Pair:
    """Return a variable's mean, joined from those of its shards.

    Args:
        shards: all shards of one variable, in order.
        pairs: means by the shards' names; a value of None is no mean.
        own: returns this rank's own gradient of a shard, for shards that are not exchanged.
    """
    got = [pairs[p.variable.name] if p.variable.name in pairs else own(p) for p in shards]
    if shards[0].axis is None:
        return got[0]
    flags = [found for _, found in got]
    found = any(flags) if all(isinstance(flag, bool) for flag in flags) else tf.reduce_any(tf.stack(flags))
    if all(value is None for value, _ in got):
        return None, False
    if shards[0].whole.sparse:
        parts = [shard.to_whole(value) for shard, (value, _) in zip(shards, got, strict=True) if value is not None]
        rows = tf.concat([tf.cast(part.rows, tf.int32) for part in parts], 0)
        return SparseRows(tf.concat([part.values for part in parts], 0), rows), found
    dtype = next(value.dtype for value, _ in got if value is not None and not isinstance(value, SparseRows))
    values = [
        tf.zeros(shard.variable.shape, dtype) if value is None else tf.cast(value, dtype)
        for shard, (value, _) in zip(shards, got, strict=True)
    ]
    return tf.concat(values, shards[0].axis), found
