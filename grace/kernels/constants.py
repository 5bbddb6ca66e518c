"""Constants and functions of plain numbers that the kernels of all frameworks share."""

import numpy as np

FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOAT32_MAX = np.finfo(np.float32).max
ANY_BITS = np.uint32(0xFFFFFFFF)
"""Bits above those of every float32, as the largest magnitude that is in range: then no number is checked."""
LARGEST_FACTOR = 2.0**40
"""Largest magnitude in a factor of a low-rank method: products with larger ones overflow."""
NARROW = 8
"""Most columns of a matrix whose products with wide ones are bound by memory. Wider ones are left to BLAS."""
LOWEST_POWER, HIGHEST_POWER = -94, 32
"""Exponents that have a code: 127 of them, so that 7 bits hold them and zero. The range is not centred at 2**0 because
gradients are small. Above, it leaves room for a loss scale of 2**24 and more."""
POWER_OFFSET = 127 + LOWEST_POWER - 1
"""A float32's biased exponent minus its code, since code 1 is the lowest power."""
ROTATED = 32
"""Number of elements that :meth:`~grace.kernels.Kernels.rotate` mixes."""
ROOT = np.float32(ROTATED**0.5)
LARGEST_FLOAT8 = 448.0
LOWEST_BIASED = 127 - 6
"""A float32's biased exponent of the smallest normal 8-bit float."""
EQUAL_DEVIATION = 2.0**-20
"""Ratio of deviation to mean up to which elements are equal but for rounding."""
SMALLEST_FACTOR = 2.0**-126
"""Smallest normal float32."""
GAUSSIAN_STEPS = {1.5: 0.9957, 3.5: 0.5860, 7.5: 0.3352, 127.5: 0.03076}
"""Steps of the equidistant quantizers of 4, 8, 16 and 256 levels, half of them on each side of zero, whose squared
error of a standard Gaussian is smallest (Max, "Quantizing for minimum distortion", IRE Trans. Information Theory 6,
1960), by the outermost level in steps."""
ITEM_SIZE = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
}
"""Bytes of an element, by dtype of payload tensors."""


def gaussian_reach(levels: float) -> float:
    """Return the outermost level of one of :data:`GAUSSIAN_STEPS` in root mean squares, rounded to float32.

    >>> round(gaussian_reach(1.5), 4)
    1.4935
    """
    return float(np.float32(levels * GAUSSIAN_STEPS[levels]))


def bucket_within(bucket_size: int, n: int) -> int:
    """Return the bucket size for a tensor of n elements: no more than n, so that no memory is allocated in vain.

    >>> bucket_within(512, 1000), bucket_within(512, 7), bucket_within(512, 0)
    (512, 7, 1)
    """
    return max(1, min(bucket_size, n))


def float8_values() -> np.ndarray:
    """Return the values of the codes of :meth:`~grace.kernels.Kernels.round_float8`, divided by the largest finite one.

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
    """Return the limit at which :meth:`~grace.kernels.Kernels.clip_deviation` clips."""
    # Not "<=": NaN has no spread to clip by, either.
    if not deviation > EQUAL_DEVIATION * abs(mean):
        return FLOAT32_MAX
    return np.float32(min(factor * deviation, float(FLOAT32_MAX)))


def clip_factor(limit: float, norm: float) -> float:
    """Return min(1, limit / norm), rounded to float32 where that is a normal number.

    >>> clip_factor(1.0, 4.0), clip_factor(1.0, 2.0**140) == 2.0**-140
    (0.25, True)
    """
    factor = float(limit / norm) if norm > limit else 1.0
    return float(np.float32(factor)) if factor >= SMALLEST_FACTOR else factor


def rounded_down(value: float) -> np.float32:
    """Return the largest float32 that is at most ``value``."""
    near = np.float32(value)
    return near if float(near) <= value else np.nextafter(near, np.float32(-np.inf))


def table_factor(scale: np.ndarray | None, weight: float) -> np.float32:
    """Return ``weight scale`` in float32; a scale of None is 1."""
    return np.float32(weight) * (np.float32(1) if scale is None else scale[0])
