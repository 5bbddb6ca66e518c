"""More than 2**24 elements: where a float32 cannot count any more."""

import functools

import numpy as np
import pytest
from scipy.stats import chi2

from grace.kernels import Stream
from grace.kernels.random import philox
from tests.support.data import FALSE_ALARM, REFERENCE, same
from tests.support.drawing import THOROUGH
from tests.support.implementations import OTHERS, InTensorFlow

N = 2**24 + 3
STREAM = Stream(77, 5)
LIKE = np.zeros(1, np.float32)
LARGE = OTHERS if THOROUGH else [it for it in OTHERS if it.id in ("fused", "cuda")]

pytestmark = pytest.mark.slow


@functools.cache
def gaussian():
    return np.random.default_rng(0).standard_normal(N, np.float32)


def with_a_large_end():
    x = gaussian().copy()
    x[-1], x[2**24 + 1] = -100, 99
    return x


def largest(x, k):
    """Return the reference's result, by a partition, since its sorting takes seconds: of equal elements the first."""
    least = np.partition(x, -k)[-k]
    above = np.flatnonzero(x > least)
    return np.sort(np.append(above, np.flatnonzero(x == least)[: k - above.size])).astype(np.int32)


WANTED = {
    "l2": lambda: REFERENCE.quantize(gaussian(), 127, 512, "l2", STREAM),
    "max": lambda: REFERENCE.quantize(gaussian(), 127, 512, "max", STREAM),
    "topk": lambda: largest(np.abs(with_a_large_end()), N // 100),
    "signs": lambda: REFERENCE.pack_signs(gaussian()),
    "indices": lambda: REFERENCE.random_indices(STREAM, 2**25 + 1, (2**25 + 1) // 100),
}


@functools.cache
def wanted(what):
    """Return the reference's result, once for all implementations: it takes seconds."""
    return WANTED[what]()


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    wanted.cache_clear()
    gaussian.cache_clear()


@pytest.mark.parametrize("it", LARGE)
def test_random_bits_equal_the_definition_at_the_end(it):
    blocks = np.arange(2**22 - 5, 2**22 + 1, dtype=np.uint32)
    counter = blocks, np.zeros_like(blocks), *(np.full_like(blocks, word) for word in STREAM.words[2:])
    end = np.stack(philox(counter, STREAM.words[:2]), axis=1).reshape(-1)[: N - 4 * (2**22 - 5)]
    assert (it.run("random_bits", STREAM, N, LIKE)[-end.size :] == end).all()


@pytest.mark.skipif(
    not THOROUGH, reason="left to `make thorough`: the reference takes long, and random bits are compared"
)
@pytest.mark.parametrize("it", LARGE)
def test_quantize_equals_the_reference(it):
    norm = "max" if isinstance(it, InTensorFlow) else "l2"  # small, all have both: test_agreement.py
    codes, scales = it.run("quantize", gaussian(), 127, 512, norm, STREAM)
    wanted_codes, wanted_scales = wanted(norm)
    equal = np.repeat(scales == wanted_scales, 512)[:N]
    assert equal.mean() > (0.999 if norm == "l2" else 0.999999)
    assert (codes == wanted_codes)[equal].all()


@pytest.mark.parametrize("it", LARGE)
def test_topk_equals_the_reference_and_reaches_the_last_element(it):
    indices = it.run("topk", with_a_large_end(), N // 100)
    same(indices, wanted("topk"))
    assert indices[-2:].tolist() == [2**24 + 1, 2**24 + 2]


@pytest.mark.parametrize("it", LARGE)
def test_pack_signs_equals_the_reference(it):
    same(it.run("pack_signs", gaussian()), wanted("signs"))


@pytest.mark.parametrize("it", LARGE)
def test_random_indices_reach_odd_indices_beyond_2_to_the_24(it):
    n = 2**25 + 1
    k = n // 100
    indices = it.run("random_indices", STREAM, n, k, LIKE)
    same(indices, wanted("indices"))
    assert np.unique(indices).size == k
    upper, odd = indices >= 2**24, indices % 2 == 1
    counts = np.array([(upper & odd).sum(), (upper & ~odd).sum(), (~upper & odd).sum(), (~upper & ~odd).sum()])
    assert ((counts - k / 4) ** 2 / (k / 4)).sum() < chi2.isf(FALSE_ALARM, 3)


@pytest.mark.parametrize("it", LARGE)
def test_scatter_add_writes_beyond_2_to_the_24(it):
    indices = np.int32([1, 2**24 + 1, 2**24 + 2])
    out = it.run("scatter_add", np.zeros(N, np.float32), indices, np.float32([1, 2, 3]), 2.0)
    assert out.nonzero()[0].tolist() == indices.tolist()
    assert out[indices].tolist() == [2, 4, 6]
