"""PowerSGD against its formula in NumPy, and PowerSGD and fp16 against torch's own hooks."""

import math

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from grace.compressors.powersgd import PowerSGD
from grace.kernels import NumpyKernels
from grace.kernels.random import Stream, stream_key
from tests.support.pools import on_ranks
from tests.support.training import Given, batch, ddp, distributed, made_up, means, net, plain_sgd

SHAPES = {"vector": (1001,), "matrix": (30, 41), "kernel": (8, 3, 3, 3), "small": (2, 2)}
STEPS = 4
SEED = 7


def exchanged(compressor, communicator):
    """The aggregates of four steps."""
    model = Given(SHAPES)
    optimizer = distributed(model, compressor, optimizer=plain_sgd, communicator=communicator, seed=SEED)
    return [{name: mean.numpy() for name, mean in step.items()} for step in means(model, optimizer, range(STEPS))]


class LowRank:
    """PowerSGD of rank 2 as its paper writes it, of the gradients of all ranks at once."""

    def __init__(self, size, name, shape):
        columns = math.prod(shape[1:])
        stream = Stream(stream_key(SEED, name, "shared"))
        self.q = 2 * NumpyKernels().uniform(stream, 2 * columns).reshape(columns, 2) - 1
        self.residual = [0.0] * size

    def aggregate(self, gradients):
        inputs = [(g + r).reshape(len(g), -1) for g, r in zip(gradients, self.residual, strict=True)]
        p = np.linalg.qr(np.mean([x @ self.q for x in inputs], axis=0))[0]
        self.q = np.mean([x.T @ p for x in inputs], axis=0)
        mean = (p @ self.q.T).reshape(gradients[0].shape)
        self.residual = [x.reshape(mean.shape) - mean for x in inputs]
        return mean


def test_powersgd_is_what_its_formula_says(ranks):
    answers = ranks.run(exchanged, "powersgd(rank=2)", "allreduce")
    methods = {name: LowRank(ranks.size, name, SHAPES[name]) for name in ("matrix", "kernel")}
    for step in range(STEPS):
        everyone = [made_up(SHAPES, step, rank) for rank in range(ranks.size)]
        for name in SHAPES:
            given = [gradients[name] for gradients in everyone]
            wanted = methods[name].aggregate(given) if name in methods else np.mean(given, axis=0)
            for answer in answers:
                np.testing.assert_allclose(answer[step][name], wanted, rtol=1e-4, atol=1e-4, err_msg=f"{name}, {step}")


# -- torch's own hooks -------------------------------------------------------------------------------------------


def convnet():
    """No 0-d parameter, which torch's PowerSGD hook cannot view as a matrix."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(6 * 6 * 6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10),
    )  # fmt: skip


def backward(model, step):
    images, labels = batch(step)
    torch.nn.functional.cross_entropy(model(images), labels).backward()


def distances(ours, theirs):
    """Relative distance per gradient."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return [float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs]


@pytest.mark.parametrize("rank", [1, 2, 4])
@on_ranks(2, 3)
def test_powersgd_follows_torchs_powersgd_hook_to_1e_5(rank):
    """Relative distances of the aggregates of five steps. Both see the same weights, so that what adds up over the
    steps is the method's own: residuals and Q. (Float32 rounding is amplified about 1.5 times per step: torch
    orthogonalizes Q before it is used, Grace need not.)"""
    ours, theirs = net(make=convnet), ddp(net(make=convnet), bucket_cap_mb=1000)
    compressor = PowerSGD(rank=rank)
    optimizer = distributed(ours, compressor)
    start = {}
    for name, p in ours.named_parameters():
        if p.dim() > 1:
            columns = p[0].numel()
            start[p.shape] = torch.randn(
                columns, min(rank, len(p), columns), generator=torch.Generator().manual_seed(1)
            )
            compressor.state[name] = start[p.shape].clone()
    compressor.state.commit()

    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1)

    def hook(state, bucket):
        if state.iter == 2 and not state.q_memory_dict:
            shapes = [p.shape for p in bucket.parameters() if p.dim() > 1]
            state.q_memory_dict[0] = torch.cat([start[shape].flatten() for shape in shapes])
            state.p_memory_dict[0] = torch.empty(sum(s[0] * start[s].shape[1] for s in shapes))
        return powerSGD_hook.powerSGD_hook(state, bucket)

    theirs.register_comm_hook(state, hook)
    for step in range(2):  # torch's hook does not compress before its third step
        backward(theirs, step)
    for step in range(5):
        optimizer.zero_grad()
        theirs.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        optimizer.synchronize()
        assert max(distances(ours, theirs)) < 1e-5
        assert torch.linalg.matrix_rank(ours[3].weight.grad, rtol=1e-4) == rank
        optimizer.step()
        theirs.module.load_state_dict(ours.state_dict())


@on_ranks(2, 3)
def test_fp16_follows_torchs_fp16_hook_to_float16_rounding():
    """Distances of the gradients per step, in float16 roundings of their largest element, and of the weights."""
    ours, theirs = net(make=convnet), ddp(net(make=convnet))
    theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer, reference = distributed(ours, "fp16"), torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    roundings = []
    for step in range(10):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        optimizer.step()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            roundings.append(float((a.grad - b.grad).abs().max() / (b.grad.abs().max() * 2.0**-11)))
    with torch.no_grad():
        apart = max(
            float((a - b).norm() / b.norm()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
        )
    assert max(roundings) < 8
    assert apart < 1e-3
