"""ScatterReduce's votes, and what it refuses; tests/exchange/test_aggregates.py holds its means."""

import numpy as np
import pytest
import torch

import grace
import grace.torch
from tests.support.training import joined

pytestmark = pytest.mark.ranks


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


def test_it_refuses_what_it_cannot_carry():
    with pytest.raises(grace.ConfigError, match="Legal communicators for topk: allgather, broadcast"):
        grace.torch.ScatterReduce("topk")
