"""The reference of the value quantizers' kernels, in plain NumPy."""

from typing import Any

import numpy as np

from grace.kernels.checks import check_packed, check_scale, check_table
from grace.kernels.contract.quantization import POWER_OFFSET

FLOAT32_MAX = np.finfo(np.float32).max
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


def deviation_limit(mean: float, deviation: float, factor: float) -> np.float32:
    """Where :meth:`ValueReference.clip_deviation` clips."""
    if not deviation > CONSTANT * abs(mean):
        return FLOAT32_MAX
    return np.float32(min(factor * deviation, float(FLOAT32_MAX)))


def table_factor(scale: np.ndarray | None, weight: float) -> np.float32:
    """``weight scale`` in float32."""
    return np.float32(weight) * (np.float32(1) if scale is None else scale[0])
