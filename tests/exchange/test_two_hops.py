"""Small sums over four ranks and more go in two hops; they are the sums, and the same on every rank."""

import numpy as np
import pytest
import torch

import grace
import grace.torch
from grace.communicators.allreduce import MOST_BYTES
from tests.support.pools import ranks_of
from tests.support.training import Given, distributed, means, plain_sgd

pytestmark = pytest.mark.ranks
SHAPES = {"odd": (13, 7), "kernel": (3, 2, 3, 3), "one": (1,), "scalar": (), "empty": (0, 3), "matrix": (31, 20)}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def value(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def summed(compressor: str, dtype: str, shape: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    communicator = grace.torch.Allreduce(compressor)
    mean = communicator.step(value(grace.rank(), shape).to(DTYPES[dtype]), "w")
    return mean.double().numpy(), mean.dtype is DTYPES[dtype]


CASES = [*(("none", dtype) for dtype in DTYPES), ("fp16", "float32"), ("bf16", "float32")]


@pytest.mark.parametrize(("compressor", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(37, 5), (1,), (), (0, 3)], ids=str)
def test_the_mean_is_that_of_the_formula(compressor, dtype, shape):
    results = ranks_of(4).run(summed, compressor, dtype, shape)
    narrow = {"fp16": "float16", "bf16": "bfloat16"}.get(compressor, dtype)
    sent = [value(rank, shape).to(DTYPES[narrow]) for rank in range(4)]
    wide = torch.float64 if dtype == "float64" else torch.float32
    expected = sum(one.to(wide) for one in sent).to(DTYPES[narrow]).to(wide) / 4
    exact = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6, "float64": 1e-15}[narrow]
    for mean, same_dtype in results:
        assert same_dtype
        np.testing.assert_allclose(mean, expected.double().numpy(), rtol=exact, atol=exact / 10)
        assert mean.tobytes() == results[0][0].tobytes()


def kinds(nbytes: int) -> str:
    communicator = grace.torch.Allreduce("none")
    communicator.step(torch.ones(nbytes // 4), "w")
    runner = communicator.by_hand.runner
    exchange = runner.start_round_trip(runner.buckets[0], [torch.ones(nbytes // 4)], [True])
    names = [leg.collective.name for leg in exchange.route]
    runner.finish_step(lambda bucket: [None])
    return ", ".join(names)


def test_few_ranks_and_long_wires_are_left_to_the_engine():
    assert set(ranks_of(4).run(kinds, 1000)) == {"alltoall, allgather"}
    assert set(ranks_of(3).run(kinds, 1000)) == {"allreduce"}
    assert set(ranks_of(4).run(kinds, 4 * MOST_BYTES)) == {"allreduce"}


def collectives(compressor: str, steps: int) -> tuple[list[bytes], int]:
    """The weights after some steps, and how many collectives a step took."""
    model = Given(SHAPES)
    optimizer = distributed(model, compressor, optimizer=plain_sgd)
    channel = optimizer._grace.runner.channel
    means(model, optimizer, range(steps - 1))
    before = channel.started
    means(model, optimizer, [steps])
    return [p.detach().numpy().tobytes() for p in model.parameters()], channel.started - before


@pytest.mark.parametrize(("size", "count"), [(2, 3), (4, 6)])
def test_powersgd_takes_one_sum_for_all_p_and_one_for_all_q(size, count):
    """And one for what travels dense; of two hops each over four ranks."""
    results = ranks_of(size).run(collectives, "powersgd(rank=2)", 4)
    assert results == [(results[0][0], count)] * size
