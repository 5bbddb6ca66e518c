"""The primitive operations of the value quantizers: those that keep every element and spend few bits on it."""

import abc
from typing import Any

import numpy as np

from grace.kernels.random import Stream

Tensor = Any

LOWEST_POWER, HIGHEST_POWER = -94, 32
"""Exponents that have a code: 127 of them, so that 7 bits hold them and zero. The range is not centred at
2**0 because gradients are small; above, it leaves room for a loss scale of 2**24 and more."""

ROTATED = 32
"""Elements that :meth:`ValueKernels.rotate` mixes."""
LARGEST_FLOAT8 = 448.0
LOWEST_BIASED = 127 - 6
"""A float32's biased exponent of the smallest normal 8-bit float."""

POWER_OFFSET = 127 + LOWEST_POWER - 1
"""Code 1 is the lowest power, so this is a float32's biased exponent minus its code."""

GAUSSIAN_STEPS = {1.5: 0.9957, 3.5: 0.5860, 7.5: 0.3352, 127.5: 0.03076}
"""The steps of the equidistant quantizers of 4, 8, 16 and 256 levels, half of them on each side of zero, whose squared
error of a standard Gaussian is smallest (Max, "Quantizing for minimum distortion", IRE Trans. Information Theory 6,
1960), by the outermost level in steps."""


def gaussian_reach(levels: float) -> float:
    """Return the outermost level of one of :data:`GAUSSIAN_STEPS` in root mean squares, rounded to float32.

    >>> round(gaussian_reach(1.5), 4)
    1.4935
    """
    return float(np.float32(levels * GAUSSIAN_STEPS[levels]))


class ValueKernels(abc.ABC):
    """A part of :class:`~grace.kernels.Kernels`, with the same conventions.

    A table or a list of edges may be a NumPy array in every framework: then it is a constant.
    """

    @abc.abstractmethod
    def max_abs(self, x: Tensor) -> Tensor:
        """The largest magnitude, at most the largest float32, of shape (1,); 0 of an empty tensor."""

    @abc.abstractmethod
    def side_means(self, x: Tensor) -> Tensor:
        """Mean of the negatives and mean of the rest (x >= 0), accumulated in float64, as float32 of shape
        (2,); 0 for a side without elements."""

    @abc.abstractmethod
    def clip_deviation(self, x: Tensor, factor: float) -> Tensor:
        """A new tensor: ``x`` clipped to [-factor s, factor s], s = sqrt(mean((x - mean(x))^2)) accumulated in
        float64. Elements that are equal to float32 rounding (s <= 2**-20 abs(mean)) have no spread to clip by
        and stay as they are."""

    @abc.abstractmethod
    def round_powers(self, x: Tensor, stream: Stream) -> Tensor:
        """Each element stochastically rounded to one of the two powers of two around it, unbiased.

        With b the float32 bits of abs(x) and r the upper 23 bits of the element's random number, the exponent
        is (b + r) >> 23: the sum carries with probability mantissa / 2**23 exactly. Code 0 is zero; otherwise
        the lower 7 bits are the exponent, clipped to LOWEST_POWER .. HIGHEST_POWER, minus LOWEST_POWER, plus 1,
        and the top bit is the sign."""

    @abc.abstractmethod
    def add_powers(self, out: Tensor, codes: Tensor, weight: float) -> Tensor:
        """``out += weight v`` for the values v that :meth:`round_powers` encoded."""

    @abc.abstractmethod
    def round_float8(self, x: Tensor, bucket_size: int, stream: Stream | None) -> tuple[Tensor, Tensor]:
        """Rounding to 8-bit floats (e4m3: a sign, 4 bits of exponent, 3 of mantissa) per bucket: with s the largest
        magnitude of the bucket and y = abs(x)/s 448, of which 2^e is the power of two below, at least 2^-6,
        k = floor(2^(3-e) y + u) and the code is 8 (e + 6) + k, at most 126, which is what e4m3 has for k 2^(e-3),
        and 128 for the sign. u is uniform, or 0.5 without a stream.

        Returns the codes (uint8, n) and the scales (float32, ceil(n / bucket_size))."""

    @abc.abstractmethod
    def add_float8(self, out: Tensor, codes: Tensor, scales: Tensor, bucket_size: int, weight: float) -> Tensor:
        """``out += weight s v / 448`` for the values v that :meth:`round_float8` encoded; codes 127 and 255, which it
        does not make, are 480 and -480."""

    @abc.abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """A new tensor: each 32 elements times the Hadamard matrix of 32 rows over sqrt(32), at most the largest
        float32; those that are left at the end as they are. It is its own inverse."""

    @abc.abstractmethod
    def bucketize(self, x: Tensor, scale: Tensor, edges: Tensor) -> Tensor:
        """How many of the ascending ``edges`` (float32, at most 255) are below x / scale, as uint8.

        ``scale`` is of shape (1,); a scale of 0 divides by 1."""

    @abc.abstractmethod
    def add_table(
        self, out: Tensor, packed: Tensor, bits: int, table: Tensor, scale: Tensor | None, weight: float
    ) -> Tensor:
        """``out += (weight scale) table[code]`` for the codes that ``pack(codes, bits)`` made; ``scale`` of shape
        (1,), None is 1."""

    @abc.abstractmethod
    def quantile_buckets(self, x: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
        """Equal-count buckets in the order of value: the element of rank r among n is in bucket
        floor(r buckets / n), so that sizes differ by at most one; of equal elements the lower index has the
        lower rank. 1 <= buckets <= 256, and at most n unless the tensor is empty.

        Returns the bucket numbers (uint8) and the mean of each bucket (accumulated in float64, as float32)."""
