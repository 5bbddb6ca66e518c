"""The reference of the value quantizers' kernels, in plain NumPy."""

from typing import Any

import numpy as np

from grace.kernels.checks import check_packed, check_quantized, check_scale, check_table
from grace.kernels.contract.primitives import bucket_within
from grace.kernels.contract.quantization import LARGEST_FLOAT8, LOWEST_BIASED, POWER_OFFSET, ROTATED

FLOAT32_MAX = np.finfo(np.float32).max
ROOT = np.float32(ROTATED**0.5)
CONSTANT = 2.0**-20
"""Deviation over mean below which elements are equal but for rounding."""


class ValueReference:
    """A part of :class:`~grace.kernels.NumpyKernels`.

    >>> from grace.kernels import NumpyKernels
    >>> codes, means = NumpyKernels().quantile_buckets(np.float32([5, 1, 4, 2]), 2)
    >>> codes, means
    (array([1, 0, 1, 0], dtype=uint8), array([1.5, 4.5], dtype=float32))
    """

    random_bits: Any
    uniform: Any
    unpack: Any
    check_indices: Any

    def max_abs(self, x):
        return np.minimum(np.abs(x).max(initial=0), FLOAT32_MAX).reshape(1)

    def side_means(self, x):
        upper = x >= 0
        sides = (x[~upper], x[upper])
        return np.array([side.mean(dtype=np.float64) if side.size else 0.0 for side in sides], np.float32)

    def clip_deviation(self, x, factor):
        wide = x.astype(np.float64)
        mean = wide.mean() if x.size else 0.0
        deviation = np.sqrt(np.square(wide - mean).mean()) if x.size else 0.0
        limit = deviation_limit(mean, deviation, factor)
        return np.clip(x, -limit, limit)

    def round_powers(self, x, stream):
        bits = x.view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        carried = magnitude + (self.random_bits(stream, x.size, x) >> np.uint32(9))
        exponent = (carried >> np.uint32(23)).astype(np.int32) - POWER_OFFSET
        code = np.clip(exponent, 1, 127) | (bits >> np.uint32(24) & np.uint32(0x80)).astype(np.int32)
        return np.where(magnitude > 0, code, 0).astype(np.uint8)

    def add_powers(self, out, codes, weight):
        check_packed(codes.size, 8, out.size)
        power = codes.astype(np.uint32) & np.uint32(0x7F)
        bits = power + np.uint32(POWER_OFFSET) << np.uint32(23) | (codes >> 7).astype(np.uint32) << np.uint32(31)
        out += np.float32(weight) * np.where(power > 0, bits, np.uint32(0)).view(np.float32)
        return out

    def round_float8(self, x, bucket_size, stream):
        bucket_size = bucket_within(bucket_size, x.size)
        magnitude = np.zeros((-(-x.size // bucket_size), bucket_size), np.float32)
        magnitude.reshape(-1)[: x.size] = np.abs(x)
        scales = np.minimum(magnitude.max(axis=1, initial=0), FLOAT32_MAX)
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        scaled = (magnitude / divisor * np.float32(LARGEST_FLOAT8)).reshape(-1)[: x.size]
        biased = np.maximum(scaled.view(np.int32) >> 23, LOWEST_BIASED)
        places = scaled * (257 - biased << 23).view(np.float32)  # in units of its last bit
        offset = np.float32(0.5) if stream is None else self.uniform(stream, x.size)
        code = np.minimum((biased - LOWEST_BIASED) * 8 + np.floor(places + offset).astype(np.int32), 126)
        return (code + np.where(x < 0, 128, 0)).astype(np.uint8), scales

    def add_float8(self, out, codes, scales, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        out += np.repeat(scales * np.float32(weight), bucket_size)[: codes.size] * FLOAT8[codes]
        return out

    def rotate(self, x):
        whole = x.size // ROTATED * ROTATED
        rows = x[:whole] * np.float32(1 / ROTATED)  # so that no sum overflows
        span = 1
        while span < ROTATED:
            pairs = rows.reshape(-1, 2, span)
            rows = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
            span *= 2
        with np.errstate(over="ignore"):
            rows = np.clip(rows * ROOT, -FLOAT32_MAX, FLOAT32_MAX)
        return np.concatenate([rows, x[whole:]])

    def bucketize(self, x, scale, edges):
        divisor = scale[0] if scale[0] > 0 else np.float32(1)
        return np.searchsorted(edges, x / divisor, side="left").astype(np.uint8)

    def add_table(self, out, packed, bits, table, scale, weight):
        check_scale(scale)
        check_table(table, bits)
        codes = self.unpack(packed, bits, out.size)
        self.check_indices(codes, table.size)
        out += (table_factor(scale, weight) * table)[codes]
        return out

    def quantile_buckets(self, x, buckets):
        # one stable sort: the ranks are the places that elements have in it
        codes = np.empty(x.size, np.uint8)
        codes[np.argsort(x, kind="stable")] = np.arange(x.size) * buckets // max(1, x.size)
        sums = np.bincount(codes, weights=x, minlength=buckets)
        return codes, (sums / np.maximum(1, np.bincount(codes, minlength=buckets))).astype(np.float32)


def float8_values() -> np.ndarray:
    """What the codes of :meth:`ValueReference.round_float8` stand for, of the largest finite one.

    >>> values = float8_values()
    >>> (values[[0, 1, 8, 126, 254]] * 448).tolist()
    [0.0, 0.001953125, 0.015625, 448.0, -448.0]
    """
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent > 0, 8 + mantissa, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10) / LARGEST_FLOAT8
    return np.concatenate([values, -values]).astype(np.float32)


FLOAT8 = float8_values()


def deviation_limit(mean: float, deviation: float, factor: float) -> np.float32:
    """Where :meth:`ValueReference.clip_deviation` clips."""
    if not deviation > CONSTANT * abs(mean):
        return FLOAT32_MAX
    return np.float32(min(factor * deviation, float(FLOAT32_MAX)))


def table_factor(scale: np.ndarray | None, weight: float) -> np.float32:
    """``weight scale`` in float32."""
    return np.float32(weight) * (np.float32(1) if scale is None else scale[0])
