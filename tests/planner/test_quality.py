"""Classes of methods, and what they are expected to lose against what they do lose of Gaussian gradients."""

import numpy as np
import pytest
import torch

from grace.core import registry
from grace.core.registry import known, make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.expected import FORMULAS, SPECTRUM, expected_error, kept
from grace.planner.quality import CLASSES, Errors, allows, check_quality, class_of, times


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "fp16",
        "topk(ratio=0.001)",
        "topk(ratio=0.05)",
        "dgc",
        "randomk(ratio=0.05)",
        "randomk(ratio=0.05, unbiased=true)",
        "qsgd",
        "qsgd(levels=7)",
        "qsgd(levels=1)",
        "qsgd(levels=7, bucket_size=64)",
        "qsgd(norm=l2)",
        "qsgd(levels=7, norm=l2)",
        "terngrad",
        "natural",
        "onebit",
        "efsignsgd",
        "sketch",
        "topk | efsignsgd",
    ],
)
@pytest.mark.parametrize("shape", [(256, 256), (300, 20, 3, 3)])
def test_the_expected_error_is_that_of_gaussian_gradients(spec, shape):
    x = np.random.default_rng(1).standard_normal(shape).astype("float32")
    compressor = make("compressor", spec)
    lost = x - compressor.decompress(*compressor.compress(x, "w"))
    assert expected_error(spec, shape) == pytest.approx(float(np.sum(lost**2) / np.sum(x**2)), rel=0.1, abs=1e-12)


@pytest.mark.parametrize(("ratio", "chunk"), [(0.01, 1024), (0.01, 128), (0.1, 64)])
def test_chunks_that_choose_apart_keep_as_much_less_as_is_expected(ratio, chunk):
    spec, x = f"topk(ratio={ratio}, chunk={chunk})", np.random.default_rng(1).standard_normal(1 << 19).astype("float32")
    compressor = make("compressor", spec)
    sent = compressor.compress(x, "w")[0][0]
    largest = np.sort(np.abs(x))[-sent.size :]
    less = (np.sum(largest**2) - np.sum(sent**2)) / np.sum(x**2)
    assert expected_error(spec, x.shape) - (1 - kept(sent.size / x.size)) == pytest.approx(less, rel=0.25)


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_low_rank_methods_lose_what_falls_off_in_the_spectrum(rank):
    random = np.random.default_rng(2)
    left, right = (np.linalg.qr(random.standard_normal((300, 300)))[0] for _ in range(2))
    tails = np.append((1 + np.arange(300.0)) ** -SPECTRUM, 0)
    x = (left * np.sqrt(tails[:-1] - tails[1:]) @ right).astype("float32")
    compressor = make("compressor", f"powersgd(rank={rank})")
    for _ in range(4):  # it starts warm
        lost = x - compressor.decompress(*compressor.compress(x, "w"))
        compressor.state.commit()
    found = expected_error(compressor.spec, x.shape)
    assert found == pytest.approx(float(np.sum(lost**2) / np.sum(x**2)), rel=0.1)
    assert expected_error("powersgd(rank=4)", (1000, 1000)) == pytest.approx(0.15)


def test_formulas_are_of_methods_that_there_are():
    assert not FORMULAS.keys() - known("compressor").keys()
    assert expected_error("bf16", (9,)) == 64 * expected_error("fp16", (9,))
    assert kept(0.5) > 0.5


def test_a_method_of_the_user_s_is_sampled(monkeypatch):
    class Halved(type(make("compressor", "fp16"))):
        name = "halved_for_a_test"
        __module__ = "elsewhere"

        def __init__(self):
            super().__init__()

        def decompress(self, payload, ctx):
            return super().decompress(payload, ctx) / 2

    monkeypatch.setitem(registry._registered["compressor"], Halved.name, Halved)
    assert expected_error(Halved.name, (100,)) == pytest.approx(0.25, rel=1e-3)


def test_classes_follow_traits_and_memories():
    found = {name: class_of(name) for name in known("compressor")}
    assert {name for name, c in found.items() if c == "exact"} == {"none"}
    assert {name for name, c in found.items() if c == "unbiased"} == {"qsgd", "natural", "terngrad"}
    assert {"topk", "powersgd", "onebit", "efsignsgd", "randomk"} <= {n for n, c in found.items() if c == "feedback"}
    assert {found[name] for name in ("signsgd", "signum", "dgc", "threshold", "inceptionn")} == {None}
    assert class_of("randomk(unbiased=true)") == "unbiased"
    assert class_of("topk", "none") is None
    assert class_of("topk", "dgc") is None
    assert class_of("none", "residual") is None
    for name, made in known("compressor").items():
        if made().votes:
            assert class_of(name, "residual") is None


def test_a_class_allows_those_before_it():
    for i, quality in enumerate(CLASSES):
        assert [allows(quality, other) for other in CLASSES] == [j <= i for j in range(4)]
    with pytest.raises(ConfigError, match="'exact', 'half', 'unbiased', 'feedback', not 'best'"):
        check_quality("best")


def test_measured_errors_count_before_expected_ones():
    w, bias = Variable("w", (100, 100)), Variable("bias", (100,))
    errors = Errors.of([w, bias], {"topk": {"w": 7.0}}, {"w": 30_000.0})
    assert errors.of_method("topk(ratio=0.01)", w) == 7.0  # the same spec in its shortest form
    assert errors.of_method("efsignsgd", w) == pytest.approx(30_000 * (1 - 2 / np.pi))
    assert errors.of_method("efsignsgd", bias) == pytest.approx(300 * (1 - 2 / np.pi))
    assert errors.of_method("powersgd(rank=4)", bias) == errors.of_method("signsgd", w) == 0.0
    assert errors.budget("topk", [w, bias]) == 7.0 + errors.of_method("topk", bias)
    with pytest.raises(ConfigError, match="'signsgd' votes"):
        errors.budget("signsgd", [w])


def test_means_compressed_again_count_twice_without_a_memory():
    assert [times(s, "none") for s in ("reduce_broadcast", "scatter_reduce", "allreduce")] == [2, 2, 1]
    assert times("reduce_broadcast", "residual") == 1


def test_a_reference_that_loses_nothing_leaves_room_for_16_bit_floats():
    x = torch.outer(torch.linspace(0.1, 1, 300), torch.linspace(-1, 1, 200))  # of rank 1, which PowerSGD keeps whole
    w, norm = Variable("w", (300, 200)), float(x.double().square().sum())
    lost = float((x - x.half().float()).double().square().sum())
    errors = Errors({"powersgd(rank=4)": {"w": 1e-14 * norm}, "fp16": {"w": lost}}, {"w": norm})
    assert 0 < lost <= errors.budget("powersgd(rank=4)", [w]) < 1e-6 * norm
