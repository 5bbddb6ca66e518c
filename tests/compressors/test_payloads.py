"""What travels, and what comes back of it on this rank and on others."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.bucket import Traffic
from grace.session.sharding import uniform
from grace.session.step_runner import StepRunner
from tests.support.data import EPSILON, TINY, data, same
from tests.support.methods import SHAPES, SPECS, communicator_of, decoded, make, sent
from tests.support.pairwise import pairwise


@pytest.mark.parametrize("spec", [*SPECS, "bf16"])
@given(shape=st.one_of(st.sampled_from(SHAPES), array_shapes(max_dims=4, max_side=40)))
def test_the_payload_has_the_bytes_that_wire_bits_says(spec, shape):
    compressor = make(spec)
    tensors = sent(compressor, torch.from_numpy(np.asarray(data("gaussian", shape))))
    nbytes, n = sum(tensor.nbytes for tensor in tensors), max(1, math.prod(shape))  # EF-SignSGD's mean is there anyway
    assert 8 * nbytes == pytest.approx(compressor.wire_bits(shape) * n, rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "n", "nbytes"),
    [
        ("none", 1001, 4004),
        ("fp16", 1001, 2002),
        ("signsgd", 1001, 126),
        ("efsignsgd", 1001, 126 + 4),
        ("qsgd", 1001, 1001 + 2 * 4),
        ("qsgd(levels=7)", 1001, 501 + 2 * 4),
        ("qsgd(levels=1)", 1001, 251 + 2 * 4),
        ("topk(ratio=0.01)", 1000, 10 * (4 + 2)),
        ("randomk(ratio=0.01)", 1000, 10 * 4),
    ],
)
def test_a_vector_takes_these_bytes(spec, n, nbytes):
    assert sum(tensor.nbytes for tensor in sent(make(spec), data("gaussian", n))) == nbytes


def test_powersgd_takes_rank_rows_and_columns():
    assert sum(tensor.nbytes for tensor in sent(make("powersgd(rank=2)"), data("gaussian", (30, 5, 4)))) == 4 * 2 * 50


@pytest.mark.parametrize("spec", SPECS)
def test_traffic_counts_the_bytes_of_wire_bits_and_a_small_header(spec):
    communicator = communicator_of(spec)
    variables = [Variable("a", (40, 30)), Variable("b", (30, 20, 2))]
    runner = StepRunner(variables, uniform(variables, communicator), LocalBackend(), Context())
    for _ in range(3):
        (group,) = runner.buckets
        runner.start(group, [data("gaussian", v.shape) for v in group.variables], [True, True])
        runner.finish_step(lambda group: [None, None])
    traffic: Traffic = runner.traffic
    for variable in variables:
        bits = communicator.compressor.wire_bits(variable.shape) * variable.numel
        assert traffic.payload_bytes[variable.name] == pytest.approx(3 * bits / 8)
    assert traffic.header_bytes <= 3 * 2 * 16 * communicator.compressor.traits.rounds


# -- both frameworks, other ranks --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "kind"), pairwise(SPECS, SHAPES, ["gaussian", "heavy", "tied", "zeros", "mixed"]), ids=str
)
def test_torch_and_numpy_send_the_same_payload(spec, shape, kind):
    x = np.asarray(data(kind, shape, 5))
    if kind == "mixed" and spec.startswith("powersgd"):
        pytest.skip("a product of matrices of such numbers overflows")
    ours, theirs = make(spec, step=3, rank=1, size=2), make(spec, step=3, rank=1, size=2)
    (a, _), (b, _) = ours.compress(x, "w"), theirs.compress(torch.from_numpy(x.copy()), "w")
    assert len(a) == len(b)
    for mine, other in zip(a, b, strict=True):
        other = other.numpy()
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        if spec.startswith("powersgd"):
            continue  # an orthonormal basis is unique up to signs and rounding; its product is compared below
        if mine.dtype == np.float32 and spec.startswith(("qsgd", "efsignsgd")):
            np.testing.assert_allclose(mine, other, rtol=2 * EPSILON, atol=TINY)
        else:
            same(mine, other)
    np.testing.assert_allclose(
        decoded(ours, x), theirs.decompress(*theirs.compress(torch.from_numpy(x.copy()), "w")).numpy(), rtol=1e-4,
        atol=1e-5 * float(np.abs(x).max(initial=0)),
    )  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_payload_from_another_rank_decodes_with_the_local_ctx(spec):
    here, there = make(spec, rank=0, size=2, step=4), make(spec, rank=1, size=2, step=4)
    x, y = data("gaussian", (40, 30), 1), data("heavy", (40, 30), 2)
    _, ctx = here.compress(x, "w")
    payload, own_ctx = there.compress(y, "w")
    same(here.decompress(payload, ctx), there.decompress(payload, own_ctx))


@pytest.mark.parametrize("spec", SPECS)
def test_accumulate_equals_adding_the_decoded_payload(spec):
    x, out = data("gaussian", (20, 30), 1), data("gaussian", (20, 30), 2)
    compressor = make(spec)
    payload, ctx = compressor.compress(x, "w")
    wanted = out - 0.25 * decoded_payload(compressor, payload, ctx)
    np.testing.assert_allclose(compressor.accumulate(payload, ctx, out.copy(), -0.25), wanted, rtol=1e-5, atol=1e-6)


def decoded_payload(compressor, payload, ctx) -> np.ndarray:
    return np.float64(compressor.decompress(payload, ctx))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith(("signsgd", "powersgd"))])
def test_the_aggregate_of_several_payloads_is_their_mean(spec):
    ranks = [make(spec, rank=rank, size=3) for rank in range(3)]
    xs = [data("gaussian", (20, 30), rank) for rank in range(3)]
    encoded = [c.compress(x, "w") for c, x in zip(ranks, xs, strict=True)]
    mean = np.mean([decoded_payload(ranks[0], payload, encoded[0][1]) for payload, _ in encoded], axis=0)
    out = np.full((20, 30), np.nan, np.float32)
    got = ranks[0].aggregate([payload for payload, _ in encoded], encoded[0][1], out, 3)
    np.testing.assert_allclose(got, mean, rtol=1e-5, atol=1e-6)


def test_no_compression_accumulates_sixteen_bits_in_float32():
    none = make("none", size=3)
    ranks = [np.float16([1, 2048]), np.float16([2**-12, 1]), np.float16([2**-12, 1])]
    out = none.aggregate([[x] for x in ranks], None, np.zeros(2, np.float16), 3)
    same(out, (np.sum(np.float32(ranks), axis=0) / np.float32(3)).astype(np.float16))


def test_signsgd_aggregates_by_majority_and_a_tie_is_plus():
    sign = make("signsgd", size=4)
    xs = np.float32([[1, -1, 1, -1], [1, -1, -1, -1], [1, -1, -1, -0.0], [1, 1, 1, 0.5]])
    payloads = [sign.compress(x, "w")[0] for x in xs]
    assert sign.aggregate(payloads, (4,), np.full(4, 9, np.float32), 4).tolist() == [1, -1, 1, 1]
    assert sign.aggregate(payloads[:3], (4,), np.full(4, 9, np.float32), 3).tolist() == [1, -1, -1, -1]


def test_a_sign_is_one_whatever_the_loss_scale():
    sign = make("signsgd", loss_scale=1024.0)
    payload, ctx = sign.compress(np.float32([5, -5]), "w")
    out = sign.aggregate([payload], ctx, np.zeros(2, np.float32), 1)
    assert (out / 1024).tolist() == [1, -1]
