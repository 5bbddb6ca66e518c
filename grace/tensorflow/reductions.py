"""The engine, and sums and maxima over ranks outside of the exchange, eagerly and in graphs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from grace.backends.runtime import backend_or_current, check_group
from grace.core.backend import Backend
from grace.errors import ConfigError

if TYPE_CHECKING:  # Horovod need not be installed
    from horovod.common.process_sets import ProcessSet

    from grace.backends.horovod_tensorflow import TensorFlowHorovodBackend


def engine_of(process_set: "ProcessSet | None" = None, backend: Backend | None = None) -> Backend:
    """Return the backend of a process set, or the given backend; that of ``grace.init()`` if neither is given."""
    if process_set is None:
        return backend_or_current(backend)
    if backend is not None:
        raise ConfigError("give a process_set or a backend, not both")
    from grace.backends.horovod_tensorflow import TensorFlowHorovodBackend

    check_group(TensorFlowHorovodBackend())
    return TensorFlowHorovodBackend(process_set)


def graph_engine(backend: Backend) -> "TensorFlowHorovodBackend | None":
    """Return Horovod's backend, whose operations are part of a graph and find each other by name; None for an engine
    that Python drives."""
    if not backend.pairs_by_name:
        return None
    from grace.backends.horovod_tensorflow import TensorFlowHorovodBackend

    assert isinstance(backend, TensorFlowHorovodBackend)  # a session refuses torch's
    return backend


def summed(backend: Backend, tensor: tf.Tensor, label: str) -> tf.Tensor:
    """Return the sum over ranks of a tensor.

    Args:
        label: the operation's name, where the engine pairs operations by name.
    """
    horovod = graph_engine(backend)
    if horovod is not None:
        return horovod.run_allreduce(tensor, label)
    return run_eagerly(lambda own: backend.allreduce(tf.identity(own)).wait(), [tensor], tensor.dtype, tensor.shape)


def assign_means(backend: Backend, variables: "Sequence[keras.Variable]", label: str) -> None:
    """Give every rank the means over ranks of variables, in place, eagerly."""
    for i, variable in enumerate(variables):
        wide = tf.cast(tf.reshape(variable.value, [-1]), tf.float64)
        total = summed(backend, wide, f"{label}.{i}")
        variable.assign(tf.cast(tf.reshape(total / backend.size, variable.shape), variable.dtype))


def largest(backend: Backend, tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Return the maximum over ranks of each element of each tensor."""
    flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float64) for tensor in tensors], 0)
    horovod = graph_engine(backend)
    if horovod is not None:
        everyone = horovod.run_allgather(flat, label)
    else:
        everyone = run_eagerly(
            lambda own: tf.concat(backend.allgather(tf.identity(own)).wait(), 0), [flat], flat.dtype, [None]
        )
    parts = tf.split(
        tf.reduce_max(tf.reshape(everyone, [backend.size, -1]), 0), [tensor.shape.num_elements() for tensor in tensors]
    )
    return [tf.reshape(tf.cast(p, t.dtype), t.shape) for p, t in zip(parts, tensors, strict=True)]


def run_eagerly(
    function: Callable[..., tf.Tensor],
    tensors: Sequence[tf.Tensor],
    dtype: tf.DType,
    shape: "tf.TensorShape | Sequence[int | None]",
) -> tf.Tensor:
    """Return ``function(*tensors)``, which computes eagerly; in a graph when it runs, in the order of the program."""
    if tf.executing_eagerly():
        return function(*tensors)
    result = tf.py_function(function, tensors, dtype)
    result.set_shape(shape)
    return result
