"""Numbers of graphs, which compute the bits of eager operations, and the refusal of XLA."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from grace.errors import ConfigError


def check_not_xla() -> None:
    """Raise ConfigError in a graph that XLA is to compile."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "XLA cannot compile an exchange of gradients: use model.compile(..., jit_compile=False), or leave out "
            "jit_compile=True at your own tf.function"
        )


def number(value: float | tf.Tensor, dtype: tf.DType) -> float | tf.Tensor:
    """Return a number to multiply with or divide by.

    A graph's optimizer divides by constants by multiplying with their reciprocals, and joins factors, which rounds
    otherwise; so it must not know that this is one.
    """
    if isinstance(value, tf.Tensor):
        return tf.cast(value, dtype)
    if tf.executing_eagerly():
        return float(value)
    return tf.raw_ops.PlaceholderWithDefault(input=tf.constant(float(value), dtype), shape=[])
