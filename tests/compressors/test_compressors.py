"""The compressors: what travels, what comes back, and what each method promises."""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

import grace
from grace.communicators import Allgather, Allreduce, Broadcast
from grace.core.backend import LocalBackend
from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.exchange.bucket import Traffic
from grace.session.exchanger import Exchanger
from grace.session.sharding import uniform
from tests.support.data import EPSILON, HUGE, TINY, data, same, z_limit
from tests.support.pairwise import pairwise

SPECS = [
    "none", "fp16", "qsgd", "qsgd(levels=7)", "qsgd(levels=1, bucket_size=33)", "qsgd(norm=max, levels=64)",
    "topk", "topk(ratio=0.3)", "randomk", "randomk(ratio=0.3, unbiased=true)", "signsgd", "efsignsgd",
    "powersgd", "powersgd(rank=3)", "powersgd(warm_start=false)",
]  # fmt: skip
SHAPES = [(), (0,), (0, 3), (1,), (7,), (64,), (1000,), (5, 3), (33, 17), (8, 3, 3, 3), (2, 1, 1), (1, 513)]


def make(spec: str, **context) -> Compressor:
    compressor = grace.make("compressor", spec)
    compressor.bind(Context(**context))
    return compressor


def communicator_of(spec: str, memory=None):
    compressor = grace.make("compressor", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return grace.known("communicator")[compressor.traits.communicator](compressor, memory)


def decoded(compressor, x: np.ndarray) -> np.ndarray:
    return np.asarray(compressor.decompress(*compressor.compress(x, "w")))


# -- what travels ------------------------------------------------------------------------------------------


def sent(compressor, x) -> list:
    """Every tensor that travels for x: one payload, or one per round."""
    if compressor.traits.rounds == 1:
        return compressor.compress(x, "w")[0]
    rounds, tensors = compressor.exchange(x, "w"), []
    payload = next(rounds)
    while True:
        tensors += payload
        try:
            payload = rounds.send(payload)
        except StopIteration:
            return tensors


@pytest.mark.parametrize("spec", [*SPECS, "bf16"])
@given(shape=st.one_of(st.sampled_from(SHAPES), array_shapes(max_dims=4, max_side=40)))
def test_the_payload_has_the_bytes_that_wire_bits_says(spec, shape):
    compressor = make(spec)
    tensors = sent(compressor, torch.from_numpy(np.asarray(data("gaussian", shape))))
    nbytes, n = sum(tensor.nbytes for tensor in tensors), math.prod(shape)
    if n == 0:
        assert nbytes <= 4  # bits per element of nothing mean nothing; EF-SignSGD's mean is there all the same
    else:
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
    exchanger = Exchanger(variables, uniform(variables, communicator), LocalBackend(), Context())
    for _ in range(3):
        (group,) = exchanger.buckets
        exchanger.start(group, [data("gaussian", v.shape) for v in group.variables], [True, True])
        exchanger.finish(lambda group: [None, None])
    traffic: Traffic = exchanger.traffic
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


# -- unbiased ----------------------------------------------------------------------------------------------

UNBIASED = [
    "qsgd", "qsgd(levels=7)", "qsgd(levels=1)", "qsgd(norm=max)", "qsgd(levels=1, norm=max)",
    "qsgd(levels=3, bucket_size=100)", "randomk(ratio=0.1, unbiased=true)", "randomk(ratio=0.5, unbiased=true)",
]  # fmt: skip


@pytest.mark.parametrize("spec", UNBIASED)
@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
def test_unbiased_methods_pass_a_z_test(spec, kind):
    assert grace.make("compressor", spec).traits.unbiased
    x = torch.from_numpy(data(kind, 1000, 3))
    compressor, steps = make(spec), 2000
    rng = np.random.default_rng(0)
    # a bias shows along the gradient itself, along its signs, over all elements, or in a random direction
    directions = np.stack([x.numpy(), np.sign(x.numpy()), np.ones(1000), *rng.standard_normal((5, 1000))])
    errors = np.empty((steps, len(directions)))
    for step in range(steps):
        compressor.context.step = step
        errors[step] = directions @ np.float64(compressor.decompress(*compressor.compress(x, "w")) - x)
    spread = errors.std(axis=0, ddof=1)
    moving = spread > 1e-4 * np.abs(directions * x.numpy()).sum(axis=1)  # unlike the sum of a fixed selection
    z = errors.mean(axis=0)[moving] / (spread[moving] / math.sqrt(steps))
    assert moving.sum() >= 6
    assert np.abs(z).max() < z_limit(len(directions))


@pytest.mark.parametrize("spec", UNBIASED)
def test_the_z_test_has_the_power_to_see_a_bias_of_five_percent(spec):
    compressor, x = make(spec), torch.from_numpy(data("gaussian", 1000, 3))
    errors = []
    for step in range(400):
        compressor.context.step = step
        errors.append(float((compressor.decompress(*compressor.compress(x, "w")) - x) @ x))
    floor = np.std(errors) * z_limit(8) / math.sqrt(2000)
    assert floor < 0.05 * float(x @ x)


# -- contractions ------------------------------------------------------------------------------------------

KINDS = ["gaussian", "heavy", "tied", "mostly-zero"]


def energies(compressor, x) -> tuple[float, float]:
    """||x - C(x)||^2 and ||x||^2."""
    error = np.float64(x) - decoded(compressor, torch.from_numpy(x))
    return float((error**2).sum()), float((np.float64(x) ** 2).sum())


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 2000), ratio=st.floats(0.001, 1), seed=st.integers(0, 1000))
def test_topk_leaves_at_most_one_minus_k_over_n(kind, n, ratio, seed):
    error, total = energies(make(f"topk(ratio={ratio})"), data(kind, n, seed))
    k = max(1, round(ratio * n))
    assert error <= (1 - k / n) * total * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_randomk_leaves_one_minus_k_over_n_on_average(kind):
    x, compressor, steps = data(kind, 500, 1), make("randomk(ratio=0.1)"), 2000
    left = np.empty(steps)
    for step in range(steps):
        compressor.context.step = step
        error, total = energies(compressor, x)
        assert error <= total
        left[step] = error / total
    z = (left.mean() - 0.9) / (left.std(ddof=1) / math.sqrt(steps))
    assert abs(z) < z_limit()


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 2000), seed=st.integers(0, 1000))
def test_efsignsgd_leaves_what_its_formula_says(kind, n, seed):
    x = data(kind, n, seed)
    error, total = energies(make("efsignsgd"), x)
    # where x is 0 the sign is +1: the formula holds for any choice of sign there
    assert error == pytest.approx(total - np.abs(np.float64(x)).sum() ** 2 / n, rel=1e-5, abs=1e-5 * total)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (8, 3, 3, 3), (4, 4), (50,)])
def test_powersgd_contracts_and_warm_start_improves_it(rank, shape):
    x = data("gaussian", shape, 3)
    warm, errors = make(f"powersgd(rank={rank})"), []
    for step in range(20):
        warm.context.step = step
        error, total = energies(warm, x)
        assert error <= total * (1 + 1e-6)
        errors.append(error / total)
    singular = np.linalg.svd(np.float64(x).reshape(shape[0], -1), compute_uv=False) ** 2
    best = 1 - singular[:rank].sum() / singular.sum()
    assert errors[-1] <= errors[0] + 1e-6
    assert best - 1e-6 <= errors[-1] <= best + 0.05


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_recovers_a_matrix_of_its_rank(rank):
    x = data("gaussian", (40, rank), 1) @ data("gaussian", (rank, 25), 2)
    error, total = energies(make(f"powersgd(rank={rank})"), x)
    assert error <= 1e-9 * total


@pytest.mark.parametrize("spec", SPECS)
def test_traits_that_say_contraction_or_unbiased_are_declared_for_the_right_methods(spec):
    traits = grace.make("compressor", spec).traits
    contractions = ("none", "fp16", "topk", "randomk", "efsignsgd", "powersgd")
    assert traits.contraction == (spec.startswith(contractions) and "unbiased" not in spec)
    assert traits.unbiased == spec.startswith(("none", "qsgd", "randomk(ratio=0.3, unbiased"))


# -- edges of the methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_tensor", [np.array, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_keeps_values_at_the_scale_and_never_exceeds_it(make_tensor, levels):
    qsgd = make(f"qsgd(levels={levels}, norm=max, bucket_size=4)")
    x = np.float32([3, -3, 0, 1, HUGE, -HUGE, 1e-45, 0, 1e-45, -1e-45, 0, 0])
    for step in range(200):
        qsgd.context.step = step
        y = np.asarray(qsgd.decompress(*qsgd.compress(make_tensor(x.copy()), "w")))
        assert (y[[0, 1, 2, 4, 5, 8, 9, 10, 11]] == x[[0, 1, 2, 4, 5, 8, 9, 10, 11]]).all()
        assert abs(y[3]) <= 3


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(600,), (20, 30), (4, 3, 5, 5)])
def test_zero_decodes_to_zero(spec, shape):
    y = decoded(make(spec), np.zeros(shape, np.float32))
    assert np.isfinite(y).all()
    assert spec == "signsgd" or not y.any()


def test_powersgd_starts_alike_on_every_rank_and_keeps_q_only_if_warm():
    first, second = make("powersgd", rank=0, size=2), make("powersgd", rank=1, size=2)
    x = data("gaussian", (6, 4))
    same(next(first.exchange(x, "w"))[0], next(second.exchange(x, "w"))[0])
    assert (next(first.exchange(x, "w"))[0] != next(first.exchange(x, "v"))[0]).any()
    cold = make("powersgd(warm_start=false)")
    cold.compress(x, "w")
    assert len(cold.state) == 0


def test_randomk_draws_the_same_indices_on_every_rank_and_new_ones_every_step():
    ranks = [make("randomk(ratio=0.1)", rank=rank, size=2, step=step) for rank, step in ((0, 1), (1, 1), (0, 2))]
    a, b, c = (compressor.compress(data("gaussian", 300), "w")[1][1] for compressor in ranks)
    assert (a == b).all()
    assert set(a) != set(c)


@pytest.mark.parametrize("spec", ["qsgd(levels=1)", "randomk(ratio=0.1)"])
def test_step_draws_new_numbers_every_time(spec):
    communicator, x = communicator_of(spec, "none"), data("gaussian", 300)
    assert (communicator.step(x, "w") != communicator.step(x, "w")).any()


def test_stochastic_rounding_differs_by_rank_step_and_variable():
    x = data("gaussian", 600)
    base = decoded(make("qsgd(levels=1)", rank=0, step=1), x)
    same(base, decoded(make("qsgd(levels=1)", rank=0, step=1), x))
    for context in ({"rank": 1, "step": 1}, {"rank": 0, "step": 2}, {"rank": 0, "step": 1, "seed": 1}):
        assert (decoded(make("qsgd(levels=1)", **context), x) != base).any()


def test_cast_makes_inf_of_what_is_out_of_range():
    same(decoded(make("fp16"), np.float32([65504, 65520, -1e30])), np.float32([65504, np.inf, -np.inf]))
    bf16 = make("bf16")
    got = bf16.decompress(*bf16.compress(torch.tensor([65520.0, 1.0, HUGE]), "w"))
    assert got.tolist() == [65536.0, 1.0, math.inf]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("make_tensor", [np.array, torch.from_numpy], ids=["numpy", "torch"])
def test_compress_leaves_its_input_alone(spec, make_tensor):
    x = data("gaussian", (20, 30))
    tensor = make_tensor(x.copy())
    make(spec).compress(tensor, "w")
    same(np.asarray(tensor), x)


# -- through a communicator --------------------------------------------------------------------------------

LAYOUTS = {
    "0-d": lambda: torch.tensor(0.7),
    "empty": lambda: torch.zeros(0),
    "empty matrix": lambda: torch.zeros(3, 0),
    "one": lambda: torch.tensor([-0.3]),
    "odd": lambda: torch.linspace(-1, 1, 777),
    "matrix": lambda: torch.linspace(-1, 1, 63).view(9, 7),
    "transposed": lambda: torch.linspace(-1, 1, 63).view(9, 7).t(),
    "strided": lambda: torch.linspace(-1, 1, 77)[::2],
    "expanded": lambda: torch.tensor(0.5).expand(3, 5),
    "channels last": lambda: torch.linspace(-1, 1, 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.fixture
def local():
    grace.init("local")
    yield
    grace.shutdown()


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("spec", "dtype", "layout"),
    pairwise([*SPECS, "bf16"], [torch.float16, torch.bfloat16, torch.float32, torch.float64], LAYOUTS),
    ids=str,
)
def test_any_tensor_goes_through_step(spec, dtype, layout):
    x = LAYOUTS[layout]().to(dtype)
    kept = x.clone()
    communicator = communicator_of(spec)
    for _ in range(3):
        got = communicator.step(x, "w")
        assert got.shape == x.shape
        assert torch.isfinite(got).all()
        assert got.dtype == dtype
    assert torch.equal(x, kept)
    if spec == "none":
        assert torch.equal(got, x)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "memory"),
    pairwise(SPECS, [(), (0,), (3, 0), (1,), (9, 7)], ["float16", "float32", "float64"], [None, "residual"]),
    ids=str,
)
def test_any_numpy_array_goes_through_step(spec, shape, dtype, memory):
    x = np.asarray(data("gaussian", shape)).astype(dtype)
    communicator = communicator_of(spec, memory)
    for _ in range(3):
        got = communicator.step(x, "w")
        assert isinstance(got, np.ndarray)
        assert (got.shape, got.dtype) == (shape, dtype)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels last"])
def test_a_strided_tensor_is_exchanged_as_its_contiguous_copy(spec, layout):
    x = LAYOUTS[layout]()
    strided, dense = communicator_of(spec), communicator_of(spec)
    for _ in range(3):
        assert torch.equal(strided.step(x, "w"), dense.step(x.contiguous(), "w"))


@pytest.mark.parametrize("communicator", [Allgather, Broadcast, Allreduce])
@pytest.mark.parametrize("spec", SPECS)
def test_every_legal_communicator_gives_the_same_result(spec, communicator):
    compressor = grace.make("compressor", spec)
    if communicator.accepts(compressor) is not None:
        with pytest.raises(grace.ConfigError, match="Legal communicators"):
            communicator(compressor)
        return
    x = torch.from_numpy(data("gaussian", (20, 30)))
    assert torch.equal(communicator(compressor).step(x, "w"), communicator_of(spec).step(x, "w"))


# -- the contract ------------------------------------------------------------------------------------------


def test_a_users_compressor_in_plain_torch_works():
    class Half(Compressor):
        name = "half"
        traits = grace.Traits(category="quantization", contraction=True, memory="residual")

        def compress(self, tensor, name):
            return [tensor.half()], None

        def decompress(self, payload, ctx):
            return payload[0].float()

    x = torch.tensor([1.0, 0.1])
    assert torch.equal(Allgather(Half()).step(x, "w"), x.half().float())


def test_a_compressor_without_its_methods_says_which_are_missing():
    class Nothing(Compressor):
        name = "nothing"

    with pytest.raises(TypeError, match="Nothing must define compress"):
        Nothing().compress(np.zeros(1), "w")
    with pytest.raises(TypeError, match="Nothing must define decompress"):
        Nothing().decompress([], None)


def test_every_builtin_compressor_is_documented_with_its_source():
    for name, cls in grace.known("compressor").items():
        if not cls.__module__.startswith("grace.compressors."):
            continue
        assert ">>>" in inspect.getdoc(cls), name
        assert name in ("none", "cast") or "Source" in inspect.getdoc(cls), name
