"""Mistakes of the original GRACE that take several ranks to see; the others are in ../test_traps.py."""

import dataclasses

import numpy as np
import pytest
import torch

import grace
import grace.torch
from tests.support.training import Given, joined

pytestmark = pytest.mark.ranks


def efsignsgd(kind: str) -> list[float]:
    """The aggregate of (rank + 1) x, where the mean magnitude of x, and of all its shards, is 4."""
    communicator = joined(getattr(grace.torch, kind)("efsignsgd"))
    return communicator.step((grace.rank() + 1) * torch.tensor([2.0, -6.0, 4.0, -4.0, 6.0, -2.0]), "w").tolist()


@pytest.mark.parametrize("kind", ["Allgather", "Broadcast", "ScatterReduce"])
def test_efsignsgd_averages_and_does_not_sum(ranks, kind):
    mean = {2: 6, 3: 8}[ranks.size]
    assert ranks.run(efsignsgd, kind) == [[mean, -mean, mean, -mean, mean, -mean]] * ranks.size


def first_q() -> list[list[float]]:
    torch.manual_seed(grace.rank())
    np.random.seed(grace.rank())
    communicator = joined(grace.torch.Allreduce("powersgd(rank=2)"))
    (p,) = next(communicator.compressor.exchange(torch.eye(6), "w"))  # P = I Q
    return p.tolist()


def test_powersgd_draws_the_same_q_on_every_rank(ranks):
    first, *others = ranks.run(first_q)
    assert np.abs(first).min() > 0
    assert others == [first] * (ranks.size - 1)


def outer(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.outer(torch.randn(30, generator=generator), torch.randn(20, generator=generator))


def mean_of_rank_one() -> list[np.ndarray]:
    """Two steps; each rank's gradient has rank 2, but their mean is ``outer(0)``, of rank 1."""
    communicator = joined(grace.torch.Allreduce("powersgd(rank=1)", grace.make("memory", "residual(beta=0.0)")))
    own = {2: (1, -1), 3: (1, 2, -3)}[grace.size()][grace.rank()]
    return [communicator.step(outer(0) + own * outer(1), "w").numpy() for _ in range(2)]


def test_powersgd_averages_p_and_q_over_ranks(ranks):
    for aggregates in ranks.run(mean_of_rank_one):
        for aggregate in aggregates:
            np.testing.assert_allclose(aggregate, outer(0), atol=1e-4)


def sparse(rank: int) -> torch.Tensor:
    """20 entries for each rank before this one; none on rank 0."""
    return torch.arange(100).sub(20 * rank).lt(0) * torch.linspace(1, 2, 100)


def spoiled_padding(kind: str) -> tuple[list[float], bool]:
    """The aggregate, with rubbish in the padding, and whether there was zero before."""
    clean = []
    used = 20 * grace.rank() * (4 + 2) + 1 + 5  # float32 values, 16-bit indices, a status, a step stamp
    usual = getattr(grace.torch, kind)

    class Spoiling(usual):
        def legs(self, nbytes, engine):
            (leg,) = super().legs(nbytes, engine)

            def spoil(backend, wire, root):
                assert wire.numel() > used
                clean.append(not wire[used:].any())
                wire[used:] = 0xFF
                return leg.collective.start(backend, wire, root)

            return [dataclasses.replace(leg, collective=dataclasses.replace(leg.collective, start=spoil))]

    communicator = joined(Spoiling("threshold(value=0.5)", "none"))
    return communicator.step(sparse(grace.rank()), "w").tolist(), clean == [True]


@pytest.mark.parametrize("kind", ["Allgather", "Broadcast"])
def test_padding_of_unequal_payloads_is_neither_left_uninitialized_nor_decoded(ranks, kind):
    mean = np.mean([sparse(rank).numpy() for rank in range(ranks.size)], axis=0)
    for aggregate, clean in ranks.run(spoiled_padding, kind):
        assert clean
        np.testing.assert_allclose(aggregate, mean, rtol=1e-6)


def ready_in_another_order(compressor: str) -> dict[str, list[float]]:
    """Backward reaches the variables in an order of each rank's own; every variable is a group."""
    names = ["a", "b", "c"]
    model = Given({name: (8,) for name in names})
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = grace.DistributedOptimizer(plain, model.named_parameters(), compressor, group_bytes=1)
    shift = grace.rank() % 3
    for name in names[shift:] + names[:shift]:
        value = 2.0 ** names.index(name)
        model.backward({name: np.full(8, value if grace.rank() else 3 * value)})
    optimizer.step()
    return {name: p.grad.tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("compressor", ["none", "fp16", "threshold(value=0.5)"])
def test_collectives_are_not_paired_by_the_order_of_backward(ranks, compressor):
    for gradients in ranks.run(ready_in_another_order, compressor):
        for i, name in enumerate("abc"):
            mean = (3 + ranks.size - 1) / ranks.size * 2.0**i
            np.testing.assert_allclose(gradients[name], mean, rtol=1e-3, err_msg=name)
