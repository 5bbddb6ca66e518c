"""One test for each mistake of the original GRACE, named after it; it fails if the mistake comes back.

Other tests hold that these do not come back:

- signs, ternary codes, masks and positions that travel as whole bytes and int64: test_contract.py (its table of bytes)
- thresholds on the largest value instead of magnitudes, votes and means of signs, sums where means are meant, and
  learning rates that EF-SignSGD ignores: exchange/test_aggregates.py, memories/test_memories.py
- a Q of PowerSGD that ranks draw apart, or that is drawn anew at each step, and P and Q that are not averaged:
  exchange/test_oracles.py
- positions that are drawn twice: kernels/test_random.py
- zeros that DGC sends: test_sparsifiers.py
- float32 that comes back for 16-bit gradients, and codes that hide a NaN: exchange/test_catalogue.py
- hosts that wait for a device: test_host_waits.py
- combinations that are accepted, legal or not, and error feedback under unbiased quantizers:
  communicators/test_refused_combinations.py
- keys and parameters that are ignored: communicators/test_compat.py, core/test_specs.py
- padding that is decoded, and collectives that are paired by the order of backward: exchange/test_traps_of_payloads.py
"""

import random

import numpy as np
import pytest
import torch

from grace.communicators import Allreduce
from grace.communicators.choice import build_communicator
from grace.core.backend import Handle, LocalBackend
from grace.core.variable import Variable
from grace.kernels.random import Stream
from grace.session.sharding import uniform
from tests.support.data import REFERENCE, data, same
from tests.support.grouping import in_groups
from tests.support.implementations import ALL
from tests.support.methods import SPECS, make
from tests.support.training import Given, distributed

frameworks = pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])


# -- random numbers --------------------------------------------------------------------------------------------


@in_groups(("spec",), [(spec,) for spec in SPECS if spec != "bf16"])  # which NumPy does not have
def test_no_compressor_touches_a_global_generator(spec):
    def states():
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    before = states()
    for x in (data("gaussian", (20, 30)), torch.from_numpy(data("gaussian", (20, 30)))):
        communicator = build_communicator(spec, None, None)
        for _ in range(2):
            communicator.step(x, "w")
    assert states() == before


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
def test_powersgd_compresses_convolution_kernels(convert):
    """Kernels are matrices of (output channels) x (the rest), 1x1 kernels too; one of rank 1 comes back whole."""
    powersgd = Allreduce("powersgd")
    (shard,) = uniform([Variable("w", (64, 32, 1, 1))], powersgd)
    assert shard.communicator is powersgd
    for shape in ((64, 32, 1, 1), (8, 3, 3, 3)):
        x = np.outer(data("gaussian", shape[0]), data("gaussian", shape[1:], 1)).reshape(shape)
        method = make("powersgd")
        payload, ctx = method.compress(convert(x), "w")
        assert [part.shape for part in payload] == [(shape[0], 1), (x[0].size, 1)]
        np.testing.assert_allclose(np.asarray(method.decompress(payload, ctx)), x, atol=1e-5)


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


def trained(spec: str, shapes: dict, **choices):
    """A model and its optimizer, ready to step."""
    model = Given(shapes)
    return model, distributed(model, spec, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **choices)


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


@pytest.mark.parametrize("spec", ["none", "topk(ratio=0.1)", "qsgd", "powersgd", "threshold(value=0.5)"])
def test_backward_hooks_start_collectives_and_do_not_wait_for_them(spec):
    backend = Recorder()
    model, _ = trained(spec, LAYERS, group_bytes=1, backend=backend)
    model.backward(gradients(0))
    assert backend.events == ["start"] * len(LAYERS)
