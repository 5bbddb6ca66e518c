"""One test for each mistake of the original GRACE, named after it; it fails if the mistake comes back.

The mistakes that take several ranks to see are in exchange/test_traps_of_payloads.py. That any combination of the three
parts is accepted, legal or not, is communicators/test_refused_combinations.py.
"""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grace
from grace.communicators import Allgather, Allreduce
from grace.communicators.choice import build_communicator
from grace.core.backend import Handle, LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.kernels.random import Stream
from grace.kernels.torch.primitives import TorchKernels
from grace.memories.efsignsgd import EFSignSGDMemory
from grace.session.sharding import uniform
from tests.support.data import REFERENCE, data, same
from tests.support.implementations import ALL
from tests.support.training import Given

METHODS = [
    *("none", "fp16", "qsgd", "qsgd(levels=7)", "natural", "terngrad", "onebit", "signsgd", "signum", "efsignsgd"),
    *("topk(ratio=0.1)", "randomk(ratio=0.1)", "randomk(ratio=0.1, unbiased=true)", "threshold(value=0.5)"),
    *("dgc(ratio=0.1)", "adaptive(ratio=0.1)", "dynamic8", "sketch(quantiles=16)", "inceptionn", "powersgd"),
    *("topk(ratio=0.1) | qsgd(levels=7)", "dgc(ratio=0.1) | efsignsgd", "randomk(ratio=0.1) | fp16"),
]
frameworks = pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])


def make(spec: str, **context):
    compressor = grace.make("compressor", spec)
    compressor.bind(Context(**context))
    return compressor


def payload_of(spec: str, x) -> list:
    return make(spec).compress(x, "w")[0]


def decoded(spec: str, x) -> np.ndarray:
    compressor = make(spec)
    return np.asarray(compressor.decompress(*compressor.compress(x, "w")))


# -- payloads that are larger than they need be ----------------------------------------------------------------


@frameworks
@pytest.mark.parametrize(
    ("spec", "where", "nbytes"),
    [
        *((spec, 0, 126) for spec in ("signsgd", "signum", "efsignsgd", "onebit")),
        *((spec, 0, 251) for spec in ("terngrad", "qsgd(levels=1)")),
        ("topk(ratio=0.3)", 1, 126),
    ],
)
def test_signs_ternary_codes_and_masks_are_not_sent_as_whole_bytes(spec, where, nbytes, convert):
    assert payload_of(spec, convert(data("gaussian", 1001)))[where].nbytes == nbytes


@frameworks
@pytest.mark.parametrize("spec", ["topk", "threshold(value=2.5)", "dgc", "adaptive", "topk | efsignsgd"])
def test_indices_are_not_sent_as_int64(spec, convert):
    for n, widest in ((3000, 2), (70_000, 4)):
        tensors = payload_of(spec, convert(data("gaussian", n)))
        widths = [np.asarray(tensor).itemsize for tensor in tensors if np.asarray(tensor).dtype.kind == "i"]
        assert widths
        assert max(widths) == widest
        assert sum(tensor.nbytes for tensor in tensors) < 2 * n / 10  # far below 16 bits an element


# -- random numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", METHODS)
def test_no_compressor_touches_a_global_generator(spec):
    def states():
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    before = states()
    for x in (data("gaussian", (20, 30)), torch.from_numpy(data("gaussian", (20, 30)))):
        communicator = build_communicator(spec, None, None)
        for _ in range(2):
            communicator.step(x, "w")
    assert states() == before


@frameworks
def test_randomk_draws_without_replacement(convert):
    for n, ratio in ((7, 1.0), (300, 0.9), (5000, 0.5)):
        for step in range(3):
            randomk = make(f"randomk(ratio={ratio})", step=step)
            payload, ctx = randomk.compress(convert(np.ones(n, np.float32)), "w")
            indices = np.asarray(randomk.sent_indices(payload, ctx))
            assert len(set(indices.tolist())) == len(indices) == round(ratio * n)


@pytest.mark.parametrize("it", ALL)
@pytest.mark.parametrize("draw", ["sample_indices", "random_indices"])
def test_sampling_reaches_odd_indices_beyond_2_to_the_24(it, draw):
    indices = it.run(draw, Stream(1), 1 << 26, 4096, np.zeros(1, np.float32))
    late = indices[indices > 1 << 24]
    assert len(late) > 2800
    assert 0.45 < (late % 2).mean() < 0.55


# -- codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("it", ALL)
def test_qsgd_codes_never_wrap(it):
    n, stream = 1 << 20, Stream(3)
    assert np.float32(127) + REFERENCE.uniform(stream, n).max() == 128  # some random numbers round the sum up
    codes, scales = it.run("quantize", np.ones(n, np.float32), 127, 512, "max", stream)
    assert (codes == 254).all()
    assert (it.run("dequantize", np.zeros(n, np.float32), codes, scales, 127, 512, 1.0) == 1).all()


@pytest.mark.parametrize("it", ALL)
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_a_zero_bucket_is_not_nan(it, norm):
    x = data("gaussian", 96)
    x[32:64] = 0
    with np.errstate(all="raise"):  # 0/0 may become any code
        codes, scales = it.run("quantize", x, 127, 32, norm, Stream(3))
    assert scales[1] == 0
    assert (codes[32:64] == 127).all()
    same(it.run("dequantize", np.zeros_like(x), codes, scales, 127, 32, 1.0)[32:64], np.zeros(32, np.float32))


@frameworks
@pytest.mark.parametrize("rank", [1, 3])
def test_powersgd_of_a_zero_gradient_is_not_nan(convert, rank):
    communicator = Allreduce(f"powersgd(rank={rank})")
    x = data("gaussian", (30, 2 * rank), 1) @ data("gaussian", (2 * rank, 20), 2)
    for gradient in (np.zeros_like(x), np.zeros_like(x), x):
        got = np.asarray(communicator.step(convert(gradient), "w"))
        assert np.isfinite(got).all()
    fresh = Allreduce(f"powersgd(rank={rank})")
    fresh.context.step = 2
    same(got, np.asarray(fresh.step(convert(x), "w")))  # Q is drawn anew, not kept at zero


# -- thresholds ------------------------------------------------------------------------------------------------


@frameworks
@pytest.mark.parametrize("spec", ["threshold(value=0.5)", "topk(ratio=0.5)", "dgc(ratio=0.5)"])
def test_thresholds_are_on_magnitudes_not_on_the_largest_value(spec, convert):
    assert decoded(spec, convert(np.float32([-3, -2, 0.1, 0.5]))).tolist() == [-3, -2, 0, 0]


@frameworks
def test_dgc_sends_only_the_non_zeros_of_a_mostly_zero_gradient(convert):
    x = np.zeros(100_000, np.float32)
    for places, value in (([], 0), ([5, 77_777], 1e-30), (range(0, 100_000, 1000), -4)):
        x[list(places)] = value
        values, indices = payload_of("dgc(ratio=0.01)", convert(x))
        assert len(values) == len(indices) == np.count_nonzero(x)
        same(decoded("dgc(ratio=0.01)", convert(x)), x)


# -- signs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1e-4, 0.1, 10])
def test_efsignsgd_is_not_off_by_the_learning_rate_on_its_first_step(lr):
    memory = EFSignSGDMemory()
    memory.bind(Context(lr=lambda name: lr))
    same(memory.compensate(np.float32([1, -3]), "w"), np.float32([1, -3]))


@frameworks
@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("signsgd", [1, -1, 1, 1, 1, 1]),  # the majority; zeros and ties are positive
        ("signum", [1, -1, 1, 1, 1, 1]),
        ("efsignsgd", [1.5, -1.5, 1.5, 1.5, 0.5, -0.5]),  # the mean of 2 sign(x) and 1 sign(y)
    ],
)
def test_sign_methods_mean_the_same_in_every_framework(spec, wanted, convert):
    x, y = np.float32([3, -3, 0, -0.0, 3, -3]), np.float32([1.5, -1.5, 0, -0.0, -1.5, 1.5])
    (first, ctx), (second, _) = (make(spec).compress(convert(rank), "w") for rank in (x, y))
    assert make(spec).aggregate([first, second], ctx, convert(np.zeros(6, np.float32)), 2).tolist() == wanted


# -- PowerSGD --------------------------------------------------------------------------------------------------


@frameworks
def test_powersgd_does_not_redraw_q_at_each_step(convert):
    powersgd = make("powersgd(rank=2)")
    (_, q), _ = powersgd.compress(convert(data("gaussian", (9, 6))), "w")
    powersgd.state.commit()
    powersgd.context.step += 1
    (p,) = next(powersgd.exchange(convert(np.eye(6, dtype=np.float32)), "w"))  # P = I Q
    same(np.asarray(p), np.asarray(q))


@frameworks
def test_powersgd_compresses_convolution_kernels(convert):
    """As (output channels) x (the rest): 1x1 kernels too, and a kernel of rank 1 in that sense comes back whole."""
    powersgd = Allreduce("powersgd")
    (shard,) = uniform([Variable("w", (64, 32, 1, 1))], powersgd)
    assert shard.communicator is powersgd
    for shape in ((64, 32, 1, 1), (8, 3, 3, 3)):
        x = np.outer(data("gaussian", shape[0]), data("gaussian", shape[1:], 1)).reshape(shape)
        (p, q), _ = make("powersgd").compress(convert(x), "w")
        assert (p.shape, q.shape) == ((shape[0], 1), (x[0].size, 1))
        np.testing.assert_allclose(decoded("powersgd", convert(x)), x, atol=1e-5)


# -- dtypes and bad numbers ------------------------------------------------------------------------------------


def trained(spec: str, shapes: dict, dtype=torch.float32, **choices):
    """A model and its optimizer, ready to step."""
    model = Given(shapes, dtype)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, grace.DistributedOptimizer(plain, model.named_parameters(), spec, **choices)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", METHODS)
def test_sixteen_bit_gradients_do_not_come_back_as_float32(spec, dtype):
    model, optimizer = trained(spec, {"w": (20, 30), "b": (3,)}, dtype)
    for step in range(2):
        optimizer.zero_grad()
        model.backward({"w": data("gaussian", (20, 30), step), "b": [1, 2, 3]})
        optimizer.step()
        assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()} == {dtype}


@frameworks
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", ["natural", "onebit", "signsgd", "signum", "efsignsgd"])
def test_natural_and_sign_codes_do_not_hide_a_nan(spec, bad, convert):
    x = data("gaussian", 600)
    x[599] = bad
    with np.errstate(all="ignore"):
        assert not np.isfinite(np.asarray(Allgather(spec).step(convert(x), "w"))).any()


# -- collectives -----------------------------------------------------------------------------------------------


class Recorder(LocalBackend):
    """One process, noting when collectives start and when somebody waits for one."""

    def __init__(self):
        self.events: list[str] = []

    def recorded(self, result) -> Handle:
        self.events.append("start")
        return Handle(lambda: self.events.append("wait"), result)

    def allreduce(self, tensor):
        return self.recorded(tensor)

    def allgather(self, tensor):
        return self.recorded([tensor])

    def alltoall(self, tensor):
        return self.recorded([tensor])


LAYERS = {f"layer{i}": (20, 30) for i in range(10)}


def gradients(step: int) -> dict[str, np.ndarray]:
    return {name: data("gaussian", shape, 10 * step + i) for i, (name, shape) in enumerate(LAYERS.items())}


@pytest.mark.parametrize(
    ("spec", "communicator", "collectives"),
    [
        ("none", "allreduce", 1),
        ("topk(ratio=0.1)", "allgather", 1),
        ("qsgd", "allgather", 1),
        ("natural", "scatter_reduce", 2),  # shards there, means back
        ("powersgd", "allreduce", 2),  # P, then Q
        ("threshold(value=0.5)", "allgather", 2),  # sizes, then payloads
    ],
)
def test_parameters_do_not_take_collectives_of_their_own(spec, communicator, collectives):
    backend = Recorder()
    model, optimizer = trained(spec, LAYERS, communicator=communicator, backend=backend)
    for step in range(2):
        backend.events.clear()
        optimizer.zero_grad()
        model.backward(gradients(step))
        optimizer.step()
        assert backend.events.count("start") == collectives


class Synchronizations(TorchDispatchMode):
    """Counts the operations that make a host wait for its device: reading a number, or a size that depends on data."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


waits = pytest.mark.xfail(strict=True, reason="the torch kernels read a size or a number back from the device")


@pytest.mark.parametrize(
    "spec",
    [
        *("none", "fp16", "qsgd", "natural", "terngrad", "onebit", "signsgd", "signum", "efsignsgd", "dynamic8"),
        *("sketch(quantiles=16)", "powersgd"),
        pytest.param("topk(ratio=0.1)", marks=waits),
        pytest.param("randomk(ratio=0.1)", marks=waits),
    ],
)  # payloads whose size depends on the data cannot be made without waiting
def test_backward_hooks_do_not_wait_for_a_device_or_a_collective(spec, monkeypatch):
    monkeypatch.setattr("grace.kernels.torch.fused._USE_FUSED", False)

    def finite(self, x, most=math.inf):
        return ((x.abs() <= most) if most < math.inf else torch.isfinite(x)).all().float()

    monkeypatch.setattr(TorchKernels, "all_finite", finite)  # as on CUDA
    backend = Recorder()
    model, optimizer = trained(spec, LAYERS, group_bytes=1, backend=backend)
    with Synchronizations() as seen:
        model.backward(gradients(0))
    assert backend.events == ["start"] * len(LAYERS)
    optimizer.step()
    assert seen.count == 0


# -- what is accepted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["qsgd", "natural", "terngrad", "randomk(unbiased=true)"])
@pytest.mark.parametrize("memory", ["residual", "efsignsgd"])
def test_error_feedback_under_an_unbiased_quantizer_is_not_accepted_without_a_word(spec, memory):
    with pytest.warns(UserWarning, match=r"is not a contraction.*can diverge.*Use memory='none'"):
        Allgather(spec, memory)


def test_unknown_keys_are_not_ignored():
    with pytest.raises(grace.ConfigError, match="does not know 'compression_ratio'; it knows compressor"):
        grace.from_params({"compressor": "topk", "compression_ratio": 0.3})
    for spec in ("topk(ration=0.3)", {"name": "topk", "ration": 0.3}):
        with pytest.raises(grace.ConfigError, match=r"no parameter 'ration'; it has: ratio=0\.01"):
            grace.make("compressor", spec)
