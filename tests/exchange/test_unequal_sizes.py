"""Payloads whose sizes differ by rank travel in one size exchange and one padded gather per group."""

import contextlib

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.torch import Compressor, Traits
from tests.support.far import as_far

pytestmark = pytest.mark.ranks


class Positive(Compressor):
    """Sends the positive entries: as many as there are."""

    name = "positive"
    traits = Traits(category="sparsification", fixed_size=False)

    def compress(self, tensor, name):
        (indices,) = torch.nonzero(tensor.reshape(-1) > 0, as_tuple=True)
        return [tensor.reshape(-1)[indices], indices.to(torch.int32)], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        values, indices = payload
        out = torch.zeros(ctx).reshape(-1)
        out[indices] = values
        return out.reshape(ctx)


def gradient(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Rank 0 has no positive entry at all; the others have different numbers of them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)) + (-100 if rank == 0 else rank)


def gathers() -> tuple[np.ndarray, list[int]]:
    """A mean, and the bytes that were gathered for it."""
    communicator = grace.torch.Allgather(Positive())
    communicator.step(gradient(grace.rank(), (40, 3)), "w")  # nothing is remembered of it
    backend = communicator.backend
    calls, gather = [], backend.allgather
    backend.allgather = lambda tensor: calls.append(tensor.nbytes) or gather(tensor)
    value = communicator.step(gradient(grace.rank(), (40, 3)), "w").numpy()
    del backend.allgather
    return value, calls


def test_a_group_takes_one_size_exchange_and_one_gather(ranks):
    expected = np.mean([gradient(r, (40, 3)).clamp(min=0).numpy() for r in range(ranks.size)], axis=0)
    for value, calls in ranks.run(gathers):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
        assert len(calls) == 2
        assert calls[0] == 8 * 2  # one 64-bit size per payload tensor


class Narrow(Positive):
    """Sends positions in as few bytes as the largest needs, so that their dtype differs by rank."""

    name = "narrow"

    def compress(self, tensor, name):
        (values, indices), ctx = super().compress(tensor, name)
        narrow = not len(indices) or indices.max() < 2**15
        return [values, indices.to(torch.int16 if narrow else torch.int32)], ctx

    def decompress(self, payload, ctx):
        return super().decompress([payload[0], payload[1].int()], ctx)


def narrowed(kind: str) -> list[list[int]]:
    """Return the positions in a mean of numbers that only wide, and only narrow, integers reach, and in the next."""
    communicator = getattr(grace.torch, kind)(Narrow(), "none")
    means = []
    for position in (5 + 60000 * grace.rank(), 7 + 60000 * (1 - grace.rank())):
        tensor = torch.zeros(70000)
        tensor[position] = 1
        mean = communicator.step(tensor, "w")
        means.append(mean.nonzero().flatten().tolist())
        assert mean.sum() == 1
    return means


@pytest.mark.parametrize("kind", ["Allgather", "Broadcast", "ReduceBroadcast"])
def test_the_dtype_of_a_payload_may_depend_on_the_data_too(two_ranks, kind):
    for means in two_ranks.run(narrowed, kind):
        assert means == [[5, 60005], [7, 60007]]


class Growing(Compressor):
    """Whole numbers; in one more than there are elements, if it is told so."""

    name = "growing"
    traits = Traits(category="quantization", summable=True)
    more = 0

    def compress(self, tensor, name):
        return [torch.cat([tensor.round().view(-1), torch.zeros(self.more)])], tensor.shape

    def decompress(self, payload, ctx):
        return payload[0].view(ctx)


class GrowingApart(Growing):
    name = "growing_apart"
    traits = Traits(category="quantization")


def refused(kind: str, compressor: type, far: bool) -> tuple[str, bytes, bytes]:
    """Return the error of a step in which rank 1's payload grows, and the next mean, with that step and without it."""
    means, said = [], ""
    with as_far(plain=True) if far else contextlib.nullcontext():
        for grows in (True, False):
            communicator = getattr(grace.torch, kind)(compressor(), "residual")
            communicator.step(gradient(grace.rank(), (5, 3)), "w")
            if grows:
                communicator.compressor.more = int(grace.rank() == 1)
                try:
                    communicator.step(gradient(2 + grace.rank(), (5, 3)), "w")
                except grace.ExchangeError as error:
                    said = str(error)
                communicator.compressor.more = 0
            means.append(communicator.step(gradient(4 + grace.rank(), (5, 3)), "w").numpy().tobytes())
    return said, *means


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize(
    ("kind", "compressor"),
    [
        ("Allreduce", Growing),
        ("ReduceBroadcast", Growing),
        ("Allgather", GrowingApart),
        ("Broadcast", GrowingApart),
        ("ReduceBroadcast", GrowingApart),
    ],
)
def test_a_payload_that_grows_is_refused_on_all_ranks_and_training_may_go_on(two_ranks, kind, compressor, far):
    answers = two_ranks.run(refused, kind, compressor, far)
    assert "growing" in answers[1][0]
    assert "the payload of 'w' has the shapes [(16,)] at step 1, and had [(15,)] at the first" in answers[1][0]
    assert "'w' at step 1" in answers[0][0]
    assert "its own error says more" in answers[0][0]
    for _, mean, other in answers:
        assert mean == other


class Recast(Compressor):
    """Half precision, in another dtype of the same size if it is told so."""

    name = "recast"
    traits = Traits(category="quantization", summable=True)
    more = 0

    def compress(self, tensor, name):
        return [tensor.view(-1).to(torch.bfloat16 if self.more else torch.float16)], tensor.shape

    def decompress(self, payload, ctx):
        return payload[0].float().view(ctx)


class RecastApart(Recast):
    name = "recast_apart"
    traits = Traits(category="quantization")


@pytest.mark.parametrize(("kind", "compressor"), [("Allreduce", Recast), ("Allgather", RecastApart)])
def test_a_payload_of_another_dtype_is_refused_on_all_ranks_though_its_shape_is_the_same(two_ranks, kind, compressor):
    answers = two_ranks.run(refused, kind, compressor, False)
    assert "the payload of 'w' has the dtypes ['bfloat16'] at step 1, and had ['float16'] at the first" in answers[1][0]
    assert "its own error says more" in answers[0][0]
    for _, mean, other in answers:
        assert mean == other


def refused_mean() -> tuple[str, bytes, bytes]:
    """Return this rank's error in a step whose mean has a payload of another dtype, and the next mean with and without
    that step."""
    means, said = [], ""
    for changes in (True, False):
        communicator = grace.torch.ReduceBroadcast(RecastApart(), "residual", destination=1)
        communicator.step(gradient(grace.rank(), (5, 3)), "w")
        if changes:
            communicator.answers.more = 1
            try:
                communicator.step(gradient(2 + grace.rank(), (5, 3)), "w")
            except grace.ExchangeError as error:
                said = str(error)
            communicator.answers.more = 0
        means.append(communicator.step(gradient(4 + grace.rank(), (5, 3)), "w").numpy().tobytes())
    return said, *means


def test_a_mean_whose_payload_has_another_dtype_is_refused_on_all_ranks(two_ranks):
    answers = two_ranks.run(refused_mean)
    assert "the payload of 'w' has the dtypes ['bfloat16'] at step 1, and had ['float16'] at the first" in answers[1][0]
    assert "rank 1 could not decode what it was sent of 'w'" in answers[0][0]
    for _, mean, other in answers:
        assert mean == other
