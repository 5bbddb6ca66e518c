"""The primitives of :mod:`grace.kernels.contract.sparsification` in plain TensorFlow operations."""

import numpy as np
import tensorflow as tf

from grace.kernels.checks import check_count
from grace.kernels.contract.sparsification import SparseKernels
from grace.kernels.reference.sparsification import SMALLEST_FACTOR, rounded_down
from grace.kernels.tensorflow.graph_numbers import INF_BITS, LOW31, length, number


class SparseTensorFlow(SparseKernels):
    """A part of :class:`~grace.kernels.tensorflow.primitives.TensorFlowKernels`.

    >>> from grace.kernels.tensorflow.primitives import TensorFlowKernels
    >>> TensorFlowKernels().above(tf.constant([1.0, -5.0, 3.0, 0.0]), 2.0).numpy()
    array([1, 2], dtype=int32)
    """

    def topk_chunks(self, x, chunk, k):
        n = length(x)
        rows, count = -(-n // chunk), -(-k * n // chunk)
        bits = tf.pad(tf.bitcast(x, tf.int32) & LOW31, [[0, rows * chunk - n]], constant_values=-1)
        order = tf.math.top_k(tf.reshape(bits, [-1, chunk]), k).indices  # of equal numbers the lower index first
        row = tf.range(tf.cast(rows, tf.int32))[:, None]
        order = tf.where(row * k + tf.range(k) < tf.cast(count, tf.int32), order, chunk)
        return tf.reshape(tf.sort(order, axis=1) + row * chunk, [-1])[:count]

    def widen_chunks(self, narrow, chunk, k):
        starts = tf.range(tf.shape(narrow)[0]) // max(1, k) * chunk
        return tf.bitwise.bitwise_and(starts, ~0xFFFF) | self.widen(narrow)

    def above(self, x, threshold):
        bits = tf.bitcast(x, tf.int32) & LOW31
        if isinstance(threshold, tf.Tensor):
            limit = tf.bitcast(tf.cast(threshold, tf.float32), tf.int32)
        else:
            with np.errstate(over="ignore"):
                limit = int(np.float32(threshold).view(np.int32))
        return _where((bits > limit) & (bits <= INF_BITS))

    def kth_magnitude(self, x, k):
        bits = tf.math.top_k(tf.bitcast(x, tf.int32) & LOW31, k, sorted=False).values
        kth = tf.bitcast(tf.reduce_min(bits), tf.float32)
        return kth if tf.is_symbolic_tensor(kth) else float(kth)

    def sample_indices(self, stream, n, k, like):
        starts = tf.range(k + 1, dtype=tf.int64) * n // max(1, k)
        bits = tf.cast(self.random_bits(stream, k, like), tf.int64)
        drawn = tf.bitwise.right_shift((starts[1:] - starts[:-1]) * bits, tf.constant(32, tf.int64))
        return tf.cast(starts[:-1] + drawn, tf.int32)

    def zero_at(self, out, indices):
        self.check_indices(indices, length(out))
        return tf.tensor_scatter_nd_update(out, indices[:, None], tf.zeros(tf.shape(indices), out.dtype))

    def add_at(self, out, indices, value, weight):
        check_count("means", length(value), 1)
        self.check_indices(indices, length(out))
        amount = value * number(weight, value.dtype)
        return tf.tensor_scatter_nd_add(out, indices[:, None], tf.broadcast_to(amount, tf.shape(indices)))

    def clip_norm(self, x, limit):
        norm = tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64))))
        factor = tf.where(norm > limit, limit / norm, 1.0)
        factor = tf.where(factor >= SMALLEST_FACTOR, tf.cast(tf.cast(factor, tf.float32), tf.float64), factor)
        return tf.cast(tf.cast(x, tf.float64) * factor, tf.float32)

    def one_side(self, x, sign):
        positive = x > 0 if sign > 0 else x < 0
        count = tf.math.count_nonzero(positive)
        return tf.where(positive, tf.abs(x), 0.0), count if tf.is_symbolic_tensor(count) else int(count)

    def fixed_tags(self, x, bound, top, step8, step16):
        magnitude = tf.abs(x)
        inside = magnitude <= top
        capped = tf.where(inside, magnitude, 0.0)
        tags = tf.where(inside & (tf.round(capped * (1 / step16)) <= 32767), 2, 3)
        tags = tf.where(inside & (tf.round(capped * (1 / step8)) <= 127), 1, tags)
        return tf.cast(tf.where(magnitude <= float(rounded_down(bound)), 0, tags), tf.uint8)

    def where_code(self, codes, code):
        return _where(codes == code)

    def to_fixed(self, x, step, dtype):
        return tf.cast(tf.round(x * (1 / step)), dtype)


def _where(mask: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.where(mask)[:, 0], tf.int32)
