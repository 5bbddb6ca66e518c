"""Methods of several dependent reductions: an overflow in any round counts."""

import math
from dataclasses import dataclass

import pytest
import torch

import grace
from grace.communicators import Allreduce, ReduceBroadcast
from grace.core.compressor import Compressor, Traits
from grace.errors import PayloadError
from tests.support.pools import on_ranks
from tests.support.training import Given, digest, made_up, refusal, sgd, state_of, used

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


@dataclass
class Resized(Compressor):
    """A user's method, whose first payload has as many elements as a test says."""

    name = "resized"
    traits = Traits(category="lowrank", summable=True, rounds=2, memory="none")

    def exchange(self, tensor, name):
        yield [tensor.flatten()[: self.size].clone()]
        (mean,) = yield [tensor.flatten()]
        return [mean], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        return payload[0].reshape(ctx)


@on_ranks()
def test_a_step_follows_one_whose_first_payload_was_withheld():
    """One rank's payload has another size in some steps; after each the gradients are cleared."""
    compressor, model = Resized(), Given({"w": (6,)})
    optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model, compressor, communicator="allreduce")
    for step in range(5):
        compressor.size = 3 if grace.rank() == 1 and step in (1, 2) else 4
        optimizer.zero_grad()
        model.backward({"w": [1.0] * 6})
        if step in (1, 2):
            said = refusal(optimizer.step, kind=PayloadError)
            assert ("laid out otherwise" in said) == (grace.rank() == 0), said
        else:
            optimizer.step()
            assert model.w.grad.sum() == 6


def telling():
    return Allreduce(Telling(), "none")


def silent():
    return Allreduce(Silent(), "residual")


def over_a_destination():
    return ReduceBroadcast(Telling(), "residual", destination=1)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("make", [telling, silent, over_a_destination])
@on_ranks()
def test_an_overflow_in_an_early_round_is_seen_by_all_and_remembered_by_none(make, bad):
    """Rank 1's first gradient is bad in the second of three steps."""
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
    assert model.second.grad.isfinite().all()
    assert not model.first.grad.isfinite().all()  # as an uncompressed all-reduce would show it
    used(model, optimizer)
    assert digest(state_of(optimizer)) == before
    optimizer.zero_grad()
    model.backward(made_up(SHAPES, 2, grace.rank()))
    optimizer.step()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
