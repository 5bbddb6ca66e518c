"""The primitives of the data-dependent sparsifiers: every implementation equals the NumPy reference."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grace.kernels import Stream
from tests.support.data import REFERENCE, agree
from tests.support.examples import examples
from tests.support.implementations import OTHERS

NUMPY = REFERENCE
quick = examples(20)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
anything = st.one_of(finite, st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, np.inf, -np.inf, np.nan]).map(np.float32))
vectors = arrays(np.float32, st.integers(0, 130), elements=anything)
finite_vectors = arrays(np.float32, st.integers(0, 130), elements=finite)
thresholds = st.one_of(st.floats(0, 3.4e38), st.sampled_from([0.0, 1e-50, 0.01, 1.0, np.inf]))
others = pytest.mark.parametrize("it", OTHERS)


@others
@quick
@given(x=vectors, threshold=thresholds)
def test_above(it, x, threshold):
    x = it.suited("above", x)
    indices = agree(it, "above", x, threshold)
    with np.errstate(all="ignore"):
        assert indices.tolist() == [i for i, v in enumerate(x) if abs(v) > np.float32(threshold)]


@others
@quick
@given(arrays(np.float32, st.integers(1, 130), elements=anything), st.data())
def test_kth_magnitude(it, x, data):
    agree(it, "kth_magnitude", x, data.draw(st.integers(1, x.size)))


@others
@quick
@given(st.integers(1, 2**31 - 1), st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_sample_indices_takes_one_of_each_slice(it, n, k, key):
    k = min(n, k)
    indices = agree(it, "sample_indices", Stream(key, 3), n, k, np.zeros(1, np.float32)).astype(np.int64)
    starts = [j * n // k for j in range(k)]
    stops = [(j + 1) * n // k for j in range(k)]
    assert ((indices >= starts) & (indices < stops)).all()


def test_sample_indices_are_uniform():
    hits = np.zeros(1000)
    for step in range(400):
        hits[NUMPY.sample_indices(Stream(5, step), 1000, 300)] += 1
    assert hits.sum() == 400 * 300
    quarters = hits.reshape(4, 250).mean(axis=1)
    assert np.allclose(quarters, 120, rtol=0.02)
    assert hits.min() > 50


@others
@quick
@given(vectors, st.data())
def test_zero_at_and_add_at(it, x, data):
    indices = data.draw(st.lists(st.integers(0, max(0, x.size - 1)), unique=True, max_size=x.size))
    indices = np.array(indices, np.int32)
    zeroed = agree(it, "zero_at", x, indices)
    assert (zeroed[indices] == 0).all()
    value = np.array([data.draw(finite)], np.float32)
    agree(it, "add_at", x, indices, value, 0.25, exact=False)


@others
@quick
@given(finite_vectors, st.floats(1e-6, 1e6))
@example(np.float32([1.8779531e37]), 0.0078125)
@example(np.float32([8.50706e37]), 1.0)
@example(np.float32([3e38, -3e38]), 1e-3)
def test_clip_norm(it, x, limit):
    x = it.suited("clip_norm", x)
    clipped = agree(it, "clip_norm", x, limit, exact=False)
    assert np.linalg.norm(clipped.astype(np.float64)) <= limit * (1 + 1e-6) + 1e-40
    if np.linalg.norm(x.astype(np.float64)) <= limit:
        assert np.array_equal(clipped, x)


@others
@quick
@given(vectors, st.sampled_from([1, -1]))
def test_one_side(it, x, sign):
    x = it.suited("one_side", x)
    side, count = agree(it, "one_side", x, sign)
    with np.errstate(all="ignore"):
        assert count == (sign * x > 0).sum()
    assert (side > 0).sum() == count
    assert not np.signbit(side).any()


@others
@quick
@given(
    arrays(np.float32, st.integers(0, 60), elements=st.one_of(anything, st.floats(-1, 1, width=32))),
    st.integers(-90, 0),
    st.sampled_from([1.0, 1024.0]),
)
def test_fixed_tags_and_codes(it, x, exponent, top):
    step8, step16 = top * 2.0**exponent, top * min(2.0**exponent, 2.0**-15)
    tags = agree(it, "fixed_tags", x, 0.7 * step8, top, step8, step16)
    for tag, step, dtype, largest in ((1, step8, "int8", 127), (2, step16, "int16", 32767)):
        where = agree(it, "where_code", tags, tag)
        values = x[where]
        codes = agree(it, "to_fixed", values, step, dtype)
        assert (np.abs(codes.astype(int)) <= largest).all()
        assert (np.abs(codes * step - values.astype(np.float64)) <= step / 2).all()
    assert (np.isnan(x) <= (tags == 3)).all()


@others
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 70_000])
def test_above_over_block_edges(it, n):
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    indices = agree(it, "above", x, 2.0)
    assert np.array_equal(indices, np.flatnonzero(np.abs(x) > 2))
