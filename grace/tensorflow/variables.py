"""Names and start values of TensorFlow and Keras variables."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from grace.backend import Backend
from grace.kernels import kernels_of
from grace.runtime import current


def value_of(variable: Any) -> Any:
    """The tf.Variable of a Keras variable; a tf.Variable or a tensor itself (Keras computes ``iterations`` where it
    accumulates gradients)."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def names_of(variables: Sequence[Any]) -> list[str]:
    """A name for each: a Keras variable's path, a tf.Variable's name; repeated ones get a number.

    What all paths begin with is the model's name, which Keras numbers anew in every process; it is left out.

    >>> names_of([tf.Variable(1.0, name="w"), tf.Variable(2.0, name="w")])
    ['w', 'w#2']
    >>> names_of([tf.Variable(1.0, name="sequential_3/dense/kernel"), tf.Variable(2.0, name="sequential_3/dense/bias")])
    ['dense/kernel', 'dense/bias']
    """
    names, seen = [], Counter[str]()
    paths = [getattr(variable, "path", None) or variable.name.removesuffix(":0") for variable in variables]
    models = {path.split("/")[0] for path in paths}
    shared = len(models) == 1 and all(path.count("/") > 1 for path in paths)
    for path in paths:
        name = path.split("/", 1)[1] if shared else path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def broadcast_variables(variables: Iterable[Any], root: int = 0, backend: Backend | None = None) -> None:
    """Give every rank the root's values, in place.

    Args:
        variables: Keras or TensorFlow variables of any dtypes, in the same order on all ranks: ``model.variables``,
            ``optimizer.variables``.
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.

    >>> import grace
    >>> backend = grace.init("local")
    >>> broadcast_variables([tf.Variable([1.0, 2.0])])
    >>> grace.shutdown()
    """
    backend = current() if backend is None else backend
    found = [value_of(variable) for variable in variables]
    shapes = repr((root, [str(variable.shape) for variable in found]))
    with backend.asking(f"broadcast of {zlib.crc32(shapes.encode()):08x}"), tf.init_scope():
        for variable in found:
            value = variable.read_value()
            if value.dtype == tf.string or not value.shape.num_elements():
                continue
            if value.dtype == tf.bool:
                received = backend.broadcast(tf.cast(value, tf.uint8), root).wait()
                variable.assign(tf.cast(received, tf.bool))
                continue
            k = kernels_of(value)
            raw = k.to_bytes(value)  # engines do not know every dtype
            received = backend.broadcast(raw, root).wait()
            if backend.rank != root:
                name = tf.as_dtype(value.dtype).name
                variable.assign(k.from_bytes(received, name, tuple(value.shape)))
