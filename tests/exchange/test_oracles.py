"""What each method's aggregate must be, worked out from all ranks' gradients in NumPy, and torch's own hooks."""

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import grace
from grace.compressors.powersgd import PowerSGD
from grace.compressors.topk import kept_count
from grace.kernels import NumpyKernels
from grace.kernels.random import Stream, stream_key
from tests.support.training import ONE_STAGE, Given, batch, ddp, distributed, made_up, net

pytestmark = pytest.mark.ranks

SHAPES = {"vector": (1001,), "matrix": (30, 41), "kernel": (8, 3, 3, 3), "small": (2, 2)}
LEARNING_RATES = (0.1, 0.1, 0.02, 0.5)
STEPS = len(LEARNING_RATES)
SEED = 7


def exchanged(compressor, communicator):
    """The aggregates of four steps."""
    model = Given(SHAPES)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), compressor,
        communicator=communicator, seed=SEED,
    )  # fmt: skip
    means = []
    for step, lr in enumerate(LEARNING_RATES):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model.backward(made_up(SHAPES, step, grace.rank()))
        optimizer.step()
        means.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
    return means


class Oracle:
    """A method as its paper writes it: ``aggregate`` takes the gradients of all ranks at once."""

    rtol, atol = 1e-5, 1e-6

    def __init__(self, size, name):
        self.size, self.name, self.step = size, name, 0
        self.residual = [0.0] * size
        self.lr = LEARNING_RATES[0]

    def next(self, gradients):
        mean = self.aggregate([g.astype(np.float32) for g in gradients])
        self.step += 1
        return mean

    def with_residuals(self, gradients, factor=1.0):
        return [g + np.float32(factor) * r for g, r in zip(gradients, self.residual, strict=True)]

    def keep(self, inputs, sent):
        self.residual = [x - s for x, s in zip(inputs, sent, strict=True)]
        return np.mean(sent, axis=0)


class Mean(Oracle):
    def aggregate(self, gradients):
        return np.mean(gradients, axis=0)


class Half(Mean):
    rtol, atol = 2.0**-9, 2.0**-9  # rounding each term and each sum to 11 bits; cancellation is absolute


class BrainHalf(Mean):
    rtol, atol = 2.0**-6, 2.0**-6


class TopK(Oracle):
    def aggregate(self, gradients):
        inputs, sent = self.with_residuals(gradients), []
        for x in inputs:
            order = np.argsort(-np.abs(x.ravel()), kind="stable")[: kept_count(0.1, x.size)]
            out = np.zeros(x.size, np.float32)
            out[order] = x.ravel()[order]
            sent.append(out.reshape(x.shape))
        return self.keep(inputs, sent)


class RandomK(Oracle):
    def aggregate(self, gradients):
        inputs = self.with_residuals(gradients)
        n = gradients[0].size
        stream = Stream(stream_key(SEED, self.name, "shared"), self.step)
        indices = NumpyKernels().random_indices(stream, n, kept_count(0.1, n))
        mask = np.zeros(n, bool)
        mask[indices] = True
        return self.keep(inputs, [x * mask.reshape(x.shape) for x in inputs])


class SignSGD(Oracle):
    def aggregate(self, gradients):
        votes = sum(np.where(g >= 0, 1, -1) for g in gradients)
        return np.where(votes >= 0, 1.0, -1.0)


class EFSignSGD(Oracle):
    def aggregate(self, gradients):
        lr = LEARNING_RATES[self.step]
        inputs = self.with_residuals(gradients, self.lr / lr)
        self.lr = lr
        return self.keep(inputs, [np.abs(x).mean() * np.where(x >= 0, 1, -1).astype(np.float32) for x in inputs])


class QSGD(Oracle):
    levels = 127

    def scale(self, x):
        return np.abs(x).max()

    def aggregate(self, gradients):
        return np.mean([self.rounded(g, rank) for rank, g in enumerate(gradients)], axis=0)

    def rounded(self, gradient, rank):
        flat = gradient.ravel()
        uniform = NumpyKernels().uniform(Stream(stream_key(SEED, self.name, str(rank)), self.step), flat.size)
        out = np.zeros_like(flat)
        for start in range(0, flat.size, 512):
            x, u = flat[start : start + 512], uniform[start : start + 512]
            scale = self.scale(x)
            out[start : start + 512] = (
                np.sign(x) * scale * np.floor(self.levels * (np.abs(x) / scale) + u) / self.levels
            )
        return out.reshape(gradient.shape)


class QSGD7(QSGD):
    levels = 7

    def scale(self, x):
        return np.linalg.norm(x.astype(np.float64)).astype(np.float32)


class LowRank(Oracle):
    rtol, atol = 1e-4, 1e-4

    def aggregate(self, gradients):
        inputs = [x.reshape(len(x), -1) for x in self.with_residuals(gradients)]
        if self.step == 0:
            columns = inputs[0].shape[1]
            stream = Stream(stream_key(SEED, self.name, "shared"))
            self.q = 2 * NumpyKernels().uniform(stream, 2 * columns).reshape(columns, 2) - 1
        p = np.linalg.qr(np.mean([x @ self.q for x in inputs], axis=0))[0]
        self.q = np.mean([x.T @ p for x in inputs], axis=0)
        mean = (p @ self.q.T).reshape(gradients[0].shape)
        self.residual = [x.reshape(mean.shape) - mean for x in inputs]
        return mean


ORACLES = {
    "none": Mean,
    "fp16": Half,
    "bf16": BrainHalf,
    "qsgd": QSGD,
    "qsgd(levels=7, norm=l2)": QSGD7,
    "topk(ratio=0.1)": TopK,
    "randomk(ratio=0.1)": RandomK,
    "signsgd": SignSGD,
    "efsignsgd": EFSignSGD,
    "powersgd(rank=2)": LowRank,
}


def oracle_of(compressor, size, name):
    compresses = grace.make("compressor", compressor).wire_bits(SHAPES[name]) < 32
    return (ORACLES[compressor] if compresses else Mean)(size, name)


@pytest.mark.parametrize(("compressor", "communicator"), ONE_STAGE, ids=[f"{m}-{c}" for m, c in ONE_STAGE])
def test_the_aggregate_is_what_the_formula_says(ranks, compressor, communicator):
    answers = ranks.run(exchanged, compressor, communicator)
    oracles = {name: oracle_of(compressor, ranks.size, name) for name in SHAPES}
    for step in range(STEPS):
        everyone = [made_up(SHAPES, step, rank) for rank in range(ranks.size)]
        for name, oracle in oracles.items():
            expected = oracle.next([gradients[name] for gradients in everyone])
            for answer in answers:
                np.testing.assert_allclose(
                    answer[step][name], expected, rtol=oracle.rtol, atol=oracle.atol, err_msg=f"{name}, step {step}"
                )


@pytest.mark.parametrize(("levels", "norm"), [(127, "l2"), (7, "l2"), (1, "l2"), (127, "max"), (1, "max")])
def test_qsgd_is_within_one_level_of_the_mean(ranks, levels, norm):
    answers = ranks.run(exchanged, f"qsgd(levels={levels}, norm={norm})", "allgather")
    for step in range(STEPS):
        everyone = [made_up(SHAPES, step, rank)["vector"] for rank in range(ranks.size)]
        level = np.zeros(1001)
        for start in (0, 512):
            order = 2 if norm == "l2" else np.inf
            norms = [np.linalg.norm(g[start : start + 512], order) for g in everyone]
            level[start : start + 512] = np.mean(norms) / levels
        error = np.abs(answers[0][step]["vector"] - np.mean(everyone, axis=0))
        assert (error <= level * 1.0001).all()
        assert error.max() > 0.3 * level.min()  # it is quantized indeed


def test_a_tied_vote_is_plus_one_on_every_rank(two_ranks):
    assert two_ranks.run(opposite_signs) == [[1.0, 1.0, -1.0]] * 2


def opposite_signs():
    model = Given({"w": (3,)})
    optimizer = distributed(model, "signsgd")
    model.backward({"w": [1 - 2 * grace.rank(), 0, -1]})
    optimizer.synchronize()
    return model.w.grad.tolist()


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


def against_torchs_powersgd(rank, steps):
    """Relative distances of the aggregates, per step. Both see the same weights, so that what adds up over the
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
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        theirs.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        optimizer.synchronize()
        found.append(max(distances(ours, theirs)))
        assert torch.linalg.matrix_rank(ours[3].weight.grad, rtol=1e-4) == rank
        optimizer.step()
        theirs.module.load_state_dict(ours.state_dict())
    return found


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_follows_torchs_powersgd_hook_to_1e_5(ranks, rank):
    for found in ranks.run(against_torchs_powersgd, rank, 5):
        assert max(found) < 1e-5


def against_torchs_fp16(steps):
    """Distances of the gradients per step, in float16 roundings of their largest element, and of the weights."""
    ours, theirs = net(make=convnet), ddp(net(make=convnet))
    theirs.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer, reference = distributed(ours, "fp16"), torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    roundings = []
    for step in range(steps):
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
    return max(roundings), apart


def test_fp16_follows_torchs_fp16_hook_to_float16_rounding(ranks):
    for roundings, apart in ranks.run(against_torchs_fp16, 10):
        assert roundings < 8
        assert apart < 1e-3
