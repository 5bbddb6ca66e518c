"""Top-k is exact on the data that its sampled fast path finds hardest."""

import numpy as np
import pytest

from grace.kernels.numba.primitives import NumbaKernels
from tests.support.data import EPSILON, REFERENCE, same
from tests.support.implementations import OTHERS, crossed

SIZES = [(1 << 14) - 1, 1 << 14, 20_011]


def sampled(n: int) -> np.ndarray:
    """Return the elements that the fast path looks at, for a stride of 8, as a mask."""
    j, found = np.arange(n // 8), np.zeros(n, bool)
    found[j * 8 + j * 7 % 8] = True
    return found


KINDS = {
    "all equal": lambda x, i: x * 0 + 1,
    "all zero": lambda x, i: np.zeros_like(x),
    "ascending": lambda x, i: np.sort(np.abs(x)),
    "descending": lambda x, i: -np.sort(-np.abs(x)),
    "two values": lambda x, i: np.where(x > 0, np.float32(1), np.float32(-1 - EPSILON)),
    "large only where sampled": lambda x, i: np.where(sampled(x.size), 1 + np.abs(x), x / 100),
    "small only where sampled": lambda x, i: np.where(sampled(x.size), x / 100, 1 + np.abs(x)),
    "periodic": lambda x, i: np.sin(2 * np.pi * i / 8),
    "one spike": lambda x, i: np.where(i == x.size - 1, np.float32(3e38), np.float32(0)),
    "mostly zero": lambda x, i: np.where(i % 997 == 0, x, 0),
    "denormal": lambda x, i: i % 50 * 1.4012984643e-45,
    "last bit": lambda x, i: np.float32(1) + (i % 3 * EPSILON).astype(np.float32),
    "nan and inf": lambda x, i: np.where(i % 1000 == 0, np.nan, np.where(i % 777 == 0, -np.inf, x)),
}


def adversarial(name: str, n: int) -> np.ndarray:
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    return KINDS[name](x, np.arange(n)).astype(np.float32)


def by_magnitude(x: np.ndarray) -> np.ndarray:
    """Return all positions, of the largest magnitude first, and of equal ones in their order."""
    return np.argsort(~(x.view(np.uint32) & np.uint32(0x7FFFFFFF)), kind="stable")


@crossed(OTHERS, ("name", "n"), KINDS, SIZES)
def test_topk_is_exact_of_all_and_of_chunks(it, name, n):
    x = adversarial(name, n)
    order = by_magnitude(x)
    for k in (1, 2, 63, 512, n // 100, n // 8, n // 8 + 1, n // 2, n):
        same(it.run("topk", x, k), np.sort(order[:k]).astype(np.int32))
    for chunk, k in ((32, 1), (256, 3), (1024, 10), (1024, 1024), (4096, 41)):
        same(it.run("topk_chunks", x, chunk, k), REFERENCE.topk_chunks(x, chunk, k))


@pytest.mark.parametrize("name", KINDS)
def test_topk_is_exact_where_the_sample_is_sparsest(name):
    n = 300_001
    x = adversarial(name, n)
    order = by_magnitude(x)  # once for all k, where the reference would sort for each
    for k in (1, 8192, n // 8):
        same(NumbaKernels().topk(x, k), np.sort(order[:k]).astype(np.int32))
