"""Pieces of TensorFlow's tensors, and tensors of pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from grace.exchange.sparse_rows import Slices
from grace.session.sharding import Piece

Pair = tuple[Any, Any]
"""What an exchange brought for one variable or piece, and whether any rank had a gradient."""


def cut(piece: Piece, value: Any) -> Any:
    """A piece of a variable's tensor, or of its rows.

    >>> from grace.communicators import Allreduce
    >>> from grace.core.variable import Variable
    >>> part = Piece(Variable("w/part_1", (2,)), Variable("w", (5,)), Allreduce(), axis=0, start=3, stop=5)
    >>> cut(part, tf.constant([1, 2, 3, 4, 5])).numpy()
    array([4, 5], dtype=int32)
    """
    if piece.axis is None:
        return value
    if isinstance(value, Slices):
        inside = (value.rows >= piece.start) & (value.rows < piece.stop)
        return Slices(tf.boolean_mask(value.values, inside), tf.boolean_mask(value.rows, inside) - piece.start)
    return piece.of(value)


def put(piece: Piece, variable: Any, value: tf.Tensor) -> None:
    """Write a piece of a variable."""
    if piece.axis is not None:
        before, _, behind = tf.split(
            tf.convert_to_tensor(variable),
            [piece.start, piece.stop - piece.start, variable.shape[piece.axis] - piece.stop],
            axis=piece.axis,
        )
        value = tf.concat([before, value, behind], piece.axis)
    variable.assign(tf.cast(value, variable.dtype))


def joined(pieces: Sequence[Piece], pairs: dict[str, Pair], own: Callable[[Piece], Pair]) -> Pair:
    """A variable's mean from those of its pieces; of pieces that are not exchanged, what ``own`` gives.

    Args:
        pieces: all of one variable, in order.
        pairs: by the pieces' names; a value of None is nothing.
        own: this rank's own gradient of a piece.
    """
    got = [pairs[p.variable.name] if p.variable.name in pairs else own(p) for p in pieces]
    if pieces[0].axis is None:
        return got[0]
    flags = [found for _, found in got]
    found: Any = any(flags) if all(isinstance(flag, bool) for flag in flags) else tf.reduce_any(tf.stack(flags))
    if all(value is None for value, _ in got):
        return None, False
    if pieces[0].whole.sparse:
        parts = [piece.back(value) for piece, (value, _) in zip(pieces, got, strict=True) if value is not None]
        rows = tf.concat([tf.cast(part.rows, tf.int32) for part in parts], 0)
        return Slices(tf.concat([part.values for part in parts], 0), rows), found
    some = next(value for value, _ in got if value is not None)
    values = [
        tf.zeros(piece.variable.shape, some.dtype) if value is None else tf.cast(value, some.dtype)
        for piece, (value, _) in zip(pieces, got, strict=True)
    ]
    return tf.concat(values, pieces[0].axis), found
