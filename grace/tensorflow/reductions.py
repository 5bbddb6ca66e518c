"""The engine, and sums and maxima over ranks outside of the exchange, eagerly and in graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from grace.backends.runtime import check_group, current
from grace.core.backend import Backend
from grace.errors import ConfigError


def engine_of(process_set: Any = None, backend: Backend | None = None) -> Backend:
    """Return the backend of a process set, or the given backend; that of ``grace.init()`` if neither is given."""
    if process_set is None:
        return current() if backend is None else backend
    if backend is not None:
        raise ConfigError("give a process_set or a backend, not both")
    from grace.backends.horovod_tensorflow import TensorFlowHorovodBackend

    check_group(TensorFlowHorovodBackend())
    return TensorFlowHorovodBackend(process_set)


def summed(backend: Any, tensor: tf.Tensor, label: str) -> tf.Tensor:
    """Return the sum over ranks of a tensor.

    Args:
        label: the operation's name, where the engine pairs operations by name.
    """
    if backend.pairs_by_name:
        return backend.run_allreduce(tensor, label)
    return _on_host(lambda own: backend.allreduce(tf.identity(own)).wait(), tensor)


def largest(backend: Any, tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Return the maximum over ranks of each element of each tensor."""
    flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float64) for tensor in tensors], 0)
    if backend.pairs_by_name:
        everyone = backend.run_allgather(flat, label)
    else:
        everyone = _on_host(lambda own: tf.concat(backend.allgather(tf.identity(own)).wait(), 0), flat)
    parts = tf.split(
        tf.reduce_max(tf.reshape(everyone, [backend.size, -1]), 0), [tensor.shape.num_elements() for tensor in tensors]
    )
    return [tf.reshape(tf.cast(p, t.dtype), t.shape) for p, t in zip(parts, tensors, strict=True)]


def _on_host(function: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """Call a function of eager tensors, at once or when the graph runs."""
    return function(tensor) if tf.executing_eagerly() else tf.py_function(function, [tensor], tensor.dtype)
