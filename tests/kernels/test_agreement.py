"""Every implementation equals the NumPy reference on drawn arguments; test_reference.py holds the definitions."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grace.kernels import Stream
from grace.kernels.constants import GAUSSIAN_STEPS
from tests.support.data import EPSILON, REFERENCE, TINY, agree, close, data, same
from tests.support.examples import NUMBERS, VECTORS, examples
from tests.support.implementations import ALL, crossed
from tests.support.kernel_cases import STREAMS, WEIGHTS, every, others

LIKE = np.zeros(1, np.float32)
BAD = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf])
ANYTHING = arrays(np.float32, st.integers(0, 130), elements=st.one_of(NUMBERS, BAD))
POWERS = st.sampled_from([2.0**-94, -(2.0**-95), 2.0**32, -(2.0**33)])
FINITE = st.one_of(
    VECTORS,
    arrays(np.float32, st.integers(0, 40), elements=POWERS),
    st.builds(lambda n: data("gaussian", n, n) + np.float32(3), st.sampled_from([1, 64, 1025])),
)
LEVELS = st.sampled_from([1, 2, 7, 64, 127])
BUCKETS = st.sampled_from([1, 3, 64, 512, 1500, 10_000])
MAYBE = st.one_of(st.none(), STREAMS)
PARTS = st.floats(0, 1)


def given_bad(x, bad):
    """Some elements are no numbers."""
    x = x.copy()
    x[: 3 * len(bad) : 3] = bad[: x[: 3 * len(bad) : 3].size]
    return x


WITH_BAD = st.builds(given_bad, VECTORS, st.lists(BAD, max_size=4))


def out_of(n):
    return data("gaussian", n, 9)


def indices_of(x, part):
    return REFERENCE.random_indices(Stream(3), x.size, round(part * x.size))


def packed(n, bits):
    return REFERENCE.pack(np.random.default_rng(n).integers(0, 1 << bits, n).astype(np.uint8), bits)


EQUAL = {
    "max_abs": st.tuples(FINITE),
    "pack_signs": st.tuples(FINITE),
    "round_powers": st.tuples(FINITE, STREAMS),
    "add_powers": st.tuples(st.just(out_of(256)), st.just(np.arange(256, dtype=np.uint8)), WEIGHTS),
    "round_float8": st.tuples(VECTORS, BUCKETS, MAYBE),
    "quantize": st.tuples(VECTORS, LEVELS, BUCKETS, st.just("max"), MAYBE),
    "unpack": st.builds(lambda n, bits: (packed(n, bits), bits, n), st.integers(0, 70), st.integers(1, 8)),
    "pack": st.builds(
        lambda n, bits: (REFERENCE.unpack(packed(n, bits), bits, n), bits), st.integers(0, 70), st.integers(1, 8)
    ),
    "add_table": st.builds(
        lambda n, bits, scale, weight: (
            *(out_of(n), packed(n, bits), bits, data("gaussian", 1 << bits, n)),
            *(scale if scale is None else np.float32([scale]), weight),
        ),
        *(st.integers(0, 40), st.integers(1, 8), st.sampled_from([None, 0.3, 1e-40]), WEIGHTS),
    ),
    "above": st.tuples(ANYTHING, st.one_of(st.floats(0, 3.4e38), st.sampled_from([0.0, 1e-50, 0.01, 1.0, np.inf]))),
    "one_side": st.tuples(ANYTHING, st.sampled_from([1, -1])),
    "kth_magnitude": st.builds(lambda x, part: (x, 1 + int(part * (x.size - 1))), ANYTHING.filter(len), PARTS),
    "topk": st.builds(lambda x, part: (x, round(part * x.size)), WITH_BAD, PARTS),
    "topk_chunks": st.builds(
        lambda x, bits, part: (x, 1 << bits, max(1, round(part * 2**bits))), WITH_BAD, st.integers(5, 7), PARTS
    ),
    "gather": st.builds(lambda x, part: (x, indices_of(x, part)), VECTORS, PARTS),
    "zero_at": st.builds(lambda x, part: (x, indices_of(x, part)), ANYTHING, PARTS),
    "uniform": st.tuples(STREAMS, st.integers(0, 2000), st.just(LIKE)),
    "random_indices": st.builds(
        lambda stream, n, part: (stream, n, round(part * n), LIKE), STREAMS, st.integers(1, 5000), PARTS
    ),
    "sample_indices": st.builds(
        lambda stream, n, k: (stream, n, min(n, k), LIKE), STREAMS, st.integers(1, 2**31 - 1), st.integers(0, 300)
    ),
}
"""Arguments of kernels whose results have the same bits."""
ADDED = {
    "dequantize": st.builds(
        lambda x, levels, size, weight: (
            out_of(x.size),
            *REFERENCE.quantize(x, levels, size, "max", Stream(1) if levels in range(128) else None),
            *(levels, size, weight),
        ),
        *(VECTORS, st.one_of(LEVELS, st.sampled_from([*GAUSSIAN_STEPS])), BUCKETS, WEIGHTS),
    ),
    "add_float8": st.builds(
        lambda x, size, weight: (out_of(x.size), *REFERENCE.round_float8(x, size, Stream(1)), size, weight),
        *(VECTORS, BUCKETS, WEIGHTS),
    ),
    "add_signs": st.builds(
        lambda x, scale, weight: (
            *(out_of(x.size), REFERENCE.pack_signs(x), scale if scale is None else np.float32([abs(scale)]), weight),
        ),
        *(VECTORS, st.one_of(st.none(), NUMBERS), WEIGHTS),
    ),
    "scatter_add": st.builds(
        lambda x, part, weight: (out_of(x.size), indices_of(x, part), x[indices_of(x, part)], weight),
        *(VECTORS, PARTS, WEIGHTS),
    ),
    "add_at": st.builds(
        lambda x, part, value: (x, indices_of(x, part), np.float32([value]), 0.25), VECTORS, PARTS, NUMBERS
    ),
}
"""Arguments of kernels whose results differ by roundings: the first one is added to."""
SUMMED = {
    "side_means": st.tuples(FINITE),
    "clip_deviation": st.tuples(FINITE, st.sampled_from([0.5, 2.5, 10.0])),
    "quantile_buckets": st.builds(lambda x, n: (x, max(1, min(n, x.size))), FINITE, st.integers(1, 256)),
}
"""Arguments of kernels that sum in float64, in any order, and round once."""


@others
@pytest.mark.parametrize("method", EQUAL)
@examples(10)
@given(drawn=st.data())
def test_kernels_have_the_references_bits(it, method, drawn):
    agree(it, method, *drawn.draw(EQUAL[method]))


@others
@pytest.mark.parametrize("method", ADDED)
@examples(10)
@given(drawn=st.data())
def test_values_are_added_within_rounding(it, method, drawn):
    out, *args = drawn.draw(ADDED[method])
    wanted = getattr(REFERENCE, method)(out.copy(), *args)
    close(it.run(method, out, *args), wanted, np.abs(out) + np.abs(wanted))


@others
@pytest.mark.parametrize("method", SUMMED)
@examples(10)
@given(drawn=st.data())
def test_sums_in_float64_are_rounded_once(it, method, drawn):
    x, *args = drawn.draw(SUMMED[method])
    got, wanted = it.run(method, x, *args), getattr(REFERENCE, method)(x, *args)
    if method == "quantile_buckets":
        same(got[0], wanted[0])
        got, wanted = got[1], wanted[1]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    error = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    scale = float(np.abs(x).max(initial=0))
    assert (error <= EPSILON * np.abs(wanted.astype(np.float64)) + 1e-12 * scale + 4 * TINY).all()


@others
@pytest.mark.parametrize("norm", ["l2", "rms"])
@examples(10)
@given(x=VECTORS, levels=LEVELS, steps=st.sampled_from([*GAUSSIAN_STEPS]), size=BUCKETS, stream=STREAMS)
def test_codes_are_equal_where_scales_are(it, norm, x, levels, steps, size, stream):
    """A code may differ by one if scales differ in the last bit and the scaled value lies within rounding of a whole
    number."""
    levels, stream = (levels, stream) if norm == "l2" else (steps, None)
    codes, scales = it.run("quantize", x, levels, size, norm, stream)
    wanted_codes, wanted_scales = REFERENCE.quantize(x, levels, size, norm, stream)
    assert (codes.dtype, codes.shape) == (wanted_codes.dtype, wanted_codes.shape)
    assert (scales.dtype, scales.shape) == (wanted_scales.dtype, wanted_scales.shape)
    bits = np.abs(scales.view(np.int32) - wanted_scales.view(np.int32))
    assert (bits <= 1).all()
    differ = np.flatnonzero(codes != wanted_codes)
    assert (bits[differ // size] == 1).all()
    assert (np.abs(codes[differ].astype(int) - wanted_codes[differ]) == 1).all()
    value = np.abs(np.float64(x[differ])) / wanted_scales[differ // size] * levels
    value += 0 if stream is None else REFERENCE.uniform(stream, x.size)[differ]
    assert (np.abs(value - np.round(value)) <= 4 * EPSILON * (levels + 1)).all()


@others
@given(x=VECTORS)
def test_rotate_equals_the_reference(it, x):
    got, wanted = it.run("rotate", x), REFERENCE.rotate(x)
    largest = np.abs(x).max(initial=0)
    close(got, wanted, np.where(np.abs(wanted) > 0, np.abs(wanted), largest * EPSILON), 128 * TINY)


@others
@given(x=FINITE, edges=st.one_of(FINITE.map(np.sort), arrays(np.float32, 255, elements=NUMBERS).map(np.sort)))
def test_bucketize_equals_the_reference(it, x, edges):
    edges = edges[:255]
    for scale in (np.float32([1]), REFERENCE.max_abs(x), np.float32([0])):
        same(it.run("bucketize", x, scale, edges), REFERENCE.bucketize(x, scale, edges))


@others
@examples(10)
@given(arrays(np.float32, st.integers(0, 130), elements=NUMBERS), st.floats(1e-6, 1e6))
@example(np.float32([1.8779531e37]), 0.0078125)
@example(np.float32([8.50706e37]), 1.0)
@example(np.float32([3e38, -3e38]), 1e-3)
def test_clip_norm(it, x, limit):
    clipped = agree(it, "clip_norm", x, limit, exact=False)
    assert np.linalg.norm(clipped.astype(np.float64)) <= limit * (1 + 1e-6) + 1e-40
    if np.linalg.norm(x.astype(np.float64)) <= limit:
        assert np.array_equal(clipped, x)


@others
@examples(10)
@given(
    arrays(np.float32, st.integers(0, 60), elements=st.one_of(NUMBERS, BAD, st.floats(-1, 1, width=32))),
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
def test_16_bits_tell_the_places_of_chunks(it):
    for n, chunk, k in ((200_001, 1024, 10), (70_000, 32, 1), (131_072, 4096, 1), (0, 64, 1)):
        found = REFERENCE.topk_chunks(data("gaussian", n), chunk, k)
        low = it.run("narrow", found)
        same(low, found.astype(np.uint16).view(np.int16))
        same(it.run("widen_chunks", low, chunk, k), found)


@every
def test_zeros_stay_zeros_where_no_level_is_zero(it):
    x = np.zeros(100, np.float32)
    x[70:] = 1
    codes, scales = it.run("quantize", x, 1.5, 64, "rms", None)
    decoded = it.run("dequantize", np.zeros_like(x), codes, scales, 1.5, 64, 1.0)
    assert scales[0] == 0
    assert not decoded[:64].any()
    assert decoded[64:].all()


@every
def test_the_sign_of_nan_is_minus_and_of_negative_zero_plus(it):
    x = np.float32([np.nan, -0.0, 0.0, -np.inf, np.inf, 1e-45, -1e-45])
    signs = it.run("unpack", it.run("pack_signs", x), 1, 7).tolist()
    assert signs == [0, 1, 1, 0, 1, 1, int(x[-1] >= 0)]


@crossed(ALL, ("value",), [0.0, 0.1, -3e38, 1e-45])
def test_equal_elements_are_not_clipped(it, value):
    x = np.full(1000, value, np.float32)
    same(it.run("clip_deviation", x, 2.5), x)
