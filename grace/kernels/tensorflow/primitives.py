"""Kernels for TensorFlow tensors: plain operations on any device, eager or in a graph.

Tensors are immutable, so whatever writes into ``out`` returns a new tensor. TensorFlow's operations take numbers below
1.2e-38 for zeros; what can be decided from a number's bits is decided from them.
"""

import contextlib
import math
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.checks import check_count, check_packed, check_quantized, check_range, check_scale
from grace.kernels.contract.primitives import LARGEST_FACTOR, Kernels
from grace.kernels.contract.quantization import gaussian_reach
from grace.kernels.random import FEISTEL_ROUNDS, LOW32, Stream, feistel_bits, philox_in_int64
from grace.kernels.tensorflow.graph_numbers import LOW31, bucket_of, is_upper, length, number, refuse_xla
from grace.kernels.tensorflow.interop import aligned_empty, as_tensor
from grace.kernels.tensorflow.quantization import ValueTensorFlow
from grace.kernels.tensorflow.sparsification import SparseTensorFlow

FLOAT32_MAX = float(np.finfo(np.float32).max)


class TensorFlowKernels(ValueTensorFlow, SparseTensorFlow, Kernels):
    """The contract in plain TensorFlow operations.

    In a graph, numbers that the host would know eagerly are scalar tensors, and ``to_list`` is refused.

    >>> k = TensorFlowKernels()
    >>> k.topk(tf.constant([1.0, -5.0, 3.0, 5.0]), 2).numpy()
    array([1, 3], dtype=int32)
    """

    name = "tensorflow"
    mutable = False

    def flat(self, x):
        return tf.convert_to_tensor(x) if x.shape.rank == 1 else tf.reshape(x, [-1])

    def reshape(self, x, shape):
        return tf.reshape(x, [-1 if n is None else n for n in shape])

    def cast(self, x, dtype):
        return tf.cast(x, dtype)

    def eagerly(self, function, tensors):
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not any(map(tf.is_symbolic_tensor, tensors)):
            return function(tensors)
        refuse_xla()
        results = tf.py_function(lambda *eager: function(list(eager)), tensors, [tensor.dtype for tensor in tensors])
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def zeros(self, shape, dtype, like):
        with _beside(like):
            return tf.zeros(shape, dtype)

    def full(self, values, dtype, like):
        with _beside(like):
            if any(isinstance(value, tf.Tensor) for value in values):
                return tf.cast(tf.stack([tf.cast(value, tf.float32) for value in values]), dtype)
            return tf.constant(np.array(values, tf.as_dtype(dtype).as_numpy_dtype))

    def to_list(self, x):
        if tf.is_symbolic_tensor(x):
            raise TypeError("a graph has no values while it is traced; read them eagerly, in tf.py_function")
        return np.asarray(x).astype(np.float64).tolist()

    def zero(self, out):
        return tf.zeros_like(out)

    def join(self, tensors, out=None):
        return tf.concat(tensors, 0)

    def concat(self, tensors, axis):
        return tf.concat(tensors, axis)

    def split(self, x, sizes):
        return tf.split(x, list(sizes)) if sizes else []  # one operation, where each slice would be one

    def to_bytes(self, x):
        return self.flat(tf.cast(x, tf.uint8) if x.dtype == tf.bool else tf.bitcast(x, tf.uint8))

    def from_bytes(self, raw, dtype, shape):
        if dtype == "bool":
            return self.reshape(tf.cast(raw, tf.bool), shape)
        size = tf.as_dtype(dtype).size
        return self.reshape(tf.bitcast(raw if size == 1 else tf.reshape(raw, [-1, size]), dtype), shape)

    def host_buffer(self, n):
        return aligned_empty(n, np.uint8)

    def adopt(self, array, dtype, shape, like):
        with _beside(like):
            return self.from_bytes(as_tensor(array), dtype, shape)

    def take_rows(self, x, rows):
        return tf.gather(x, rows)

    def put_rows(self, out, rows, values):
        return tf.tensor_scatter_nd_update(out, rows[:, None], values)

    def add_rows(self, out, rows, values, weight):
        return tf.tensor_scatter_nd_add(out, rows[:, None], values * number(weight, values.dtype))

    def distinct(self, rows):
        ordered = tf.unique(tf.sort(rows)).y
        return ordered, tf.searchsorted(ordered, rows)

    def nbytes(self, x):
        n = x.shape.num_elements()
        return (tf.size(x) if n is None else n) * x.dtype.size

    def dtype(self, x):
        return x.dtype.name

    def all_finite(self, x, most=math.inf) -> Any:
        inside = tf.math.is_finite if most == math.inf else lambda x: tf.abs(tf.cast(x, tf.float32)) <= most
        finite = True if x.dtype.is_integer else tf.reduce_all(inside(x))
        if isinstance(finite, bool):
            return finite
        readable = not tf.is_symbolic_tensor(finite) and "CPU" in finite.device
        return bool(finite) if readable else tf.cast(finite, tf.float32)

    def combine(self, a, x, b, y):
        return _times(tf.cast(x, tf.float32), a) + _times(tf.cast(y, tf.float32), b)

    def add(self, out, x, weight=1.0):
        return out + _times(tf.cast(x, out.dtype), weight)

    def divide(self, out, x, by):
        wide = max(out.dtype, x.dtype, key=lambda dtype: dtype.size)
        if out.dtype != x.dtype and wide.size == 2:
            wide = tf.float32
        x = self.reshape(x, out.shape) if out.shape.is_fully_defined() else tf.reshape(x, tf.shape(out))
        return tf.cast(tf.cast(x, wide) / number(by, wide), out.dtype)

    def mean_abs(self, x):
        total = tf.reduce_sum(tf.cast(tf.abs(x), tf.float64), keepdims=True)
        return tf.cast(total / tf.cast(tf.maximum(length(x), 1), tf.float64), tf.float32)

    def signs(self, x):
        return tf.where(is_upper(x), tf.ones([], x.dtype), -tf.ones([], x.dtype))

    def matmul(self, a, b, transpose=False):
        if transpose:  # twice as fast on a CPU, where b is narrow, as a^T b
            return tf.linalg.matrix_transpose(tf.matmul(b, a, transpose_a=True))
        return tf.matmul(a, b)

    def matmul_add(self, out, a, b, weight, keep=1.0):
        product = _times(tf.reshape(tf.matmul(a, b, transpose_b=True), tf.shape(out)), weight)
        return product if keep == 0 else _times(out, keep) + product

    def orthonormalize(self, x):
        # in float64, where squares of large numbers do not overflow
        return tf.cast(tf.linalg.qr(tf.cast(x, tf.float64))[0], tf.float32)

    def fill_zero_columns(self, x, other):
        small = tf.reduce_all(tf.abs(x) <= LARGEST_FACTOR, axis=0)
        return tf.where(tf.reduce_any(x != 0, axis=0) & small, x, other)

    def zero_columns(self, matrices):
        if any(tf.is_symbolic_tensor(x) or "CPU" not in x.device for x in matrices):
            return True
        largest = [np.abs(x).max(axis=0, initial=0) for x in map(np.asarray, matrices)]
        return not all(((most > 0) & (most <= LARGEST_FACTOR)).all() for most in largest)

    def random_bits(self, stream: Stream, n, like):
        key_low, key_high, step, draw = words(stream)
        with _beside(like):
            block = tf.range((tf.cast(n, tf.int64) + 3) // 4)
            low, high = block & LOW32, tf.bitwise.right_shift(block, tf.constant(32, tf.int64))
            columns = _philox((low, high, step, tf.constant(draw, tf.int64)), (key_low, key_high))
            return tf.reshape(tf.stack(columns, axis=1), [-1])[:n]

    def uniform(self, stream, n, like):
        bits = tf.bitwise.right_shift(self.random_bits(stream, n, like), tf.constant(8, tf.int64))
        return tf.cast(bits, tf.float32) * 2.0**-24

    def random_indices(self, stream, n, k, like):
        def outside(index):
            return tf.where(index >= n)

        def walk(index, places):
            index = tf.tensor_scatter_nd_update(index, places, _feistel(tf.gather_nd(index, places), n, stream))
            return index, outside(index)

        with _beside(like):
            index = _feistel(tf.range(k, dtype=tf.int64), n, stream)
            shapes = (index.shape, tf.TensorShape([None, 1]))
            index, _ = tf.while_loop(
                lambda _, places: tf.size(places) > 0, walk, (index, outside(index)), shape_invariants=shapes
            )
            return tf.cast(index, tf.int32)

    def quantize(self, x, levels, bucket_size, norm, stream):
        n, top, below, above = length(x), number(levels, tf.float32), math.floor(levels), math.ceil(levels)
        bucket_size = bucket_of(bucket_size, n)
        buckets = (n + bucket_size - 1) // bucket_size
        magnitude = tf.reshape(tf.pad(tf.abs(x), [[0, buckets * bucket_size - n]]), [-1, bucket_size])
        if norm == "max":
            scales = tf.reduce_max(magnitude, axis=1)
        else:
            scales = tf.reduce_sum(tf.square(tf.cast(magnitude, tf.float64)), axis=1)
            if norm == "rms":
                sizes = tf.minimum(n - bucket_size * tf.range(tf.cast(buckets, tf.int64)), bucket_size)
                scales /= tf.cast(sizes, tf.float64)
            scales = tf.sqrt(scales) if norm == "l2" else tf.sqrt(scales) * number(gaussian_reach(levels), tf.float64)
        scales = tf.cast(tf.minimum(scales, FLOAT32_MAX), tf.float32)
        divisor = tf.where(scales > 0, scales, 1.0)[:, None]
        exact = tf.reshape(magnitude / divisor * top, [-1])[:n]
        offset = (0.5 if below == above else 0.0) if stream is None else self.uniform(stream, n, x)
        code = tf.cast(tf.minimum(tf.floor(exact + offset), below), tf.int32)
        return tf.cast(tf.where(is_upper(x), above + code, below - code), tf.uint8), scales

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        n, middle = length(codes), number(levels, tf.float32)
        bucket_size = bucket_of(bucket_size, n)
        check_quantized(n, length(scales), length(out), bucket_size)
        part = (tf.cast(codes, tf.float32) - middle) / middle
        part = tf.pad(part, [[0, (n + bucket_size - 1) // bucket_size * bucket_size - n]])
        factor = _times(scales, weight)
        return out + tf.reshape(factor[:, None] * tf.reshape(part, [-1, bucket_size]), [-1])[:n]

    def pack(self, codes, bits):
        if bits == 8:
            return codes
        # the 8 codes of a group make one 64-bit word, of which the first `bits` bytes are used
        n = length(codes)
        groups = tf.reshape(tf.pad(tf.cast(codes, tf.int64), [[0, (n + 7) // 8 * 8 - n]]), [-1, 8])
        words = tf.reduce_sum(tf.bitwise.left_shift(groups, _places(bits)), axis=1)
        return tf.reshape(tf.bitcast(words, tf.uint8)[:, :bits], [-1])[: (n * bits + 7) // 8]

    def unpack(self, packed, bits, n):
        check_packed(length(packed), bits, n)
        if bits == 8:
            return packed
        groups = (n + 7) // 8
        rows = tf.reshape(tf.pad(packed, [[0, groups * bits - length(packed)]]), [-1, bits])
        words = tf.bitcast(tf.pad(rows, [[0, 0], [0, 8 - bits]]), tf.int64)
        codes = tf.bitwise.right_shift(words[:, None], _places(bits)) & (1 << bits) - 1
        return tf.reshape(tf.cast(codes, tf.uint8), [-1])[:n]

    def pack_signs(self, x):
        return self.pack(tf.cast(is_upper(x), tf.uint8), 1)

    def add_signs(self, out, packed, scale, weight):
        check_scale(scale)
        signs = tf.cast(self.unpack(packed, 1, length(out)), out.dtype) * 2 - 1
        return out + signs * (number(weight, out.dtype) if scale is None else _times(scale, weight))

    def topk(self, x, k):
        # of equal numbers TensorFlow takes the lower index, too
        return tf.sort(tf.math.top_k(tf.bitcast(x, tf.int32) & LOW31, k, sorted=False).indices)

    def bitmap(self, indices, n):
        codes = tf.scatter_nd(indices[:, None], tf.ones_like(indices), [n])
        return self.pack(tf.cast(codes, tf.uint8), 1)

    def positions(self, bitmap, n, count=None):
        return tf.cast(tf.where(self.unpack(bitmap, 1, n) > 0)[:, 0], tf.int32)

    def narrow(self, indices):
        return tf.bitcast(tf.cast(indices, tf.uint16), tf.int16)

    def widen(self, narrow):
        return tf.cast(tf.bitcast(narrow, tf.uint16), tf.int32)

    def check_indices(self, indices, n):
        # elsewhere TensorFlow checks them itself: on CPUs its operations raise, on GPUs they leave such elements out
        if not tf.is_symbolic_tensor(indices) and "CPU" in indices.device and length(indices):
            check_range(int(tf.reduce_min(indices)), int(tf.reduce_max(indices)), n)

    def gather(self, x, indices):
        return tf.gather(x, indices)

    def scatter_add(self, out, indices, values, weight):
        check_count("values", length(values), length(indices))
        self.check_indices(indices, length(out))
        return tf.tensor_scatter_nd_add(out, indices[:, None], _times(values, weight))


def words(stream: Stream) -> tuple[int, int, Any, int]:
    """The words of a stream, whose step may be a scalar tensor; it becomes one."""
    step = stream.step if isinstance(stream.step, (tf.Tensor, tf.Variable)) else stream.step & LOW32
    key_low, key_high, _, draw = Stream(stream.key, 0, stream.draw).words
    return key_low, key_high, tf.cast(step, tf.int64) & LOW32, draw


def _times(x: tf.Tensor, weight: float) -> tf.Tensor:
    return x if isinstance(weight, (int, float)) and weight == 1 else x * number(weight, x.dtype)


def _places(bits: int) -> tf.Tensor:
    return tf.constant([bits * i for i in range(8)], tf.int64)


def _beside(like: tf.Tensor) -> Any:
    """Where to make a tensor: on the device of another, if there is a choice."""
    if len(tf.config.list_logical_devices()) > 1 and like.device:
        return tf.device(like.device)
    return contextlib.nullcontext()


def _philox(counter, key):
    half = tf.constant(32, tf.int64)
    return philox_in_int64(counter, key, lambda product: tf.bitwise.right_shift(product, half))


def _feistel(index, n, stream):
    key_low, key_high, step, draw = words(stream.permuting())
    left_bits, right_bits = (tf.constant(bits, tf.int64) for bits in feistel_bits(n))
    one, draw = tf.constant(1, tf.int64), tf.constant(draw, tf.int64)

    def mix(number, left, right, left_bits, right_bits):
        mixed = _philox((right, number, step, draw), (key_low, key_high))[0]
        mixed &= tf.bitwise.left_shift(one, left_bits) - 1
        return number + 1, right, left ^ mixed, right_bits, left_bits

    start = (
        tf.constant(0, tf.int64),
        tf.bitwise.right_shift(index, right_bits),
        index & tf.bitwise.left_shift(one, right_bits) - 1,
        left_bits,
        right_bits,
    )
    # a loop, so that a graph holds one round
    _, left, right, _, right_bits = tf.while_loop(lambda number, *_: number < FEISTEL_ROUNDS, mix, start)
    return tf.bitwise.left_shift(left, right_bits) | right
