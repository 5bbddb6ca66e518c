"""Compositions: a value compressor on what a sparsifier sends."""

import numpy as np
import pytest

import grace
from grace.communicators import Allgather


def x(n: int = 4000) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("spec", ["topk(ratio=0.05) | qsgd(levels=7)", "topk | efsignsgd", "randomk | cast"])
def test_specs_round_trip_in_both_forms(spec):
    made = grace.make("compressor", spec)
    assert made.spec == spec
    assert grace.make("compressor", made.to_dict()).spec == spec


def test_traits_follow_from_the_parts():
    assert grace.make("compressor", "randomk | fp16").traits.summable
    assert not grace.make("compressor", "topk | fp16").traits.summable
    assert grace.make("compressor", "randomk(unbiased=true) | qsgd").traits.unbiased
    assert grace.make("compressor", "topk | qsgd").traits.memory == "residual"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("qsgd | topk", "qsgd is not a sparsifier"),
        ("topk | topk", "topk cannot compress values"),
        ("topk | signsgd", "signsgd cannot compress values"),
        ("topk | powersgd", "powersgd cannot compress values"),
        ("topk | qsgd | fp16", "two parts"),
        ("topk |", "two parts"),
    ],
)
def test_what_does_not_compose_is_refused(spec, message):
    with pytest.raises(grace.ConfigError, match=message):
        grace.make("compressor", spec)


@pytest.mark.parametrize("values", ["qsgd(levels=7, norm=l2)", "qsgd(levels=1, bucket_size=64)", "natural"])
def test_error_feedback_on_unbiased_values_stays_bounded(values):
    """Undamped, QSGD's variance over a bucket exceeds the values themselves, and the residual grows without bound."""
    exchange, rng = Allgather(f"topk(ratio=0.2) | {values}"), np.random.default_rng(1)
    norms = []
    for _ in range(200):
        g = rng.standard_normal(2000).astype(np.float32)
        exchange.step(g, "w")
        norms.append(np.linalg.norm(exchange.memory.state["w"]) / np.linalg.norm(g))
    assert max(norms[150:]) < 1.3 * max(norms[50:100])


@pytest.mark.slow
def test_unbiased_compositions_and_those_of_contractions_are_not_damped():
    g = x(512)
    made = grace.make("compressor", "randomk(ratio=1.0, unbiased=true) | qsgd(levels=7)")
    mean = sum(made.decompress(*made.compress(g, str(i))) for i in range(2000)) / 2000
    assert abs(float(mean @ g) / float(g @ g) - 1) < 0.03
    sent = grace.make("compressor", "topk(ratio=1.0) | efsignsgd")
    np.testing.assert_allclose(np.abs(sent.decompress(*sent.compress(g, "w"))), np.abs(g).mean(), rtol=1e-5)


@pytest.mark.parametrize("spec", ["qsgd(norm=l2)", "qsgd(levels=7, norm=l2)", "qsgd", "qsgd(levels=1)", "natural"])
def test_the_variance_is_within_the_bound(spec):
    made, rng = grace.make("compressor", spec), np.random.default_rng(3)
    for g in (rng.standard_normal(512), rng.standard_cauchy(512), np.ones(512), np.eye(1, 512)[0]):
        g = g.astype(np.float32)
        errors = [np.sum((made.decompress(*made.compress(g, str(i))) - g) ** 2) for i in range(200)]
        assert np.mean(errors) <= 1.05 * made.variance(512) * np.sum(g**2)
