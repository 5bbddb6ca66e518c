"""Mistakes of the original GRACE that take several ranks to see; for others see compressors/test_traps_of_grace.py."""

import dataclasses

import numpy as np
import pytest
import torch

import grace
import grace.torch
from tests.support.training import Given, distributed, joined

pytestmark = pytest.mark.ranks


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
    optimizer = distributed(model, compressor, group_bytes=1)
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
