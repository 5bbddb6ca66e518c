"""Kernels for TensorFlow tensors: plain operations on any device, eager or in a graph.

Tensors are immutable, so whatever writes into ``out`` returns a new tensor. TensorFlow's operations take numbers below
1.2e-38 for zeros; what can be decided from a number's bits is decided from them.
"""

import contextlib
import math
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.checks import check_count, check_packed, check_quantized, check_range, check_scale, check_table
from grace.kernels.constants import (
    EQUAL_DEVIATION,
    FLOAT8,
    LARGEST_FACTOR,
    LARGEST_FLOAT8,
    LOWEST_BIASED,
    POWER_OFFSET,
    ROOT,
    ROTATED,
    SMALLEST_FACTOR,
    gaussian_reach,
    rounded_down,
)
from grace.kernels.random import FEISTEL_ROUNDS, LOW32, Stream, feistel_bits, philox_in_int64
from grace.kernels.reference import Kernels
from grace.kernels.tensorflow.graph_numbers import INF_BITS, LOW31, bucket_of, is_upper, length, number, refuse_xla
from grace.kernels.tensorflow.interop import aligned_empty, as_tensor

FLOAT32_MAX = float(np.finfo(np.float32).max)


class TensorFlowKernels(Kernels):
    """Kernels in plain TensorFlow operations.

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

    def random_bits(self, stream: Stream, n, like=None):
        key_low, key_high, step, draw = words(stream)
        with _beside(like):
            block = tf.range((tf.cast(n, tf.int64) + 3) // 4)
            low, high = block & LOW32, tf.bitwise.right_shift(block, tf.constant(32, tf.int64))
            columns = _philox((low, high, step, tf.constant(draw, tf.int64)), (key_low, key_high))
            return tf.reshape(tf.stack(columns, axis=1), [-1])[:n]

    def uniform(self, stream, n, like=None):
        bits = tf.bitwise.right_shift(self.random_bits(stream, n, like), tf.constant(8, tf.int64))
        return tf.cast(bits, tf.float32) * 2.0**-24

    def random_indices(self, stream, n, k, like=None):
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

    def max_abs(self, x):
        return tf.clip_by_value(tf.reduce_max(tf.abs(x), keepdims=True), 0.0, FLOAT32_MAX)

    def side_means(self, x):
        sides = tf.stack([~is_upper(x), is_upper(x)])
        sums = tf.reduce_sum(tf.where(sides, tf.cast(x, tf.float64), 0.0), axis=1)
        counts = tf.reduce_sum(tf.cast(sides, tf.float64), axis=1)
        return tf.cast(sums / tf.maximum(counts, 1.0), tf.float32)

    def clip_deviation(self, x, factor):
        wide, n = tf.cast(x, tf.float64), tf.cast(tf.maximum(length(x), 1), tf.float64)
        mean = tf.reduce_sum(wide) / n
        deviation = tf.sqrt(tf.reduce_sum(tf.square(wide - mean)) / n)
        limit = tf.where(deviation > EQUAL_DEVIATION * tf.abs(mean), factor * deviation, FLOAT32_MAX)
        limit = tf.cast(tf.minimum(limit, FLOAT32_MAX), tf.float32)
        return tf.minimum(tf.maximum(x, -limit), limit)

    def round_powers(self, x, stream):
        bits = tf.bitcast(x, tf.int32)
        magnitude = tf.cast(bits & LOW31, tf.int64)
        random = tf.cast(self.random_bits(stream, length(x), x), tf.int64)
        carried = magnitude + tf.bitwise.right_shift(random, tf.constant(9, tf.int64))
        exponent = tf.bitwise.right_shift(carried, tf.constant(23, tf.int64)) - POWER_OFFSET
        code = tf.clip_by_value(exponent, 1, 127) + tf.where(bits < 0, tf.constant(128, tf.int64), 0)
        return tf.cast(tf.where(magnitude > 0, code, 0), tf.uint8)

    def add_powers(self, out, codes, weight):
        check_packed(length(codes), 8, length(out))
        power = tf.cast(codes, tf.int32) & 0x7F
        values = tf.bitcast(tf.bitwise.left_shift(power + POWER_OFFSET, 23), tf.float32)
        values = tf.where(power > 0, tf.where(codes >= 128, -values, values), 0.0)
        return out + values * number(weight, tf.float32)

    def round_float8(self, x, bucket_size, stream):
        n, top = length(x), number(LARGEST_FLOAT8, tf.float32)
        bucket_size = bucket_of(bucket_size, n)
        buckets = (n + bucket_size - 1) // bucket_size
        magnitude = tf.reshape(tf.pad(tf.abs(x), [[0, buckets * bucket_size - n]]), [-1, bucket_size])
        scales = tf.minimum(tf.reduce_max(magnitude, axis=1), FLOAT32_MAX)
        divisor = tf.where(scales > 0, scales, 1.0)[:, None]
        scaled = tf.reshape(magnitude / divisor * top, [-1])[:n]
        biased = tf.maximum(tf.bitwise.right_shift(tf.bitcast(scaled, tf.int32), 23), LOWEST_BIASED)
        places = scaled * tf.bitcast(tf.bitwise.left_shift(257 - biased, 23), tf.float32)
        places += 0.5 if stream is None else self.uniform(stream, n, x)
        code = tf.minimum((biased - LOWEST_BIASED) * 8 + tf.cast(places, tf.int32), 126)
        return tf.cast(code + tf.where(x < 0, 128, 0), tf.uint8), scales

    def add_float8(self, out, codes, scales, bucket_size, weight):
        n = length(codes)
        bucket_size = bucket_of(bucket_size, n)
        check_quantized(n, length(scales), length(out), bucket_size)
        factors = tf.repeat(scales * number(weight, tf.float32), bucket_size)[:n]
        return out + factors * tf.gather(tf.constant(FLOAT8), tf.cast(codes, tf.int32))

    def rotate(self, x):
        whole = length(x) // ROTATED * ROTATED
        rows, span = x[:whole] * number(1 / ROTATED, tf.float32), 1
        while span < ROTATED:
            left, right = tf.unstack(tf.reshape(rows, [-1, 2, span]), axis=1)
            rows = tf.stack([left + right, left - right], axis=1)
            span *= 2
        rows = tf.clip_by_value(tf.reshape(rows, [-1]) * number(float(ROOT), tf.float32), -FLOAT32_MAX, FLOAT32_MAX)
        return tf.concat([rows, x[whole:]], 0)

    def bucketize(self, x, scale, edges):
        scaled = x / tf.where(scale > 0, scale, 1.0)
        edges = tf.concat([tf.convert_to_tensor(edges), [np.inf]], 0)  # TensorFlow wants one
        return tf.cast(tf.searchsorted(edges, scaled, side="left"), tf.uint8)

    def add_table(self, out, packed, bits, table, scale, weight):
        check_scale(scale)
        check_table(table, bits)
        codes = self.unpack(packed, bits, length(out))
        entries = table.shape[0]  # None where a graph does not know it
        if entries is not None and entries < 1 << bits:
            self.check_indices(codes, entries)
        factor = number(weight, tf.float32)
        amounts = tf.convert_to_tensor(table) * (factor if scale is None else scale * factor)
        return out + tf.gather(amounts, tf.cast(codes, tf.int32))

    def quantile_buckets(self, x, buckets):
        # one stable sort: the ranks are the places that elements have in it
        n = length(x)
        order = tf.argsort(x, stable=True)
        in_order = tf.cast(tf.range(tf.cast(n, tf.int64)) * buckets // tf.cast(tf.maximum(n, 1), tf.int64), tf.int32)
        codes = tf.scatter_nd(order[:, None], in_order, tf.shape(x))
        sums = tf.math.unsorted_segment_sum(tf.gather(tf.cast(x, tf.float64), order), in_order, buckets)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(x, tf.float64), in_order, buckets)
        return tf.cast(codes, tf.uint8), tf.cast(sums / tf.maximum(counts, 1.0), tf.float32)

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

    def largest_above(self, x, threshold, room, ratio=1.0):
        raise NotImplementedError("TensorFlowKernels reads how many there are")

    def kth_magnitude(self, x, k):
        bits = tf.math.top_k(tf.bitcast(x, tf.int32) & LOW31, k, sorted=False).values
        kth = tf.bitcast(tf.reduce_min(bits), tf.float32)
        return kth if tf.is_symbolic_tensor(kth) else float(kth)

    def sample_indices(self, stream, n, k, like=None):
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


def words(stream: Stream) -> tuple[int, int, Any, int]:
    """Return the words of a stream, whose step may be a scalar tensor; it becomes one."""
    step = stream.step if isinstance(stream.step, (tf.Tensor, tf.Variable)) else stream.step & LOW32
    key_low, key_high, _, draw = Stream(stream.key, 0, stream.draw).words
    return key_low, key_high, tf.cast(step, tf.int64) & LOW32, draw


def _times(x: tf.Tensor, weight: float) -> tf.Tensor:
    return x if isinstance(weight, (int, float)) and weight == 1 else x * number(weight, x.dtype)


def _places(bits: int) -> tf.Tensor:
    return tf.constant([bits * i for i in range(8)], tf.int64)


def _beside(like: tf.Tensor) -> Any:
    """Return the context that makes tensors on the device of another, if there is a choice."""
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


def _where(mask: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.where(mask)[:, 0], tf.int32)
