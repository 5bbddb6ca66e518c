"""Payloads whose sizes differ by rank travel in one size exchange and one padded gather per group."""

import contextlib

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.torch import Compressor, Traits
from tests.support.far import as_far
from tests.support.pools import on_ranks
from tests.support.training import refusal


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


@on_ranks(2, 3)
def test_a_group_takes_one_size_exchange_and_one_gather():
    communicator = grace.torch.Allgather(Positive())
    communicator.step(gradient(grace.rank(), (40, 3)), "w")  # nothing is remembered of it
    backend = communicator.backend
    calls, gather = [], backend.allgather
    backend.allgather = lambda tensor: calls.append(tensor.nbytes) or gather(tensor)
    value = communicator.step(gradient(grace.rank(), (40, 3)), "w").numpy()
    del backend.allgather
    expected = np.mean([gradient(r, (40, 3)).clamp(min=0).numpy() for r in range(grace.size())], axis=0)
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


@pytest.mark.parametrize("kind", ["Allgather", "Broadcast", "ReduceBroadcast"])
@on_ranks()
def test_the_dtype_of_a_payload_may_depend_on_the_data_too(kind: str):
    """Numbers at positions that only wide, and only narrow, integers reach."""
    communicator = getattr(grace.torch, kind)(Narrow(), "none")
    means = []
    for position in (5 + 60000 * grace.rank(), 7 + 60000 * (1 - grace.rank())):
        tensor = torch.zeros(70000)
        tensor[position] = 1
        mean = communicator.step(tensor, "w")
        means.append(mean.nonzero().flatten().tolist())
        assert mean.sum() == 1
    assert means == [[5, 60005], [7, 60007]]


class Growing(Compressor):
    """Whole numbers; in one more than there are elements, if it is told so."""

    name, said = "growing", "shapes [(16,)] at step 1, and had [(15,)]"
    traits = Traits(category="quantization", summable=True)
    more = 0

    def compress(self, tensor, name):
        return [torch.cat([tensor.round().view(-1), torch.zeros(self.more)])], tensor.shape

    def decompress(self, payload, ctx):
        return payload[0].view(ctx)


class GrowingApart(Growing):
    name = "growing_apart"
    traits = Traits(category="quantization")


class Recast(Compressor):
    """Half precision, in another dtype of the same size if it is told so."""

    name, said = "recast", "dtypes ['bfloat16'] at step 1, and had ['float16']"
    traits = Traits(category="quantization", summable=True)
    more = 0

    def compress(self, tensor, name):
        return [tensor.view(-1).to(torch.bfloat16 if self.more else torch.float16)], tensor.shape

    def decompress(self, payload, ctx):
        return payload[0].float().view(ctx)


class RecastApart(Recast):
    name = "recast_apart"
    traits = Traits(category="quantization")


def refused(kind: str, compressor: type, far: bool, means: bool) -> tuple[str, bytes, bytes]:
    """Return the error of a step in which rank 1's payload, or its payload of means, is another than at the first; and
    the next mean, with that step and without it."""
    found, said = [], ""
    with as_far(plain=True) if far else contextlib.nullcontext():
        for changes in (True, False):
            communicator = getattr(grace.torch, kind)(compressor(), "residual", **{"destination": 1} if means else {})
            communicator.step(gradient(grace.rank(), (5, 3)), "w")
            if changes:
                encoder = communicator.answer_compressor if means else communicator.compressor
                encoder.more = int(grace.rank() == 1)
                said = refusal(communicator.step, gradient(2 + grace.rank(), (5, 3)), "w", kind=grace.ExchangeError)
                encoder.more = 0
            found.append(communicator.step(gradient(4 + grace.rank(), (5, 3)), "w").numpy().tobytes())
    return said, *found


@pytest.mark.every
@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize(
    ("kind", "compressor", "means"),
    [
        *(("Allreduce", Growing, False), ("ReduceBroadcast", Growing, False)),
        *((kind, GrowingApart, False) for kind in ("Allgather", "Broadcast", "ReduceBroadcast")),
        *(("Allreduce", Recast, False), ("Allgather", RecastApart, False), ("ReduceBroadcast", RecastApart, True)),
    ],
)
def test_a_payload_of_another_size_or_dtype_is_refused_on_all_ranks_and_training_may_go_on(
    two_ranks, kind, compressor, means, far
):
    (first, *_), (second, *_) = answers = two_ranks.run(refused, kind, compressor, far, means)
    assert f"the payload of 'w' has the {compressor.said} at the first" in second
    assert compressor.name in second
    assert ("rank 1 could not decode what it was sent of 'w'" if means else "its own error says more") in first
    assert "'w' at step 1" in first
    for _, mean, as_if_it_had_not_been in answers:
        assert mean == as_if_it_had_not_been
