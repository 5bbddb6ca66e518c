"""The value quantizers' kernels: the reference against definitions, and every implementation against it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grace.kernels import Stream
from grace.kernels.contract.quantization import HIGHEST_POWER, LOWEST_POWER
from grace.kernels.fused.primitives import FusedKernels
from grace.kernels.torch.primitives import TorchKernels
from tests.support.data import EPSILON, HUGE, REFERENCE
from tests.support.examples import examples
from tests.support.implementations import OTHERS

others = pytest.mark.parametrize("it", OTHERS)
settled = examples(20)


def data(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    gaussian = rng.standard_normal(n)
    x = {
        "gaussian": gaussian,
        "tied": rng.integers(-3, 4, n) / 4,
        "zeros": gaussian * 0,
        "mostly-zero": gaussian * (rng.random(n) < 0.02),
        "shifted": 3 + gaussian,
        "huge": rng.uniform(-HUGE, HUGE, n),
        "mixed": gaussian * 10.0 ** rng.uniform(-44, 37, n),
    }
    return x[kind].astype(np.float32)


KINDS = ("gaussian", "tied", "zeros", "mostly-zero", "shifted", "huge", "mixed")
EXTREMES = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-94, -(2.0**-95), 2.0**32, 2.0**33, 1.0, -1.0, HUGE, -HUGE]
NUMBERS = st.one_of(
    st.sampled_from(EXTREMES).map(lambda value: float(np.float32(value))),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
VECTORS = st.one_of(
    arrays(np.float32, st.integers(0, 40), elements=NUMBERS),
    st.builds(data, st.sampled_from(KINDS), st.sampled_from([0, 1, 7, 64, 1025, 3000, 20_001]), st.integers(0, 99)),
)
WEIGHTS = st.sampled_from([1.0, -1.0, 0.5, 1 / 3, -0.125])
STREAMS = st.builds(Stream, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))


def same(got, wanted) -> None:
    """Equal type, shape and values; -0 is 0."""
    assert got.dtype == wanted.dtype
    assert np.array_equal(got, wanted)


def close(got, wanted, scale, floor=1e-44) -> None:
    """The same float64 sum in another order, rounded to float32."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    error = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    assert (error <= EPSILON * np.abs(wanted.astype(np.float64)) + 1e-12 * scale + floor).all()


def magnitude(x) -> float:
    return float(np.abs(x).max(initial=0))


# -- every implementation equals the reference ---------------------------------------------------------------


@others
@settled
@given(x=VECTORS)
def test_max_abs_equals_the_reference(it, x):
    x = it.suited("max_abs", x)
    same(it.run("max_abs", x), REFERENCE.max_abs(x))


@others
@settled
@given(x=VECTORS)
def test_side_means_equal_the_reference(it, x):
    x = it.suited("side_means", x)
    close(it.run("side_means", x), REFERENCE.side_means(x), magnitude(x), it.floor("side_means"))


@others
@settled
@given(x=VECTORS, factor=st.sampled_from([0.5, 2.5, 10.0]))
def test_clip_deviation_equals_the_reference(it, x, factor):
    x = it.suited("clip_deviation", x)
    wanted = REFERENCE.clip_deviation(x, factor)
    close(it.run("clip_deviation", x, factor), wanted, magnitude(x), it.floor("clip_deviation"))


@others
@settled
@given(x=VECTORS, stream=STREAMS)
def test_round_powers_equals_the_reference(it, x, stream):
    same(it.run("round_powers", x, stream), REFERENCE.round_powers(x, stream))


@others
@settled
@given(weight=WEIGHTS)
def test_add_powers_equals_the_reference(it, weight):
    codes, out = np.arange(256, dtype=np.uint8), data("gaussian", 256, 1)
    same(it.run("add_powers", out, codes, weight), REFERENCE.add_powers(out.copy(), codes, weight))


@others
@settled
@given(x=VECTORS, edges=st.one_of(VECTORS.map(np.sort), arrays(np.float32, 255, elements=NUMBERS).map(np.sort)))
def test_bucketize_equals_the_reference(it, x, edges):
    x, edges = it.suited("bucketize", x), it.suited("bucketize", edges[:255])
    for scale in (np.float32([1]), REFERENCE.max_abs(x), np.float32([0])):
        scaled = it.suited("bucketize", x / (scale if scale[0] > 0 else 1))
        same(it.run("bucketize", x, scale, edges), REFERENCE.bucketize(scaled, np.float32([1]), edges))


@others
@settled
@given(n=st.integers(0, 40), bits=st.integers(1, 8), weight=WEIGHTS, scale=st.sampled_from([None, 0.3, 1e-40]))
def test_add_table_equals_the_reference(it, n, bits, weight, scale):
    rng = np.random.default_rng(n)
    table, out = data("gaussian", 1 << bits, n), data("gaussian", n, n + 1)
    packed = REFERENCE.pack(rng.integers(0, 1 << bits, n).astype(np.uint8), bits)
    scale = scale if scale is None else np.float32([scale])
    wanted = REFERENCE.add_table(out.copy(), packed, bits, table, scale, weight)
    same(it.run("add_table", out, packed, bits, table, scale, weight), wanted)


@others
@settled
@given(x=VECTORS, buckets=st.integers(1, 256))
def test_quantile_buckets_equal_the_reference(it, x, buckets):
    buckets = max(1, min(buckets, x.size))
    x = it.suited("quantile_buckets", x)
    codes, means = it.run("quantile_buckets", x, buckets)
    wanted, wanted_means = REFERENCE.quantile_buckets(x, buckets)
    same(codes, wanted)
    close(means, wanted_means, magnitude(x), it.floor("quantile_buckets"))


# -- the reference equals its definition -----------------------------------------------------------------------


@settled
@given(x=VECTORS, stream=STREAMS)
def test_powers_of_two_are_the_neighbours_and_the_random_number_chooses(x, stream):
    codes = REFERENCE.round_powers(x, stream)
    values = REFERENCE.add_powers(np.zeros_like(x), codes, 1.0)
    random = REFERENCE.random_bits(stream, x.size) >> np.uint32(9)
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


@settled
@given(x=VECTORS, buckets=st.integers(1, 256))
def test_quantile_buckets_are_those_of_a_sort_by_value_then_index(x, buckets):
    x = x[:500]
    buckets = max(1, min(buckets, x.size))
    codes, means = REFERENCE.quantile_buckets(x, buckets)
    order = sorted(range(x.size), key=lambda i: (x[i], i))
    assert [codes[i] for i in order] == [rank * buckets // x.size for rank in range(x.size)]
    for bucket in range(buckets if x.size else 0):
        inside = x[codes == bucket].tolist()
        assert math.isclose(
            means[bucket], math.fsum(inside) / len(inside), rel_tol=EPSILON, abs_tol=1e-12 * magnitude(x) + 1e-44
        )


@settled
@given(x=VECTORS)
def test_clipping_is_at_multiples_of_the_standard_deviation(x):
    clipped = REFERENCE.clip_deviation(x, 1.5)
    if x.size and x.astype(np.float64).std() > 1e-5 * abs(x.astype(np.float64).mean()):
        limit = 1.5 * x.astype(np.float64).std()
        assert np.allclose(clipped, np.clip(x.astype(np.float64), -limit, limit), rtol=2 * EPSILON, atol=1e-44)


@pytest.mark.parametrize("value", [0.0, 0.1, -3e38, 1e-45])
def test_equal_elements_are_not_clipped(value):
    x = np.full(1000, value, np.float32)
    for kernels in (REFERENCE, FusedKernels()):
        same(kernels.clip_deviation(x, 2.5), x)
    same(TorchKernels().clip_deviation(torch.from_numpy(x), 2.5).numpy(), x)
