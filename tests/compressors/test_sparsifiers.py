"""threshold, dgc, adaptive and inceptionn: payloads whose size depends on the data."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import grace
from grace.communicators import Allgather
from grace.compressors.dgc import DGC
from grace.compressors.topk import kept_count
from grace.core.context import Context
from grace.core.variable import Variable
from grace.kernels import kernels_of
from grace.kernels.index_coding import decode
from grace.session.sharding import uniform
from tests.support.examples import examples

SPECS = ["threshold(value=0.5)", "dgc(ratio=0.05)", "adaptive(ratio=0.05)", "inceptionn"]
SPARSE = SPECS[:3]
quick = examples(20)


def make(spec):
    return grace.make("compressor", spec)


def normal(n, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def indices_of(compressor, x):
    payload, ctx = compressor.compress(x, "w")
    return np.asarray(compressor.sent_indices(payload, ctx))


def roundtrip(spec, x):
    compressor = make(spec)
    return compressor.decompress(*compressor.compress(x, "w"))


# -- all of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_what_has_no_known_size_is_compressed(spec):
    variables = [Variable("w", (3,), "float32"), Variable("empty", (0,), "float32")]
    communicator = Allgather(spec)
    shards = uniform(variables, communicator)
    assert shards[0].communicator is communicator
    assert shards[1].communicator is not communicator


@pytest.mark.parametrize("spec", SPARSE)
def test_sent_indices_are_what_decodes_to_non_zero(spec):
    compressor, x = make(spec), normal(5000)
    out = roundtrip(spec, x)
    assert np.array_equal(np.sort(indices_of(compressor, x)), np.flatnonzero(out))


def spikes(n, count):
    """So many entries of which each is far above the rest, which is zero."""
    x = np.zeros(n, np.float32)
    x[:: max(1, n // max(1, count))][:count] = np.resize([0.1, -0.9, 3.0, -2.0], count)
    return x


def of_sides(n, m):
    """Half of the positive and half of the negative entries, by 16-bit index, and two means."""
    return 8 + 2 * sum(max(1, round(side / 2)) for side in ((m + 1) // 2, m // 2) if side)


def of_formats(n, m):
    """2-bit tags of all, and 1, 2, 4 and 4 bytes for the spikes."""
    return math.ceil(n / 4) + sum([1, 2, 4, 4][i % 4] for i in range(m))


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        ("threshold(value=0.05)", lambda n, m: (4 + 2) * m),
        ("dgc(ratio=0.05)", lambda n, m: (4 + 2) * m),
        ("adaptive(ratio=0.5)", of_sides),
        ("inceptionn(error_bound=0.001)", of_formats),
        ("threshold(value=0.05) | natural", lambda n, m: (1 + 2) * m),
        ("dgc(ratio=0.05) | efsignsgd", lambda n, m: math.ceil(m / 8) + 4 + 2 * m),
    ],
)
def test_bytes_that_depend_on_the_data_are_those_of_the_entries_sent(spec, nbytes):
    for n in (1, 216, 1003, 2050):
        for count in (min(n, 3), min(n, 7)):
            payload, _ = make(spec).compress(spikes(n, count), "w")
            assert sum(tensor.nbytes for tensor in payload) == nbytes(n, count)


# -- threshold -----------------------------------------------------------------------------------------------


def test_threshold_follows_the_loss_scale():
    compressor = make("threshold(value=0.5)")
    compressor.bind(Context(loss_scale=1024.0))
    assert indices_of(compressor, np.float32([513, 512, -600])).tolist() == [0, 2]


# -- dgc -----------------------------------------------------------------------------------------------------


def gaussian(n):
    return normal(n)


def heavy_tailed(n):
    return np.random.default_rng(1).standard_cauchy(n).astype(np.float32) ** 3


def sorted_by_size(n):
    return np.sort(np.abs(normal(n)))


def few_values(n):
    return np.random.default_rng(2).integers(-2, 3, n).astype(np.float32)


def constant(n):
    return np.full(n, -0.25, np.float32)


@pytest.mark.parametrize("make_x", [gaussian, heavy_tailed, sorted_by_size, few_values, constant])
def test_dgc_counts(make_x):
    for n in (1, 10, 150, 256, 257, 5_000, 100_003):
        x = make_x(n)
        for ratio in (0.001, 0.01, 0.1, 0.4, 1.0):
            indices, goal = indices_of(DGC(ratio=ratio), x), ratio * n
            assert len(indices) <= max(1, 1.3 * goal)
            assert len(indices) >= min(math.ceil(0.7 * goal), max(1, math.floor(1.3 * goal)), np.count_nonzero(x))
            assert (np.diff(indices) > 0).all()
            left = np.delete(np.abs(x), indices)
            if len(indices) and left.size:  # a threshold separates what was sent from what was not
                assert np.abs(x[indices]).min() >= left.max()


@pytest.mark.parametrize("n", [32, 33, 63, 70, 1000])
@pytest.mark.parametrize("ratio", [1 / 32, 0.2, 0.9])
def test_chunks_leave_no_more_than_their_bound(n, ratio):
    share = kept_count(ratio, 32) / 32
    worst = np.ones(n, np.float32)
    worst[n // 32 * 32 :] = 0  # at the end a larger part is sent
    for x in (worst, normal(n), np.ones(n, np.float32)):
        left = np.float64(x - roundtrip({"name": "topk", "ratio": ratio, "chunk": 32}, x))
        assert np.square(left).sum() <= (1 - share) * np.square(np.float64(x)).sum() * (1 + 1e-12)


def test_dgc_cuts_ties_by_index():
    assert indices_of(DGC(ratio=0.01), constant(1000)).tolist() == list(range(10))


def test_dgc_spends_its_ratio_on_average():
    counts = []
    for step in range(50):
        dgc = DGC(ratio=0.01)
        dgc.context.step = step
        counts.append(len(indices_of(dgc, normal(50_000, seed=step))))
    assert 0.9 < np.mean(counts) / 500 < 1.1
    assert min(counts) >= 350
    assert max(counts) <= 650


def test_dgc_single_spike():
    x = np.zeros(50_000, np.float32)
    x[31_234] = 1e30
    assert indices_of(DGC(), x).tolist() == [31_234]
    x = normal(50_000)
    x[31_234] = 1e30
    assert 31_234 in indices_of(DGC(), x)


def test_dgc_sends_one_entry_of_a_tiny_tensor():
    assert indices_of(DGC(ratio=0.01), np.float32([1, -3, 2])).tolist() == [1]


def test_dgc_warms_up_as_the_paper_does():
    dgc, sparsity = DGC(ratio=0.001, warmup_steps=4), []
    for step in range(6):
        dgc.context.step = step
        sparsity.append(100 * (1 - dgc.current_ratio))
    # "75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 % (exponentially increase till 99.9 %)", section 4
    assert np.allclose(sparsity, [75, 93.75, 98.4375, 99.6, 99.9, 99.9], atol=0.05)


def test_dgc_warm_up_is_exponential_and_counted():
    dgc, x = DGC(ratio=0.01, warmup_steps=10), normal(20_000)
    for step in range(12):
        dgc.context.step = step
        ratio = 0.25 * 0.04 ** (min(step, 10) / 10)
        assert dgc.current_ratio == pytest.approx(ratio)
        assert 0.7 * ratio * 20_000 <= len(indices_of(dgc, x)) <= 1.3 * ratio * 20_000
    assert DGC(ratio=0.3, warmup_steps=10).current_ratio == 0.3


def test_dgc_samples_anew_each_step_and_alike_after_a_resume():
    first, second = DGC(ratio=0.01), DGC(ratio=0.01)
    x = normal(60_000)
    assert np.array_equal(indices_of(first, x), indices_of(second, x))
    second.context.step = 1
    assert not np.array_equal(indices_of(first, x), indices_of(second, x))


# -- adaptive ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positive", [0, 1, 30, 970, 1000])
def test_adaptive_keeps_its_ratio_of_each_side(positive):
    x = np.abs(normal(1000)) + 0.1
    x[positive:] *= -1
    compressor = make("adaptive(ratio=0.1)")
    payload, _ = compressor.compress(x, "w")
    means, *sides = payload
    for sign, coded, mean in zip((1, -1), sides, means, strict=True):
        members = np.flatnonzero(sign * x > 0)
        indices = decode(kernels_of(x), coded, 1000)
        assert len(indices) == kept_count(0.1, len(members))
        largest = members[np.argsort(-np.abs(x[members]), kind="stable")[: len(indices)]]
        assert sorted(largest) == indices.tolist()
        assert mean == pytest.approx(np.abs(x[largest]).mean() if len(largest) else 0.0)
    out = compressor.decompress(payload, (1000,))
    assert np.count_nonzero(out) == len(sides[0]) + len(sides[1])
    assert (out * x >= 0).all()


def test_adaptive_breaks_ties_by_index():
    x = np.float32([1, -1] * 10)
    assert indices_of(make("adaptive(ratio=0.3)"), x).tolist() == [0, 2, 4, 1, 3, 5]


# -- inceptionn ----------------------------------------------------------------------------------------------


@quick
@given(
    arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    arrays(np.float32, st.integers(0, 60), elements=st.floats(-1, 1, width=32)),
    st.one_of(st.floats(1e-30, 1), st.sampled_from([1e-3, 2.0**-10, 2e-10, 1.0, 0.5, 2.0**-16, 1e-5])),
)
def test_inceptionn_error_bound(wild, inside, bound):
    x = np.concatenate([wild, inside, np.float32([0, 1, -1, bound, -bound])])
    for tensor in (x, torch.from_numpy(x)):
        out = np.asarray(roundtrip({"name": "inceptionn", "error_bound": bound}, tensor))
        error = np.abs(out.astype(np.float64) - x.astype(np.float64))
        within = np.abs(x) <= 1
        assert (error[within] <= bound).all()
        assert np.array_equal(out[~within], x[~within])


def test_inceptionn_sizes():
    x = np.float32([0, 5e-4, 0.1, -0.2, 0.3, -1, 1.5, 100])
    (tags, small, medium, exact), _ = make("inceptionn(error_bound=0.001)").compress(x, "w")
    assert (tags.nbytes, small.dtype, medium.dtype, exact.dtype) == (2, np.int8, np.int16, np.float32)
    assert (small.size, medium.size) == (2, 1)
    assert exact.tolist() == [-1, 1.5, 100]  # 1 itself is one step more than 16 bits hold


def test_inceptionn_follows_the_loss_scale():
    plain, scaled = make("inceptionn"), make("inceptionn")
    scaled.bind(Context(loss_scale=65536.0))
    x = normal(1000, scale=0.1)
    small, _ = plain.compress(x, "w")
    large, ctx = scaled.compress(x * np.float32(65536), "w")
    assert [t.nbytes for t in small] == [t.nbytes for t in large]
    error = scaled.decompress(large, ctx).astype(np.float64) / 65536 - x
    assert np.abs(error).max() <= 1e-3


def test_inceptionn_carries_nan_and_inf():
    x = np.float32([np.nan, np.inf, -np.inf, 0.5])
    np.testing.assert_array_equal(roundtrip("inceptionn", x)[:3], x[:3])
    np.testing.assert_array_equal(Allgather("inceptionn").step(x, "w")[:3], x[:3])


@pytest.mark.parametrize("spec", ["threshold(value=-1)", "threshold(value=1e39)", "dgc(ratio=0)", "dgc(sample=2)",
                                  "dgc(warmup_steps=-1)", "adaptive(ratio=2)", "inceptionn(error_bound=0)",
                                  "inceptionn(error_bound=2)"])  # fmt: skip
def test_bad_parameters_are_refused(spec):
    with pytest.raises(grace.ConfigError):
        make(spec)
