"""Compositions: a value compressor on what a sparsifier sends."""

import numpy as np
import pytest

import grace
from grace.composition import Composed


def x(n: int = 4000) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("spec", ["topk(ratio=0.05) | qsgd(levels=7)", "topk | efsignsgd", "randomk | cast"])
def test_specs_round_trip_in_both_forms(spec):
    made = grace.make("compressor", spec)
    assert made.spec == spec
    assert grace.make("compressor", made.to_dict()).spec == spec


def test_sparse_ternary_compression_is_topk_with_signs_and_a_mean():
    g = x()
    made = grace.make("compressor", "topk(ratio=0.05) | efsignsgd")
    value = made.decompress(*made.compress(g, "w"))
    top = np.argsort(-np.abs(g), kind="stable")[:200]
    expected = np.zeros_like(g)
    expected[top] = np.sign(g[top]) * np.abs(g[top]).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("spec", ["topk(ratio=0.05) | qsgd(levels=7)", "topk(ratio=0.3) | efsignsgd", "randomk | cast"])
@pytest.mark.parametrize("n", [1, 7, 4000, 70_000])
def test_the_payload_has_the_bits_that_wire_bits_says(spec, n):
    made = grace.make("compressor", spec)
    payload, _ = made.compress(x(n), "w")
    assert 8 * sum(tensor.nbytes for tensor in payload) == pytest.approx(made.wire_bits((n,)) * n)


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


def test_error_feedback_covers_both_errors():
    grace.init("local")
    communicator = grace.make("compressor", "topk(ratio=0.05) | qsgd(levels=7)")
    assert isinstance(communicator, Composed)
    from grace.communicators import Allgather

    exchange, rng = Allgather(communicator), np.random.default_rng(1)
    residual = np.zeros(4000, np.float32)
    for _ in range(10):
        g = rng.standard_normal(4000).astype(np.float32)
        sent = exchange.step(g, "w")
        after = exchange.memory.state["w"]
        np.testing.assert_allclose(sent + after, g + residual, rtol=1e-5, atol=1e-5)
        residual = after.copy()
