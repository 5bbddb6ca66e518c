"""The reference equals definitions written element by element."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Stream
from tests.support.data import HUGE, REFERENCE, TINY, same
from tests.support.examples import VECTORS
from tests.support.implementations import ALL


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


@pytest.mark.parametrize("it", ALL)
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_a_value_equal_to_the_scale_never_exceeds_the_top_level(it, norm, levels):
    for value in (1.0, -1.0, 0.1, -HUGE, HUGE, 1e-45, -3e-39):
        x = it.suited("quantize", np.full(4000, value, np.float32))
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
