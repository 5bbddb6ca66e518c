"""Mistakes of the original GRACE that take several ranks to see; for others see compressors/test_traps_of_grace.py."""

import dataclasses

import numpy as np
import pytest
import torch

import grace
import grace.torch
from tests.support.pools import on_ranks
from tests.support.training import Given, distributed, joined


def sparse(rank: int) -> torch.Tensor:
    """20 entries for each rank before this one; none on rank 0."""
    return torch.arange(100).sub(20 * rank).lt(0) * torch.linspace(1, 2, 100)


@pytest.mark.parametrize("kind", ["Allgather", "Broadcast"])
@on_ranks(2, 3)
def test_padding_of_unequal_payloads_is_neither_left_uninitialized_nor_decoded(kind):
    """Padding is zero, and nobody reads the rubbish that is put there."""
    spoilt = []
    used = 20 * grace.rank() * (4 + 2) + 1 + 5  # float32 values, 16-bit indices, a status, a step stamp
    usual = getattr(grace.torch, kind)

    class Spoiling(usual):
        def legs(self, nbytes, engine):
            (leg,) = super().legs(nbytes, engine)

            def spoil(backend, wire, root):
                assert wire.numel() > used
                assert not wire[used:].any()
                wire[used:] = 0xFF
                spoilt.append(wire)
                return leg.collective.start(backend, wire, root)

            return [dataclasses.replace(leg, collective=dataclasses.replace(leg.collective, start=spoil))]

    mean = joined(Spoiling("threshold(value=0.5)", "none")).step(sparse(grace.rank()), "w")
    assert len(spoilt) == 1
    torch.testing.assert_close(mean, sum(sparse(rank) for rank in range(grace.size())) / grace.size())


@pytest.mark.parametrize("compressor", ["none", "fp16", "threshold(value=0.5)"])
@on_ranks(2, 3)
def test_collectives_are_not_paired_by_the_order_of_backward(compressor):
    """Backward reaches the variables in an order of each rank's own; every variable is a group."""
    names = ["a", "b", "c"]
    model = Given({name: (8,) for name in names})
    optimizer = distributed(model, compressor, group_bytes=1)
    shift = grace.rank() % 3
    for name in names[shift:] + names[:shift]:
        value = 2.0 ** names.index(name)
        model.backward({name: np.full(8, value if grace.rank() else 3 * value)})
    optimizer.step()
    for i, (name, p) in enumerate(model.named_parameters()):
        mean = (3 + grace.size() - 1) / grace.size() * 2.0**i
        np.testing.assert_allclose(p.grad, mean, rtol=1e-3, err_msg=name)
