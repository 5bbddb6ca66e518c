"""The reference equals definitions written element by element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Stream
from grace.kernels.constants import GAUSSIAN_STEPS, HIGHEST_POWER, LOWEST_POWER
from tests.support.data import EPSILON, HUGE, REFERENCE, TINY, close, data, same
from tests.support.examples import VECTORS
from tests.support.implementations import ALL, crossed


@pytest.mark.parametrize("bits", range(1, 9))
@given(n=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_pack_is_one_little_endian_bit_stream(bits, n, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, n)
    stream = sum(int(code) << i * bits for i, code in enumerate(codes))
    size = (n * bits + 7) // 8
    assert REFERENCE.pack(codes.astype(np.uint8), bits).tobytes() == stream.to_bytes(size, "little")


@given(x=VECTORS, part=st.floats(0, 1))
def test_topk_takes_the_largest_magnitudes_and_the_lowest_index_of_equals(x, part):
    k = round(part * x.size)
    order = sorted(range(x.size), key=lambda i: (-abs(float(x[i])), i))
    assert REFERENCE.topk(x, k).tolist() == sorted(order[:k])


def test_topk_ranks_nan_above_inf_above_the_rest():
    x = np.float32([1, np.inf, HUGE, np.nan, -np.inf])
    assert [REFERENCE.topk(x, k).tolist() for k in (1, 2, 3, 4)] == [[3], [1, 3], [1, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("norm", ["l2", "max"])
@given(x=VECTORS, levels=st.sampled_from([1, 7, 127]), bucket_size=st.sampled_from([1, 5, 512]))
def test_quantize_rounds_each_scaled_magnitude_up_or_down(norm, x, levels, bucket_size):
    codes, scales = REFERENCE.quantize(x, levels, bucket_size, norm, Stream(7))
    for bucket in range(scales.size):
        part = np.float64(x[bucket * bucket_size : (bucket + 1) * bucket_size])
        exact = np.abs(part).max() if norm == "max" else np.sqrt((part**2).sum())
        assert abs(scales[bucket] - min(exact, HUGE)) <= 1e-7 * exact + TINY
        code = codes[bucket * bucket_size :][: part.size].astype(int) - levels
        scaled = part / scales[bucket] * levels if scales[bucket] else part * 0
        assert (np.abs(code - scaled) < 1 + 1e-4).all()
        assert (np.abs(code) <= levels).all()
        assert (code * part >= 0).all()


@crossed(ALL, ("norm", "levels"), ["l2", "max"], [1, 7, 127])
def test_a_value_equal_to_the_scale_never_exceeds_the_top_level(it, norm, levels):
    for value in (1.0, -1.0, 0.1, -HUGE, HUGE, 1e-45, -3e-39):
        x = np.full(4000, value, np.float32)
        if not x.any():
            continue
        codes, scales = it.run("quantize", x, levels, 1, norm, Stream(3))
        assert (codes == (2 * levels if value > 0 else 0)).all()
        got = it.run("dequantize", np.zeros_like(x), codes, scales, levels, 1, 1.0)
        same(got, x)


@pytest.mark.parametrize("it", ALL)
def test_the_l2_scale_of_huge_values_is_the_largest_float32(it):
    codes, scales = it.run("quantize", np.full(512, HUGE, np.float32), 127, 512, "l2", Stream(3))
    assert scales.tolist() == [HUGE]
    assert (codes == 254).all()


# -- levels ------------------------------------------------------------------------------------------------


@given(x=VECTORS, levels=st.sampled_from([1, 7, 127]), bucket_size=st.sampled_from([1, 3, 64, 1500]))
def test_without_a_stream_levels_are_the_nearest(x, levels, bucket_size):
    codes, scales = REFERENCE.quantize(x, levels, bucket_size, "max", None)
    scaled = np.float64(np.abs(x)) / np.maximum(np.repeat(scales, bucket_size)[: x.size], 1e-45) * levels
    assert (np.abs(np.abs(codes.astype(int) - levels) - scaled) <= 0.5 + 4 * EPSILON * levels).all()


GRID = (np.arange(40_000) + 0.5) / 4_000
"""Magnitudes of a Gaussian element, in (0, 10)."""
PROBABILITY = 2 * np.exp(-(GRID**2) / 2) / np.sqrt(2 * np.pi) / 4_000


@pytest.mark.parametrize("levels", GAUSSIAN_STEPS)
def test_root_mean_squares_have_the_step_of_the_smallest_error(levels):
    def error(step):
        level = np.minimum(np.floor(GRID / step) + 0.5, levels)
        return np.sum(PROBABILITY * (GRID - step * level) ** 2)

    step = GAUSSIAN_STEPS[levels]
    assert error(step) < min(error(0.99 * step), error(1.01 * step))
    x = data("gaussian", 1000, 1)
    codes, scales = REFERENCE.quantize(x, levels, 1000, "rms", None)
    step *= np.sqrt(np.square(x, dtype=np.float64).mean())
    np.testing.assert_allclose(scales, levels * step, rtol=1e-6)
    decoded = REFERENCE.dequantize(np.zeros_like(x), codes, scales, levels, 1000, 1.0)
    nearest = np.clip(np.floor(x / step) + 0.5, -levels, levels)
    np.testing.assert_allclose(decoded, nearest * step, rtol=1e-5)


# -- 8-bit floats and rotations ----------------------------------------------------------------------------


@given(x=VECTORS)
def test_rotating_twice_is_nothing_and_keeps_the_norm(x):
    x = x * np.float32(2.0**-10)
    rotated = REFERENCE.rotate(x)
    largest = float(np.abs(x).max(initial=0))
    close(REFERENCE.rotate(rotated), x, 32 * largest, 1e-43)
    assert np.isclose(np.linalg.norm(np.float64(rotated)), np.linalg.norm(np.float64(x)), rtol=1e-5, atol=1e-42)


def test_a_rotation_is_hadamards_matrix_and_leaves_the_end():
    matrix = np.stack([REFERENCE.rotate(row) for row in np.eye(32, dtype=np.float32)])
    assert np.allclose(matrix @ matrix.T, np.eye(32), atol=1e-6)
    assert np.allclose(np.abs(matrix), 32**-0.5)
    same(REFERENCE.rotate(np.arange(40, dtype=np.float32))[32:], np.arange(32, 40, dtype=np.float32))


@given(x=VECTORS)
def test_the_nearest_8_bit_float_is_that_of_torch(x):
    codes, scales = REFERENCE.round_float8(x, max(1, x.size), None)
    if not x.size or not scales[0] > 1e-30:
        return
    scaled = torch.from_numpy(np.abs(x) / scales[0] * np.float32(448))
    nearest = scaled.to(torch.float8_e4m3fn).float().numpy()
    mine = (REFERENCE.add_float8(np.zeros_like(x), codes, np.float32([448]), x.size, 1.0)).round(9)
    # of two equally near torch takes the even one
    assert np.allclose(np.abs(np.abs(mine) - scaled.numpy()), np.abs(nearest - scaled.numpy()), rtol=1e-4, atol=1e-4)
    assert (np.sign(mine) * np.sign(x) >= 0).all()


def test_stochastic_8_bit_floats_are_right_on_average():
    x = np.full(200_000, 0.3, np.float32)
    x[0] = 1
    codes, scales = REFERENCE.round_float8(x, x.size, Stream(3))
    values = REFERENCE.add_float8(np.zeros_like(x), codes, scales, x.size, 1.0)[1:]
    assert len(set(values.tolist())) == 2
    assert abs(values.mean(dtype=np.float64) - 0.3) < 6 * np.ptp(values) / 2 / values.size**0.5


# -- powers of two, quantiles and clipping -----------------------------------------------------------------


@given(x=VECTORS, key=st.integers(0, 2**64 - 1))
def test_powers_of_two_are_the_neighbours_and_the_random_number_chooses(x, key):
    codes = REFERENCE.round_powers(x, Stream(key))
    values = REFERENCE.add_powers(np.zeros_like(x), codes, 1.0)
    random = REFERENCE.random_bits(Stream(key), x.size) >> np.uint32(9)
    for number, value, r in zip(x[:200].tolist(), values[:200].tolist(), random[:200].tolist(), strict=True):
        if number == 0:
            assert value == 0
            continue
        fraction, exponent = math.frexp(abs(number))  # fraction in [1/2, 1)
        exponent -= 1
        if exponent >= -126:
            exponent += (2 * fraction - 1) * 2**23 + r >= 2**23
        exponent = min(max(exponent, LOWEST_POWER), HIGHEST_POWER)
        assert value == math.copysign(2.0**exponent, number)


def test_every_code_of_a_power_comes_back():
    exponents = np.arange(LOWEST_POWER, HIGHEST_POWER + 1)
    assert exponents.size == 127
    x = np.ldexp(1.0, exponents).astype(np.float32)
    for signed in (x, -x, np.zeros(1, np.float32)):
        codes = REFERENCE.round_powers(signed, Stream(1))
        same(REFERENCE.add_powers(np.zeros_like(signed), codes, 1.0), signed)


@given(x=VECTORS, buckets=st.integers(1, 256))
def test_quantile_buckets_are_those_of_a_sort_by_value_then_index(x, buckets):
    x = x[:500]
    buckets = max(1, min(buckets, x.size))
    codes, means = REFERENCE.quantile_buckets(x, buckets)
    order = sorted(range(x.size), key=lambda i: (x[i], i))
    assert [codes[i] for i in order] == [rank * buckets // x.size for rank in range(x.size)]
    largest = float(np.abs(x).max(initial=0))
    for bucket in range(buckets if x.size else 0):
        inside = x[codes == bucket].tolist()
        mean = math.fsum(inside) / len(inside)
        assert math.isclose(means[bucket], mean, rel_tol=EPSILON, abs_tol=1e-12 * largest + 1e-44)


@given(x=VECTORS)
def test_clipping_is_at_multiples_of_the_standard_deviation(x):
    clipped = REFERENCE.clip_deviation(x, 1.5)
    wide = x.astype(np.float64)
    if x.size and wide.std() > 1e-5 * abs(wide.mean()):
        limit = 1.5 * wide.std()
        assert np.allclose(clipped, np.clip(wide, -limit, limit), rtol=2 * EPSILON, atol=1e-44)


# -- sparsification ----------------------------------------------------------------------------------------


@given(x=VECTORS, threshold=st.one_of(st.floats(0, 3.4e38), st.sampled_from([0.0, 1e-50, 0.01])))
def test_elements_above_a_threshold_and_on_one_side(x, threshold):
    with np.errstate(all="ignore"):
        above = [i for i, v in enumerate(x) if abs(v) > np.float32(threshold)]
    assert REFERENCE.above(x, threshold).tolist() == above
    for sign in (1, -1):
        side, count = REFERENCE.one_side(x, sign)
        assert count == (side > 0).sum() == (sign * x > 0).sum()
        assert not np.signbit(side).any()


@given(x=VECTORS, bits=st.integers(5, 7), part=st.floats(0, 1))
def test_topk_of_chunks_is_that_of_each(x, bits, part):
    chunk = 1 << bits
    k = max(1, round(part * chunk))
    each = [x[low : low + chunk] for low in range(0, x.size, chunk)]
    wanted = [REFERENCE.topk(one, -(-k * one.size // chunk)) + chunk * i for i, one in enumerate(each)]
    same(REFERENCE.topk_chunks(x, chunk, k), np.concatenate([np.empty(0, np.int32), *wanted]).astype(np.int32))


@given(st.integers(1, 2**31 - 1), st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_sample_indices_takes_one_of_each_slice(n, k, key):
    k = min(n, k)
    indices = REFERENCE.sample_indices(Stream(key, 3), n, k).astype(np.int64)
    starts, stops = ([(j + more) * n // k for j in range(k)] for more in (0, 1))
    assert ((indices >= starts) & (indices < stops)).all()


def test_sample_indices_are_uniform():
    hits = np.zeros(1000)
    for step in range(400):
        hits[REFERENCE.sample_indices(Stream(5, step), 1000, 300)] += 1
    assert hits.sum() == 400 * 300
    assert np.allclose(hits.reshape(4, 250).mean(axis=1), 120, rtol=0.02)
    assert hits.min() > 50
