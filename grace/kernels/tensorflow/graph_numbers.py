"""Numbers and lengths for plain kernels, so that graphs compute the bits of eager operations."""

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace.errors import ConfigError
from grace.kernels.constants import bucket_within

LOW31 = 0x7FFFFFFF
INF_BITS = 0x7F800000


def refuse_xla() -> None:
    """Raise ConfigError in a graph that XLA is to compile."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA cannot compile an exchange of gradients: use model.compile(..., jit_compile=False), or leave out "
            "jit_compile=True at your own tf.function"
        )


def length(x: tf.Tensor) -> Any:
    """Return the number of elements: an int, or a scalar tensor (int64) where a graph does not know it."""
    n = x.shape.num_elements()
    return tf.size(x, tf.int64) if n is None else n


def bucket_of(bucket_size: int, n: Any) -> Any:
    """Return the bucket size for a tensor of n elements: no more than it has."""
    return bucket_within(bucket_size, n) if isinstance(n, int) else tf.clip_by_value(n, 1, bucket_size)


def number(value: Any, dtype: tf.DType) -> Any:
    """Return a number to multiply with or divide by.

    A graph's optimizer divides by constants by multiplying with their reciprocals, and joins factors, which rounds
    otherwise; so it must not know that this is one.
    """
    if isinstance(value, tf.Tensor):
        return tf.cast(value, dtype)
    if tf.executing_eagerly():
        return float(value)
    return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(float(value), dtype), shape=[])


def is_upper(x: tf.Tensor) -> tf.Tensor:
    """Return True where x >= 0, also for the smallest negative numbers."""
    if x.dtype != tf.float32:
        return x >= 0
    bits = tf.bitcast(x, tf.int32)
    return ((bits >= 0) & (bits <= INF_BITS)) | (bits == np.iinfo(np.int32).min)
