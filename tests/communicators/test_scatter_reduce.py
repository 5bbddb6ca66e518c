"""ScatterReduce's votes, and what it refuses; tests/exchange/test_aggregates.py holds its means."""

import numpy as np
import pytest
import torch

import grace
import grace.torch
from tests.support.pools import on_ranks
from tests.support.training import joined


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


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


class Half(grace.Memory):
    """A user's, which has no name and a parameter, and keeps two things."""

    def __init__(self, decay):
        self.decay = decay
        self.steps = {}

    def compensate(self, tensor, name):
        self.steps[name] = self.steps.get(name, 0) + 1
        return tensor + self.decay * self.state.get(name, 0)

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = tensor - compressor.decompress(payload, ctx)


@on_ranks(2, 3)
def test_means_are_compressed_with_a_users_memory_of_their_own():
    ours, theirs = (
        joined(grace.torch.ScatterReduce("block(bits=4)", memory)) for memory in (Half(0.5), "residual(beta=0.5)")
    )
    x = [gradient(grace.rank(), step, (7, 13)) for step in range(3)]
    assert all(torch.equal(ours.step(each, "w"), theirs.step(each, "w")) for each in x)


@pytest.mark.parametrize("kind", ["ScatterReduce", "ReduceBroadcast"])
def test_the_memory_of_means_begins_without_what_was_left_of_gradients(kind):
    memory = Half(0.5)
    memory.state["w"], memory.steps["w"] = torch.ones(3), 5
    parts = getattr(grace.torch, kind)("efsignsgd", memory).components
    (of_means,) = (part for name, part in parts.items() if name in ("shard_memory", "answer_memory"))
    assert (dict(of_means.state), dict(of_means.steps), of_means.decay) == ({}, {}, 0.5)
    assert memory.steps["w"] == 5


def test_it_refuses_what_it_cannot_carry():
    with pytest.raises(grace.ConfigError, match="Legal communicators for topk: allgather, broadcast"):
        grace.torch.ScatterReduce("topk")
