"""How much of a gradient methods lose where nobody measured it: of independent Gaussian elements, by formulas.

Let x have n elements of variance 1, and e = E||x - C(x)||^2 / E||x||^2. Sources are those of the methods; the integrals
are over the density of a Gaussian element.

Low-rank methods are the exception. Of independent elements PowerSGD would lose 1 - r (a+b+1) / (a b), .99 of a large
matrix, and a budget of that would let anything pass. But a few directions of gradients have most of their energy: here
what is left after r of them falls as (1 + r)^-p, with p so that rank 4 loses .15, as it does of captured gradients
("Encoding and decoding" in BENCHMARKS.md).
"""

import functools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from grace.core.registry import make
from grace.kernels.contract.quantization import GAUSSIAN_STEPS

GAUSS = NormalDist()
GRID = (np.arange(40_000) + 0.5) / 4_000  # |x| in (0, 10)
WEIGHT = 2 * np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi) / 4_000
SAMPLE = 1 << 14
"""Elements of the sample that stands for a method without a formula."""
SPECTRUM = math.log(0.15) / -math.log(5)
"""p of low-rank methods."""
SIGNS = 1 - 2 / math.pi
"""Of a sign times the mean of |x| (Karimireddy et al., arXiv 1901.09847): 1 - (E|x|)^2."""


def kept(ratio: float) -> float:
    """The part of ||x||^2 that the largest elements have (Stich et al., arXiv 1809.07599, for any x at least the
    ratio): ratio + 2 t f(t), where P(|x| > t) = ratio and f is the density.

    >>> round(kept(0.01), 4), kept(1.0)
    (0.0845, 1.0)
    """
    if not 0 < ratio < 1:
        return float(min(max(ratio, 0.0), 1.0))
    t = -GAUSS.inv_cdf(ratio / 2)
    return ratio + 2 * t * GAUSS.pdf(t)


def apart(ratio: float, chunk: int) -> float:
    """How much less of it they have if each ``chunk`` elements choose their largest: above the threshold t of all a
    chunk has more or fewer than its part, with a variance of r (1 - r) / chunk, and the second derivative of
    :func:`kept` is -t / f(t); half of the product.

    >>> round(apart(0.01, 1024), 5), apart(1.0, 64)
    (0.00086, 0.0)
    """
    if not 0 < ratio < 1:
        return 0.0
    t = -GAUSS.inv_cdf(ratio / 2)
    return t / GAUSS.pdf(t) * ratio * (1 - ratio) / chunk / 2


def rounded(step: float) -> float:
    """Of values rounded to one of the two multiples of ``step`` around them, so that the mean is right: E[d (step - d)]
    with d the distance to the lower one (Alistarh et al., arXiv 1610.02132).

    >>> round(rounded(0.1) * 600, 3), round(rounded(20.0), 1)
    (1.0, 15.0)
    """
    below = np.mod(GRID, step)
    return float(np.sum(WEIGHT * below * (step - below)))


def _cast(compressor: Any, shape: Sequence[int]) -> float:
    # p significant bits: an error of up to 2^-p, at random, of values within a power of two of each other
    return 2.0 ** (-22 if compressor.dtype == "fp16" else -16) / 6


def _topk(compressor: Any, shape: Sequence[int]) -> float:
    count, n = compressor.count(tuple(shape)), max(1, math.prod(shape))
    ratio = compressor.ratio if count is None else count / n
    chunk = min(n, getattr(compressor, "chunk", 0))
    return 1 - kept(ratio) + (apart(ratio, chunk) if 0 < chunk < n else 0.0)


def _randomk(compressor: Any, shape: Sequence[int]) -> float:
    ratio = compressor.count(tuple(shape)) / max(1, math.prod(shape))
    return 1 / ratio - 1 if compressor.traits.unbiased else 1 - ratio


def _qsgd(compressor: Any, shape: Sequence[int]) -> float:
    n = min(compressor.bucket_size, max(1, math.prod(shape)))
    if compressor.norm == "max":  # the median of the largest of n
        return rounded(-GAUSS.inv_cdf((1 - 0.5 ** (1 / n)) / 2) / compressor.levels)
    return rounded(math.sqrt(n) / compressor.levels)


def _block(compressor: Any, shape: Sequence[int]) -> float:
    nearest = compressor.rounding == "nearest"
    if compressor.format == "fp8":  # 4 significant bits: as a cast; to the nearest a uniform error of half as much
        return 2.0**-8 / (6 if nearest else 3)
    if compressor.norm == "rms":
        step = GAUSSIAN_STEPS[compressor.levels]
        level = np.minimum(np.floor(GRID / step) + 0.5, compressor.levels)
        return float(np.sum(WEIGHT * (GRID - step * level) ** 2))
    n = min(compressor.block_size, max(1, math.prod(shape)))
    step = -GAUSS.inv_cdf((1 - 0.5 ** (1 / n)) / 2) / compressor.levels
    if not nearest:
        return rounded(step)
    return float(np.sum(WEIGHT * (GRID - step * np.floor(GRID / step + 0.5)) ** 2))


def _terngrad(compressor: Any, shape: Sequence[int]) -> float:
    clip = min(compressor.clip or math.inf, -GAUSS.inv_cdf((1 - 0.5 ** (1 / max(1, math.prod(shape)))) / 2))
    clipped = np.minimum(GRID, clip)
    return float(np.sum(WEIGHT * (clipped * (clip - clipped) + (GRID - clipped) ** 2)))


def _natural(compressor: Any, shape: Sequence[int]) -> float:
    low = 2.0 ** np.floor(np.log2(GRID))
    return float(np.sum(WEIGHT * (GRID - low) * (2 * low - GRID)))


def _powersgd(compressor: Any, shape: Sequence[int]) -> float:
    a, b = shape[0] if shape else 1, math.prod(shape[1:])
    return 0.0 if compressor.rank >= min(a, b) else (1 + compressor.rank) ** -SPECTRUM


FORMULAS: dict[str, Callable[[Any, Sequence[int]], float]] = {
    "none": lambda compressor, shape: 0.0,
    "cast": _cast,
    "topk": _topk,
    "dgc": _topk,
    "randomk": _randomk,
    "qsgd": _qsgd,
    "terngrad": _terngrad,
    "block": _block,
    "natural": _natural,
    "onebit": lambda compressor, shape: SIGNS,
    "efsignsgd": lambda compressor, shape: SIGNS,
    "powersgd": _powersgd,
}


@functools.cache
def expected_error(method: str, shape: tuple[int, ...]) -> float:
    """E||x - C(x)||^2 / E||x||^2 of a tensor of independent Gaussian elements; of methods without a formula that of a
    sample, drawn with a fixed seed.

    Args:
        method: its spec.
        shape: of the tensor.

    >>> round(expected_error("topk(ratio=0.01)", (1000, 1000)), 4), round(expected_error("efsignsgd", (64, 64)), 4)
    (0.9155, 0.3634)
    """
    compressor = make("compressor", method)
    if compressor.traits.exact:
        return 0.0
    formula = FORMULAS.get(compressor.name)
    if formula is not None and type(compressor).__module__.startswith("grace."):
        return formula(compressor, shape)
    return _sampled(method, min(1 << math.prod(shape).bit_length(), SAMPLE))  # few sizes, each sampled once


@functools.cache
def _sampled(method: str, n: int) -> float:
    sample = np.random.default_rng(0).standard_normal(n).astype("float32")
    compressor = make("compressor", method)
    payload, ctx = compressor.compress(sample, "sample")
    lost = sample - np.asarray(compressor.decompress(payload, ctx)).reshape(n)
    return float(np.sum(lost.astype("float64") ** 2) / np.sum(sample.astype("float64") ** 2))
