"""Every implementation equals the NumPy reference: quantization."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Stream
from grace.kernels.contract.quantization import GAUSSIAN_STEPS
from tests.support.data import EPSILON, REFERENCE, close, data, same
from tests.support.examples import NUMBERS, VECTORS
from tests.support.kernel_cases import STREAMS, WEIGHTS, every, others

GRID = (np.arange(40_000) + 0.5) / 4_000
"""Magnitudes of a Gaussian element, in (0, 10)."""
WEIGHT = 2 * np.exp(-(GRID**2) / 2) / np.sqrt(2 * np.pi) / 4_000
"""Their probabilities."""


def check_quantized(x, levels, bucket_size, offset, got, wanted):
    """Codes are equal where scales are; where scales differ in the last bit, a code may differ by one only if the
    scaled value lies within rounding of a whole number."""
    (codes, scales), (wanted_codes, wanted_scales) = got, wanted
    assert codes.dtype == wanted_codes.dtype == np.uint8
    assert scales.dtype == wanted_scales.dtype == np.float32
    assert codes.shape == wanted_codes.shape
    assert scales.shape == wanted_scales.shape
    bits = np.abs(scales.view(np.int32) - wanted_scales.view(np.int32))
    assert (bits <= 1).all()
    differ = np.flatnonzero(codes != wanted_codes)
    assert (bits[differ // bucket_size] == 1).all()
    assert (np.abs(codes[differ].astype(int) - wanted_codes[differ]) == 1).all()
    value = np.abs(np.float64(x[differ])) / wanted_scales[differ // bucket_size] * levels
    value += offset[differ]
    assert (np.abs(value - np.round(value)) <= 4 * EPSILON * (levels + 1)).all()


LEVELS = st.sampled_from([1, 2, 7, 64, 127])
BUCKETS = st.sampled_from([1, 3, 64, 512, 1500, 10_000])


@others
@pytest.mark.parametrize("norm", ["l2", "max"])
@given(x=VECTORS, levels=LEVELS, bucket_size=BUCKETS, stream=STREAMS)
def test_quantize_gives_the_same_codes(it, norm, x, levels, bucket_size, stream):
    x = it.suited("quantize", x)
    got = it.run("quantize", x, levels, bucket_size, norm, stream)
    wanted = REFERENCE.quantize(x, levels, bucket_size, norm, stream)
    check_quantized(x, levels, bucket_size, REFERENCE.uniform(stream, x.size), got, wanted)
    if norm == "max":
        same(got[0], wanted[0])
        same(got[1], wanted[1])


@others
@given(x=VECTORS, levels=st.sampled_from([*GAUSSIAN_STEPS]), bucket_size=BUCKETS)
def test_quantize_by_root_mean_squares_gives_the_same_codes(it, x, levels, bucket_size):
    x = it.suited("quantize", x)
    got = it.run("quantize", x, levels, bucket_size, "rms", None)
    check_quantized(
        x, levels, bucket_size, np.zeros(x.size), got, REFERENCE.quantize(x, levels, bucket_size, "rms", None)
    )


@pytest.mark.parametrize("levels", GAUSSIAN_STEPS)
def test_root_mean_squares_have_the_step_of_the_smallest_error(levels):
    def error(step):
        level = np.minimum(np.floor(GRID / step) + 0.5, levels)
        return np.sum(WEIGHT * (GRID - step * level) ** 2)

    step = GAUSSIAN_STEPS[levels]
    assert error(step) < min(error(0.99 * step), error(1.01 * step))
    x = data("gaussian", 1000, 1)
    codes, scales = REFERENCE.quantize(x, levels, 1000, "rms", None)
    step *= np.sqrt(np.square(x, dtype=np.float64).mean())
    np.testing.assert_allclose(scales, levels * step, rtol=1e-6)
    decoded = REFERENCE.dequantize(np.zeros_like(x), codes, scales, levels, 1000, 1.0)
    nearest = np.clip(np.floor(x / step) + 0.5, -levels, levels)
    np.testing.assert_allclose(decoded, nearest * step, rtol=1e-5)


@every
def test_zeros_stay_zeros_where_no_level_is_zero(it):
    x = np.zeros(100, np.float32)
    x[70:] = 1
    codes, scales = it.run("quantize", x, 1.5, 64, "rms", None)
    decoded = it.run("dequantize", np.zeros_like(x), codes, scales, 1.5, 64, 1.0)
    assert scales[0] == 0
    assert not decoded[:64].any()
    assert decoded[64:].all()


@others
@given(x=VECTORS, levels=st.one_of(LEVELS, st.sampled_from([*GAUSSIAN_STEPS])), bucket_size=BUCKETS, weight=WEIGHTS)
def test_dequantize_accumulates_with_a_weight(it, x, levels, bucket_size, weight):
    codes, scales = REFERENCE.quantize(x, levels, bucket_size, "max", Stream(1) if levels in range(128) else None)
    out = data("gaussian", x.size, 9)
    term = np.float64(weight) * np.repeat(scales, bucket_size)[: x.size] * (codes.astype(np.float64) - levels) / levels
    wanted = REFERENCE.dequantize(out.copy(), codes, scales, levels, bucket_size, weight)
    close(wanted, out + term, np.abs(out) + np.abs(term))
    got = it.run("dequantize", out, codes, scales, levels, bucket_size, weight)
    close(got, wanted, np.abs(out) + np.abs(term), it.floor("dequantize"))


@others
@pytest.mark.parametrize("bits", range(1, 9))
@given(n=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_bit_for_bit(it, bits, n, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, n).astype(np.uint8)
    packed = it.run("pack", codes, bits)
    same(packed, REFERENCE.pack(codes, bits))
    same(it.run("unpack", packed, bits, n), codes)


@others
@given(x=VECTORS, weight=WEIGHTS, scale=st.one_of(st.none(), NUMBERS.map(abs)))
def test_signs_pack_and_accumulate_with_a_weight(it, x, weight, scale):
    x = it.suited("pack_signs", x)
    packed = it.run("pack_signs", x)
    same(packed, REFERENCE.pack_signs(x))
    out = data("gaussian", x.size, 9)
    factor = None if scale is None else np.float32([scale])
    wanted = REFERENCE.add_signs(out.copy(), packed, factor, weight)
    got = it.run("add_signs", out, packed, factor, weight)
    close(got, wanted, np.abs(out) + abs(weight) * (scale or 1), it.floor("add_signs"))


@every
def test_the_sign_of_nan_is_minus_and_of_negative_zero_plus(it):
    x = it.suited("pack_signs", np.float32([np.nan, -0.0, 0.0, -np.inf, np.inf, 1e-45, -1e-45]))
    signs = it.run("unpack", it.run("pack_signs", x), 1, 7).tolist()
    assert signs == [0, 1, 1, 0, 1, 1, int(x[-1] >= 0)]
