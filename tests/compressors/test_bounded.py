"""Payloads of one size for devices, of methods whose payloads vary elsewhere: what they hold, and that what fills their
room is nowhere decoded. Arrays and CPU tensors stand for a device's."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch

import grace
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import PayloadError
from grace.kernels import Kernels
from grace.session.by_hand import WholeTensorPlan
from grace.session.step_runner import StepRunner
from tests.support.data import REFERENCE
from tests.support.far import as_far
from tests.support.grouping import in_groups
from tests.support.methods import make

RNG = np.random.default_rng(3)
TENSORS = {
    "usual": RNG.standard_normal(5000).astype(np.float32),
    "matrix": RNG.standard_normal((40, 50)).astype(np.float32),
    "mostly zeros": np.where(np.arange(4000) % 500, 0, RNG.standard_normal(4000)).astype(np.float32),
    "zeros": np.zeros(300, np.float32),
    "ties": np.where(np.arange(70_000) % 3, 1, -2).astype(np.float32),
    "one": np.float32([-3]),
    "empty": np.zeros((0, 3), np.float32),
    "narrow": RNG.standard_normal(65_535).astype(np.float32),
    "not narrow": RNG.standard_normal(65_536).astype(np.float32),
}
SPECS = ["threshold(value=1.5, capacity=0.5)", "dgc(ratio=0.05)", "adaptive(ratio=0.05)"]
FAR = mock.patch.object(Kernels, "on_device", return_value=True)


def plain(spec, x):
    """Return the decoded tensor where payloads have the sizes that they need."""
    near = "topk(ratio=0.05)" if spec.startswith("dgc") else spec  # which is estimated there
    return make(near).decompress(*make(near).compress(x, "w"))


@in_groups(("spec", "kind"), itertools.product(SPECS, TENSORS), lambda spec, kind: spec)
def test_both_forms_decode_to_the_same(spec, kind):
    x, compressor = TENSORS[kind], make(spec)
    with FAR:
        payload, ctx = compressor.compress(x, "w")
        other, _ = compressor.compress(np.zeros_like(x), "w")
    assert [part.shape for part in payload] == [part.shape for part in other]
    decoded = compressor.decompress(payload, ctx)
    np.testing.assert_allclose(decoded, plain(spec, x), rtol=1e-6)
    count = int(payload[-1].sum())
    assert count == np.count_nonzero(decoded) == len(compressor.sent_indices(payload, ctx))
    with as_far(plain=True), np.errstate(all="ignore"):
        t = torch.from_numpy(x)
        twin, shape = compressor.compress(t, "w")
        for part, same in zip(twin, payload, strict=True):
            np.testing.assert_allclose(part.numpy(), same, rtol=0 if part.numel() != 2 else 1e-6)  # means, once
        np.testing.assert_allclose(compressor.decompress(twin, shape).numpy(), decoded, rtol=1e-6)
        sent = compressor.sent_indices(twin, shape)
        assert (grace.kernels.kernels_of(t).zero_at(t.clone().view(-1), sent).numpy()[decoded.ravel() != 0] == 0).all()
        left = grace.kernels.kernels_of(t).zero_at(torch.ones(x.size), sent)
    assert int(left.sum()) == x.size - count


@pytest.mark.parametrize("spec", ["threshold(value=0.5, capacity=0.1)"])
def test_what_there_is_no_room_for_waits_in_the_residual(spec):
    x = TENSORS["usual"]
    compressor, memory = make(spec), grace.make("memory", "residual")
    with FAR:
        payload, ctx = compressor.compress(x, "w")
    memory.update(x.copy(), "w", compressor, payload, ctx)
    decoded = compressor.decompress(payload, ctx)
    assert np.count_nonzero(decoded) == 500 < np.count_nonzero(np.abs(x) > 0.5)
    assert np.abs(decoded[decoded != 0]).min() >= np.abs(x[decoded == 0]).max()
    np.testing.assert_array_equal(decoded + memory.state["w"], x)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [-1, 1 << 30])
def test_a_count_that_cannot_be_is_refused(spec, count):
    compressor = make(spec)
    with FAR:
        payload, ctx = compressor.compress(TENSORS["usual"], "w")
    payload[-1][0] = count
    with pytest.raises(PayloadError, match="number of elements"):
        compressor.decompress(payload, ctx)


@pytest.mark.parametrize("spec", ["dgc(ratio=0.1) | efsignsgd", "threshold | qsgd"])
def test_values_that_are_compressed_again_are_those_that_are_sent(spec):
    near, _ = make(spec).compress(TENSORS["usual"], "w")
    with FAR:
        payload, _ = make(spec).compress(TENSORS["usual"], "w")
    for part, same in zip(payload, near, strict=True):
        np.testing.assert_array_equal(part, same)


def place(spec, device):
    """Return the place of gradients that a rank tells the others before the first step."""
    variables = [Variable("w", (100,), device=device)]
    runner = StepRunner(variables, WholeTensorPlan(spec, None, None).shards(variables), LocalBackend(), Context())
    return dict(runner.facts()).get("the place of gradients")


def test_ranks_agree_on_where_gradients_are_as_sizes_follow_from_it():
    for spec in SPECS:
        assert [place(spec, device) for device in ("cpu", "cuda:1")] == ["the CPU", "a device"]
    assert place("topk", "cuda:0") is place("dgc | qsgd", "cuda:0") is None  # the same anywhere


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_largest_above_is_the_formula(ratio):
    for x in (TENSORS["usual"], TENSORS["ties"], TENSORS["mostly zeros"], np.float32([np.nan, 2, -3, np.inf, 0])):
        room = x.size // 4
        values, indices, (count,) = REFERENCE.largest_above(x, 0.7, room, ratio)
        above = np.flatnonzero(np.abs(x) > np.float32(0.7))
        most = len(above) if ratio == 1 else max(1, round(ratio * len(above)))
        order = sorted(above, key=lambda i: (-abs(x[i]), i))[: min(most, room)]
        if not np.isnan(x).any():
            assert indices[:count].tolist() == sorted(order)
        assert (x[indices[:count]] == values[:count]).all()
        assert (indices[count:] == x.size).all()
        assert not values[count:].any()


def test_a_threshold_of_minus_zero_has_the_bits_of_zero():
    _, options = make("threshold(value=-0.0)").bucket_codec()
    assert np.float32(options["least"]()).view(np.int32) == 0
