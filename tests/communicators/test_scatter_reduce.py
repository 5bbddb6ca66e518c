"""ScatterReduce: means of compressed shards, on every rank the same, at a traffic that does not grow."""

import math

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.core.variable import equal_bounds
from tests.support.pools import ranks_of
from tests.support.training import joined

pytestmark = pytest.mark.ranks
METHODS = ["none", "fp16", "qsgd(levels=7, norm=l2)", "qsgd", "efsignsgd"]


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def exchange(kind: str, spec: str, shape: tuple[int, ...], steps: int = 1) -> tuple[list[np.ndarray], int]:
    communicator = joined(getattr(grace.torch, kind)(spec))
    values = [communicator.step(gradient(grace.rank(), step, shape), "w").numpy() for step in range(steps)]
    return values, communicator.by_hand.runner.traffic.sent_bytes


def from_formula(spec: str, shape: tuple[int, ...], size: int) -> np.ndarray:
    """Compress each rank's shard, average in float64, compress the mean: what step 0 must give."""
    compressor = grace.make("compressor", spec)
    inputs = [gradient(rank, 0, shape).numpy().reshape(-1) for rank in range(size)]
    out = np.empty(math.prod(shape), np.float32)

    def coded(x, rank, name):
        compressor.bind(grace.Context(rank=rank, size=size))
        return compressor.decompress(*compressor.compress(np.ascontiguousarray(x), name))

    for j, (a, b) in enumerate(equal_bounds(out.size, size)):
        decoded = [coded(inputs[rank][a:b], rank, f"w/shard_{j}") for rank in range(size)]
        mean = np.mean(decoded, axis=0, dtype=np.float64).astype(np.float32)
        out[a:b] = coded(mean, j, f"w/mean_{j}")
    return out.reshape(shape)


@pytest.mark.parametrize("shape", [(7, 11), (1001,), (1,), ()], ids=str)
@pytest.mark.parametrize("spec", METHODS)
def test_the_aggregate_is_that_of_the_formula(ranks, spec, shape):
    expected = from_formula(spec, shape, ranks.size)
    for (value,), _ in ranks.run(exchange, "ScatterReduce", spec, shape):
        if "qsgd" in spec:  # a last-bit difference of the mean may move a code by one level
            assert np.mean(~np.isclose(value, expected, rtol=1e-5, atol=1e-6)) < 0.01
        else:
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-6)


def voted(kind: str, scale: float) -> np.ndarray:
    communicator = joined(getattr(grace.torch, kind)("signsgd"))
    communicator.context.loss_scale = scale
    return communicator.step(gradient(grace.rank(), 0, (7, 13)).round(), "w").numpy()


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_votes_are_those_of_an_allgather_to_the_bit(ranks, scale):
    """The sign of a shard's vote is that vote, ties and loss scale included."""
    expected = ranks.run(voted, "Allgather", scale)[0]
    assert set(np.unique(expected)) == {-scale, scale}
    for votes in ranks.run(voted, "ScatterReduce", scale):
        np.testing.assert_array_equal(votes, expected)


def test_traffic_does_not_grow_with_the_number_of_ranks_but_allgathers_does():
    sent = {
        (kind, size): ranks_of(size).run(exchange, kind, "qsgd", (512, 64))[0][1]
        for kind in ("ScatterReduce", "Allgather")
        for size in (2, 4)
    }
    payload = 512 * 64 * 8.0625 / 8
    for size in (2, 4):  # twice (W-1)/W payloads, and a few bytes of status and padding
        assert sent["ScatterReduce", size] == pytest.approx(2 * (size - 1) / size * payload, rel=0.01)
    assert sent["Allgather", 4] == 3 * sent["Allgather", 2]


def both_errors(shape: tuple[int, ...], steps: int) -> tuple[np.ndarray, ...]:
    """What was applied, given, and left in the two memories, over several steps."""
    communicator = joined(grace.torch.ScatterReduce("efsignsgd", "residual"))
    applied, given = np.zeros(shape), np.zeros(shape)
    for step in range(steps):
        given += gradient(grace.rank(), step, shape).numpy()
        applied += communicator.step(gradient(grace.rank(), step, shape), "w").numpy()
    first = communicator.memory.state["w"].numpy()
    return applied, given, first, communicator.shard_memory.state["w"].numpy()


def test_error_feedback_covers_both_compressions(ranks):
    """Sum of means applied + mean of first residuals + second residuals = sum of mean gradients."""
    results = ranks.run(both_errors, (10, 13), 20)
    given = np.mean([r[1] for r in results], axis=0)
    first = np.mean([r[2] for r in results], axis=0)
    second = np.concatenate([r[3] for r in results]).reshape(10, 13)
    np.testing.assert_allclose(results[0][0] + first + second, given, rtol=1e-4, atol=1e-4)


def test_it_refuses_what_it_cannot_carry():
    with pytest.raises(grace.ConfigError, match="Legal communicators for topk: allgather, broadcast"):
        grace.torch.ScatterReduce("topk")
