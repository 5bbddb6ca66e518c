"""Means on every rank, over several steps and through the default memories, against the formulas in NumPy.

All methods but PowerSGD, which test_oracles.py holds. Nothing of Grace's is run here but the random numbers of the
reference kernels; a tensor that a method would not shrink is expected as the plain mean.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import grace
from grace.kernels import NumpyKernels
from grace.kernels.random import Stream, stream_key
from tests.support.pairwise import pairwise
from tests.support.training import Given, distributed, made_up, plain_sgd

REFERENCE = NumpyKernels()
SEED, STEPS = 7, 4
LEARNING_RATES = (0.1, 0.1, 0.02, 0.5)
SHAPES = {
    **{"vector": (1001,), "odd": (13, 7), "small": (37,), "few": (2,), "one": (1,)},
    **{"scalar": (), "empty": (0, 3), "zeros": (31,)},
}


class At(NamedTuple):
    """Place of a random stream: one variable or shard, on one rank, at one step."""

    name: str
    rank: int
    step: int

    def stream(self, who: Any = None, draw: int = 0) -> Stream:
        return Stream(stream_key(SEED, self.name, str(self.rank if who is None else who)), self.step, draw)


# -- what each method sends ------------------------------------------------------------------------------------


def natural(x, at):
    """The power of two below |x|, or with probability |x| / low - 1 the one above; exponents -94 to 32."""
    u = (REFERENCE.random_bits(at.stream(), x.size) >> np.uint32(9)) / 2.0**23
    mantissa, exponent = np.frexp(np.abs(x).astype(np.float64))  # |x| = mantissa 2^exponent, mantissa in [1/2, 1)
    power = np.clip(exponent - 1 + (2 * mantissa - 1 + u >= 1), -94, 32)
    return np.where(x == 0, 0, np.sign(x) * 2.0**power)


def terngrad(x, at):
    """Clip to 2.5 standard deviations; the largest magnitude with probability |x| / s."""
    limit = np.float32(2.5 * x.astype(np.float64).std()) if x.size > 1 else np.float32(np.inf)
    clipped = np.clip(x, -limit, limit)
    scale = np.abs(clipped).max(initial=0)
    sent = np.floor(np.abs(clipped) / (scale or 1) + REFERENCE.uniform(at.stream(), x.size)) >= 1
    return np.where(sent, np.sign(x) * scale, 0)


def onebit(x, at):
    """The means of the two sides."""
    upper = x >= 0
    means = [side.mean(dtype=np.float64) if side.size else 0 for side in (x[~upper], x[upper])]
    return np.where(upper, means[1], means[0])


def sign(x, at):
    return np.where(x >= 0, 1, -1)


def efsignsgd(x, at):
    return sign(x, at) * np.abs(x).mean(dtype=np.float64).astype(np.float32)


def dynamic8(x, at):
    """The nearest of 0, 1 and 10^-z times the middles of 2^(6 - z) equal parts of [0.1, 1], with both signs."""
    middles = [(0.1 + 0.9 * (i + 0.5) / 2 ** (6 - z)) / 10**z for z in range(7) for i in range(2 ** (6 - z))]
    table = np.sort(np.float32([0, 1, *middles, *np.negative(middles)]))
    scale = np.abs(x).max(initial=0)
    distance = np.abs((x / (scale or np.float32(1))).astype(np.float64)[:, None] - table)
    return scale * table[distance.argmin(axis=1)]


def block(x, at):
    """The nearest of 255 multiples of a block's largest magnitude."""
    scale = np.concatenate([np.full(part.size, np.abs(part).max()) for part in parts_of(x, 512)] or [x])
    code = np.floor(np.abs(x) / np.where(scale > 0, scale, np.float32(1)) * np.float32(127) + np.float32(0.5))
    return np.sign(x) * scale * code / np.float32(127)


def parts_of(x, size):
    return [x[low : low + size] for low in range(0, x.size, size)]


def sketch(x, at, quantiles=16):
    """The mean of the equal-count bucket that an element's rank falls into; equal elements rank by index."""
    buckets = min(quantiles, x.size)
    bucket = np.empty(x.size, int)
    bucket[np.argsort(x, kind="stable")] = np.arange(x.size) * buckets // x.size
    return np.array([x[bucket == b].mean(dtype=np.float64) for b in range(buckets)], np.float32)[bucket]


def qsgd(levels, order):
    """Levels of a norm of each 512 values, rounded at random."""

    def sent(x, at):
        uniform, out = REFERENCE.uniform(at.stream(), x.size), []
        for part, u in zip(parts_of(x, 512), parts_of(uniform, 512), strict=True):
            scale = np.linalg.norm(part.astype(np.float64), order).astype(np.float32)
            code = np.floor(np.abs(part) / (scale or 1) * np.float32(levels) + u)
            out.append(np.sign(part) * scale * np.minimum(code, levels) / np.float32(levels))
        return np.concatenate(out or [x])

    return sent


def whole(x, at):
    return x


def half(x, at):
    return x.astype(np.float16)


def brain_half(x, at):
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def inceptionn(x, at):
    """Return 0 for values up to 0.001, multiples of 2^-9 in 8 bits or of 2^-15 in 16 bits where those reach, else the
    exact value."""
    size, code8, code16 = np.abs(x), np.rint(x * 2.0**9), np.rint(x * 2.0**15)
    fits8, fits16 = (size <= 1) & (np.abs(code8) <= 127), (size <= 1) & (np.abs(code16) <= 32767)
    return np.select([size <= 0.001, fits8, fits16], [0 * x, code8 / 2.0**9, code16 / 2.0**15], x)


def largest(x, count):
    """Positions of the largest magnitudes, of equal ones the first, in ascending order."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:count])


def kept(ratio, n):
    return max(1, round(ratio * n)) if n else 0


def topk(ratio):
    return lambda x, at: largest(x, kept(ratio, x.size))


def randomk(ratio):
    return lambda x, at: np.sort(REFERENCE.random_indices(at.stream("shared"), x.size, kept(ratio, x.size)))


def above_half(x, at):
    return np.flatnonzero(np.abs(x) > 0.5)


def dgc(x, at, ratio=0.1):
    """Above the ratio-th largest magnitude of a sample, corrected until the count is within 30 % of ratio n."""
    most = max(1, math.floor(1.3 * ratio * x.size))
    least = min(most, math.ceil(0.7 * ratio * x.size))
    sample = np.abs(x)
    if x.size > 256:
        sample = sample[REFERENCE.sample_indices(at.stream(draw=1), x.size, 256)]
    descending, rank = np.sort(sample)[::-1], max(1, round(ratio * sample.size))
    while True:
        threshold = descending[rank] if rank < sample.size else 0
        sent = np.flatnonzero(np.abs(x) > threshold)
        if len(sent) >= least or threshold == 0:
            return sent if len(sent) <= most else sent[largest(x[sent], min(most, kept(ratio, x.size)))]
        rank *= 2


def entries(pick, values=lambda x, at: x, variance=lambda count: 0):
    """A sparsifier: the picked entries, as ``values`` sends them. Unbiased values are divided by 1 + their variance
    where there is error feedback, which would diverge on them (Basu et al., arXiv 1906.02367)."""

    def sent(x, at):
        out, where = np.zeros_like(x), pick(x, at)
        out[where] = values(x[where], at).astype(np.float32) / np.float32(1 + variance(len(where)))
        return out

    return sent


def adaptive(x, at):
    """The mean of a tenth of the positive entries, the largest, and likewise of the negative ones."""
    out = np.zeros_like(x)
    for members in (np.flatnonzero(x > 0), np.flatnonzero(x < 0)):
        sent = members[largest(x[members], kept(0.1, len(members)))]
        out[sent] = x[sent].mean(dtype=np.float64) if sent.size else 0
    return out


# -- what each memory adds, and keeps --------------------------------------------------------------------------


class NoMemory:
    def before(self, g):
        return g

    def after(self, x, sent):
        pass


class Residual(NoMemory):
    left = np.float32(0)

    def before(self, g):
        return self.left + g

    def after(self, x, sent):
        self.left = x - sent


class OfUpdates(Residual):
    """EF-SignSGD's, of what the weights were not given: a residual is worth less when the learning rate has grown."""

    steps = 0

    def before(self, g):
        lr, now = LEARNING_RATES[max(0, self.steps - 1)], LEARNING_RATES[self.steps]
        self.steps += 1
        return np.float32(lr / now) * self.left + g


class DGCMemory(NoMemory):
    velocity = accumulated = np.float32(0)

    def before(self, g):
        self.velocity = np.float32(0.9) * self.velocity + g
        return self.accumulated + self.velocity

    def after(self, x, sent):
        self.accumulated = x - sent
        self.velocity = np.where(sent != 0, np.float32(0), self.velocity)


class Momentum(NoMemory):
    """Signum's, which is the compressor's own."""

    moment = np.float32(0)

    def before(self, g):
        self.moment = np.float32(0.9) * self.moment + np.float32(0.1) * g
        return self.moment


# -- the methods -----------------------------------------------------------------------------------------------


def whole_bytes(bits):
    return 8 * math.ceil(bits / 8)


def positions(n, count):
    """Bits of the positions below 2^16 where all ranks send equally many: 16 each, or a bitmap."""
    return min(16 * count, whole_bytes(n))


class Method(NamedTuple):
    send: Callable[[np.ndarray, At], np.ndarray]
    bits: Callable[[int], float]
    """Bits of a payload of n elements; 0 where it depends on the data, because only empty tensors then ride dense."""
    memory: type[NoMemory] = NoMemory
    votes: bool = False
    others: tuple[str, ...] = ()
    """Communicators that carry it besides allgather and broadcast."""
    rounding: float = 2.0**-10
    """Relative rounding error of the sums that an engine makes of payloads."""


def unknown(n):
    return 0


SHARDED = ("scatter_reduce",)
SUMMED = ("allreduce",)


def bits_of_entries(ratio):
    return lambda n: positions(n, kept(ratio, n)) + 32 * kept(ratio, n)


METHODS = {
    "none": Method(whole, lambda n: 32 * n, others=SUMMED + SHARDED),
    "fp16": Method(half, lambda n: 16 * n, others=SUMMED + SHARDED),
    "bf16": Method(brain_half, lambda n: 16 * n, others=SUMMED, rounding=2.0**-6),
    "qsgd": Method(qsgd(127, np.inf), lambda n: 8 * n + 32 * math.ceil(n / 512), others=SHARDED),
    "qsgd(levels=7, norm=l2)": Method(
        qsgd(7, 2), lambda n: whole_bytes(4 * n) + 32 * math.ceil(n / 512), others=SHARDED
    ),
    "topk(ratio=0.1)": Method(entries(topk(0.1)), bits_of_entries(0.1), Residual),
    "randomk(ratio=0.1)": Method(entries(randomk(0.1)), lambda n: 32 * kept(0.1, n), Residual, others=SUMMED),
    "signsgd": Method(sign, whole_bytes, votes=True, others=SHARDED),
    "efsignsgd": Method(efsignsgd, lambda n: whole_bytes(n) + 32, OfUpdates, others=SHARDED),
    "natural": Method(natural, lambda n: 8 * n, others=SHARDED),
    "terngrad": Method(terngrad, lambda n: whole_bytes(2 * n) + 32, others=SHARDED),
    "onebit": Method(onebit, lambda n: whole_bytes(n) + 64, Residual, others=SHARDED),
    "signum": Method(sign, whole_bytes, Momentum, votes=True),
    "dynamic8": Method(dynamic8, lambda n: 8 * n + 32, others=SHARDED),
    "block": Method(block, lambda n: 8 * n + 32 * math.ceil(n / 512), Residual, others=SHARDED),
    "sketch(quantiles=16)": Method(
        sketch, lambda n: whole_bytes(n * max(1, (min(16, n) - 1).bit_length())) + 32 * min(16, n), Residual
    ),
    "threshold(value=0.5)": Method(entries(above_half), unknown, Residual),
    "dgc(ratio=0.1)": Method(entries(dgc), unknown, DGCMemory),
    "adaptive(ratio=0.1)": Method(adaptive, unknown, Residual),
    "inceptionn(error_bound=0.001)": Method(inceptionn, unknown),
    "topk(ratio=0.05) | qsgd(levels=7, norm=l2)": Method(
        entries(topk(0.05), qsgd(7, 2), lambda count: min(count / 7**2, math.sqrt(count) / 7)),
        lambda n: positions(n, kept(0.05, n)) + whole_bytes(4 * kept(0.05, n)) + 32,
        Residual,
    ),
    "topk(ratio=0.2) | efsignsgd": Method(
        entries(topk(0.2), efsignsgd), lambda n: positions(n, kept(0.2, n)) + whole_bytes(kept(0.2, n)) + 32, Residual
    ),
    "topk(ratio=0.2) | inceptionn(error_bound=0.001)": Method(entries(topk(0.2), inceptionn), unknown, Residual),
    "randomk(ratio=0.2) | fp16": Method(
        entries(randomk(0.2), half), lambda n: 16 * kept(0.2, n), Residual, others=SUMMED
    ),
    "threshold(value=0.5) | natural": Method(entries(above_half, natural, lambda count: 1 / 8), unknown, Residual),
    "dgc(ratio=0.1) | dynamic8": Method(entries(dgc, dynamic8), unknown, DGCMemory),
}
CASES = pairwise(
    *([2, 3], METHODS, ["allgather", "broadcast", "scatter_reduce", "allreduce"]),
    [torch.float32, torch.float16, torch.bfloat16],
    allowed=lambda size, method, name, dtype: name in ("allgather", "broadcast", *METHODS[method].others),
)


class Expected:
    """The aggregates of one variable, step by step, from the gradients of all ranks."""

    def __init__(self, method: Method, communicator: str, name: str, size: int):
        self.method, self.name, self.size = method, name, size
        self.scatters = communicator == "scatter_reduce"
        self.memories = [method.memory() for _ in range(size)]
        self.shard_memories = [method.memory() for _ in range(size)]

    def aggregate(self, gradients: list[np.ndarray], step: int) -> np.ndarray:
        sent = []
        for rank, (g, memory) in enumerate(zip(gradients, self.memories, strict=True)):
            x = memory.before(g)
            if self.scatters:  # shards differ by at most one element, the larger ones first
                shards = enumerate(np.array_split(x, self.size))
                shards = [self.send(shard, At(f"{self.name}/shard_{j}", rank, step)) for j, shard in shards]
            else:
                shards = [self.send(x, At(self.name, rank, step))]
            sent.append(np.concatenate(shards))
            memory.after(x, sent[-1])
        if self.method.votes:
            return np.where(sum(sent) >= 0, 1, -1).astype(np.float32)
        mean = sum(np.float32(1 / self.size) * s for s in sent)
        return np.concatenate(self.compressed_again(mean, step)) if self.scatters else mean

    def compressed_again(self, mean: np.ndarray, step: int) -> list[np.ndarray]:
        means = []
        for j, shard in enumerate(np.array_split(mean, self.size)):
            x = self.shard_memories[j].before(shard)
            means.append(self.send(x, At(f"{self.name}/mean_{j}", j, step)))
            self.shard_memories[j].after(x, means[-1])
        return means

    def send(self, x: np.ndarray, at: At) -> np.ndarray:
        return self.method.send(x, at).astype(np.float32)


# -- the comparison --------------------------------------------------------------------------------------------


def gradients_of(step: int, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cubes of normal numbers, so that magnitudes differ by decades; one variable is always zero."""
    cubes = {name: torch.as_tensor(g**3).to(dtype) for name, g in made_up(SHAPES, step, rank).items()}
    return {**cubes, "zeros": torch.zeros(SHAPES["zeros"], dtype=dtype)}


def exchanged(compressor: str, communicator: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """The aggregates of a few steps."""
    model = Given(SHAPES, dtype)
    optimizer = distributed(model, compressor, optimizer=plain_sgd, communicator=communicator, seed=SEED)
    aggregates = []
    for step, lr in enumerate(LEARNING_RATES):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model.backward(gradients_of(step, grace.rank(), dtype))
        optimizer.step()
        aggregates.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return aggregates


@pytest.mark.parametrize(("ranks", "compressor", "communicator", "dtype"), CASES, indirect=["ranks"], ids=str)
def test_every_rank_is_given_what_the_formula_says(ranks, compressor, communicator, dtype):
    method, epsilon = METHODS[compressor], torch.finfo(dtype).eps
    expected = {name: Expected(method, communicator, name, ranks.size) for name in SHAPES}
    answers = ranks.run(exchanged, compressor, communicator, dtype)
    for step in range(STEPS):
        everyone = [gradients_of(step, rank, dtype) for rank in range(ranks.size)]
        for name, shape in SHAPES.items():
            given = [gradients[name].float().reshape(-1).numpy() for gradients in everyone]
            n, largest_given = math.prod(shape), max(np.abs(g).max(initial=0) for g in given)
            if n == 0 or method.bits(n) / n >= 8 * dtype.itemsize:  # rides dense, summed in its own dtype
                wanted, rtol, atol = np.mean(given, axis=0), 2 * epsilon, 2 * epsilon * largest_given
            else:
                wanted, rtol, atol = expected[name].aggregate(given, step), epsilon, 1e-6
            if communicator == "allreduce":  # the engine sums the payload's 16 bits
                rtol, atol = rtol + method.rounding, atol + method.rounding * largest_given * (step + 1)
            for answer in answers:
                assert answer[step][name].dtype == dtype
                np.testing.assert_allclose(
                    answer[step][name].float().reshape(-1).numpy(), wanted, max(rtol, 1e-5), atol,
                    err_msg=f"{name}, step {step}",
                )  # fmt: skip
