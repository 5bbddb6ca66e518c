"""The value quantizers' kernels in plain TensorFlow operations."""

from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.checks import check_packed, check_quantized, check_scale, check_table
from grace.kernels.contract.quantization import LARGEST_FLOAT8, LOWEST_BIASED, POWER_OFFSET, ROTATED
from grace.kernels.reference.quantization import CONSTANT, FLOAT8, ROOT
from grace.kernels.tensorflow.graph_numbers import LOW31, bucket_of, is_upper, length, number

FLOAT32_MAX = float(np.finfo(np.float32).max)


class ValueTensorFlow:
    """A part of :class:`~grace.kernels.tensorflow.primitives.TensorFlowKernels`: nothing is read back."""

    random_bits: Any
    uniform: Any
    unpack: Any
    check_indices: Any

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
        limit = tf.where(deviation > CONSTANT * tf.abs(mean), factor * deviation, FLOAT32_MAX)
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
