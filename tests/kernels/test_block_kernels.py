"""8-bit floats and rotations: the reference against definitions, and every implementation against it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace.errors import PayloadError
from grace.kernels import Stream
from tests.support.data import EPSILON, REFERENCE, close, data, same
from tests.support.examples import VECTORS
from tests.support.kernel_cases import STREAMS, WEIGHTS, every, others

BUCKETS = st.sampled_from([1, 3, 64, 512, 1500, 10_000])
MAYBE = st.one_of(st.none(), STREAMS)


@others
@given(x=VECTORS, bucket_size=BUCKETS, stream=MAYBE)
def test_round_float8_gives_the_same_codes(it, x, bucket_size, stream):
    x = it.suited("round_float8", x)
    got, wanted = it.run("round_float8", x, bucket_size, stream), REFERENCE.round_float8(x, bucket_size, stream)
    same(got[0], wanted[0])
    same(got[1], wanted[1])


@others
@given(x=VECTORS, levels=st.sampled_from([1, 7, 127]), bucket_size=BUCKETS)
def test_without_a_stream_levels_are_the_nearest(it, x, levels, bucket_size):
    x = it.suited("quantize", x)
    got = it.run("quantize", x, levels, bucket_size, "max", None)
    wanted = REFERENCE.quantize(x, levels, bucket_size, "max", None)
    same(got[0], wanted[0])
    same(got[1], wanted[1])
    scaled = np.float64(np.abs(x)) / np.maximum(np.repeat(wanted[1], bucket_size)[: x.size], 1e-45) * levels
    assert (np.abs(np.abs(wanted[0].astype(int) - levels) - scaled) <= 0.5 + 4 * EPSILON * levels).all()


@others
@given(x=VECTORS, bucket_size=BUCKETS, weight=WEIGHTS)
def test_add_float8_accumulates_with_a_weight(it, x, bucket_size, weight):
    codes, scales = REFERENCE.round_float8(x, bucket_size, Stream(1))
    out = data("gaussian", x.size, 9)
    got = it.run("add_float8", out, codes, scales, bucket_size, weight)
    wanted = REFERENCE.add_float8(out.copy(), codes, scales, bucket_size, weight)
    close(got, wanted, np.abs(out) + np.abs(wanted), it.floor("add_float8"))


@others
@given(x=VECTORS)
def test_rotate_equals_the_reference(it, x):
    x = it.suited("rotate", x)
    got, wanted = it.run("rotate", x), REFERENCE.rotate(x)
    largest = np.abs(x).max(initial=0)
    close(got, wanted, np.where(np.abs(wanted) > 0, np.abs(wanted), largest * EPSILON), 32 * it.floor("rotate"))


@given(x=VECTORS)
def test_rotating_twice_is_nothing_and_keeps_the_norm(x):
    x = x * np.float32(2.0**-10)
    turned = REFERENCE.rotate(x)
    largest = float(np.abs(x).max(initial=0))
    close(REFERENCE.rotate(turned), x, 32 * largest, 1e-43)
    assert np.isclose(np.linalg.norm(np.float64(turned)), np.linalg.norm(np.float64(x)), rtol=1e-5, atol=1e-42)


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


@every
@pytest.mark.parametrize(("codes", "scales"), [(3, 1), (4, 2), (4, 0)])
def test_what_does_not_fit_is_refused(it, codes, scales):
    if getattr(it.kernels, "traced", None) is not None:
        pytest.skip("a graph does not know how many there are")
    args = it.to(np.zeros(4, np.float32)), it.to(np.zeros(codes, np.uint8)), it.to(np.ones(scales, np.float32))
    with pytest.raises(PayloadError):
        it.kernels.add_float8(*args, 4, 1.0)
