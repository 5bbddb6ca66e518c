"""Methods of several dependent reductions: an overflow in any round counts."""

import math
from dataclasses import dataclass

import pytest
import torch

import grace
from grace.communicators import Allreduce, ReduceBroadcast
from grace.core.compressor import Compressor, Traits
from tests.support.training import Given, digest, made_up, sgd, state_of, used

pytestmark = pytest.mark.ranks

SHAPES = {"first": (30,), "second": (40,)}


@dataclass
class Shared(Compressor):
    """A user's method: the ranks' mean scale first, and then the values in units of it, which are finite even where
    the scale is not."""

    name = "shared"
    stateful = True

    def exchange(self, tensor, name):
        (scale,) = yield [tensor.abs().max().reshape(1)]
        self.state[name] = scale.clone()
        (mean,) = yield [torch.nan_to_num(tensor / scale, 0.0, 0.0, 0.0)]
        return [mean, torch.nan_to_num(scale, 0.0, 0.0, 0.0)], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        return payload[0] * payload[1]


@dataclass
class Telling(Shared):
    """The same; that it overflowed travels in its payload."""

    traits = Traits(category="quantization", summable=True, rounds=2, memory="none", carries_nonfinite=True)


@dataclass
class Silent(Shared):
    """The same; that it overflowed is told by the status of its payload."""

    traits = Traits(category="quantization", summable=True, rounds=2, memory="none")


def spoilt(make, bad):
    """Whether each gradient is finite after a step in which rank 1's first one was bad, and what the states were before
    and after it, and what comes after a good step."""
    model = Given(SHAPES)
    optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model, communicator=make())
    model.backward(made_up(SHAPES, 0, grace.rank()))
    optimizer.step()
    before = digest(state_of(optimizer))
    optimizer.zero_grad()
    given = made_up(SHAPES, 1, grace.rank())
    if grace.rank() == 1:
        given["first"][3] = bad
    model.backward(given)
    optimizer.synchronize()
    finite = [bool(torch.isfinite(p.grad).all()) for p in model.parameters()]
    used(model, optimizer)
    after = digest(state_of(optimizer))
    optimizer.zero_grad()
    model.backward(made_up(SHAPES, 2, grace.rank()))
    optimizer.step()
    return finite, before == after, all(torch.isfinite(p.grad).all() for p in model.parameters())


def telling():
    return Allreduce(Telling(), "none")


def silent():
    return Allreduce(Silent(), "residual")


def over_a_destination():
    return ReduceBroadcast(Telling(), "residual", destination=1)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [telling, silent, over_a_destination])
def test_an_overflow_in_an_early_round_is_seen_by_all_and_remembered_by_none(two_ranks, make, bad):
    for finite, unchanged, good in two_ranks.run(spoilt, make, bad):
        assert finite == [False, True]  # as an uncompressed all-reduce would show it
        assert unchanged
        assert good
