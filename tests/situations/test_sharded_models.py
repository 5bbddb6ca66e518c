"""The situations of gradients and steps where a model is sharded: FSDP2, two shards of two replicas."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grace
from tests.in_torch.test_fsdp import mesh_of
from tests.support.pools import ranks_of
from tests.support.training import digest

pytestmark = pytest.mark.ranks

TOPK, BLOCK = "topk(ratio=0.1)", "block(bits=4)"
OWN = 1e-7
"""What a discriminator's own gradients are multiplied by: it hardly moves, unless the others' come back."""


def batch():
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1 + torch.distributed.get_rank()))


def sharded(way, make=torch.optim.SGD, given=True):
    """A model whose replicas, or shards, or both compress what they exchange; its optimizer, and the hook's state."""
    model = torch.nn.Linear(20, 6, bias=False)
    torch.nn.init.zeros_(model.weight)
    mesh = mesh_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if way == "shards" else mesh["shard"])
    optimizer = make(model.parameters(), lr=0.1)
    state = None if way == "replicas" else grace.torch.compress_reduce_scatter(model, BLOCK)
    if way != "shards":
        told = optimizer if given else None
        state = grace.torch.register_fsdp_hook(model, mesh["replicate"], TOPK, optimizer=told)
    return model, optimizer, state


def whole(model):
    return model.weight.full_tensor().detach()


def fooled(way, given):
    """How far a discriminator moves whose own gradients are tiny, between a generator's that are cleared."""
    model, optimizer, state = sharded(way, given=given)
    x = batch()
    for _ in range(10):
        model.zero_grad()
        (model(x) * OWN).sum().backward()
        optimizer.step()
        model(x).sum().backward()
    model.zero_grad()
    state.close()
    return float(whole(model).abs().max())


WAYS = pytest.mark.parametrize("way", ["replicas", "shards", "both"])


@WAYS
def test_a_discriminator_does_not_learn_to_be_fooled(way):
    for given in (True, False):
        assert max(ranks_of(4).run(fooled, way, given)) < 1e-4, given


def left_out(way):
    """The weights after steps of which one batch was left out for its norm, and after steps without that batch."""
    found = []
    for spiked in (True, False):
        model, optimizer, state = sharded(way)
        for step in range(8):
            for scale in (1000.0, 1.0) if spiked and step == 3 else (1.0,):
                optimizer.zero_grad()
                (model(batch()) * scale).sum().backward()
                if float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)) < 1000:
                    optimizer.step()
        found.append(digest(whole(model)))
        state.close()
    return found


@WAYS
def test_a_batch_that_is_left_out_for_its_norm_leaves_no_trace(way):
    for with_spike, without in ranks_of(4).run(left_out, way):
        assert with_spike == without


def accumulating(model, way, method, passes):
    """How far weights are from what two passes, exchanged in one step, and many tiny ones behind them have brought."""
    mesh = mesh_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if way == "shards" else mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if way == "shards":
        state = grace.torch.compress_reduce_scatter(model, method)
    else:
        state = grace.torch.register_fsdp_hook(model, mesh["replicate"], method, optimizer=optimizer)
    start = whole(model).clone()
    for step in range(12):
        optimizer.zero_grad()
        for own in passes:
            (model(own[0]) * (own[1] if step == 1 else 1e-6)).sum().backward()
        optimizer.step()
    state.close()
    plain = torch.nn.Parameter(torch.zeros_like(start))
    forward = torch.nn.functional.embedding if way == "shards" else torch.nn.functional.linear
    for inputs, coefficients in passes:
        (forward(inputs, plain) * coefficients).sum().backward()
    torch.distributed.all_reduce(plain.grad)
    return float((whole(model) - start + plain.grad / 4).abs().max())


def all_below_a_threshold():
    """Nothing of the first pass is sent: the mean is zeros."""
    up = torch.arange(1.0, 51.0)
    passes = [(given[None], torch.ones(2)) for given in (up, up.flip(0))]
    return accumulating(torch.nn.Linear(50, 2, bias=False), "replicas", "threshold(value=50.5)", passes)


def rows_of_one_shard():
    """The other shards' parts of the gradient are zeros."""
    draw = torch.Generator().manual_seed(torch.distributed.get_rank())
    passes = [(torch.arange(2), torch.randn(2, 32, generator=draw)) for _ in range(2)]
    return accumulating(torch.nn.Embedding(8, 32), "shards", BLOCK, passes)


def test_accumulated_passes_that_are_exchanged_each_lose_nothing():
    for passes in (all_below_a_threshold, rows_of_one_shard):
        assert max(ranks_of(4).run(passes)) < 1e-3, passes.__name__


class Nested(torch.optim.SGD):
    """torch calls hooks of ``step()`` at both levels of such a subclass."""

    def step(self, closure=None):
        return super().step(closure)


def nested():
    """The weights and the count of steps, with a step that calls its parent's and without."""
    found = []
    for make in (torch.optim.SGD, Nested):  # torch has added its hooks to SGD's step when the other class comes
        model, optimizer, state = sharded("replicas", make)
        for _ in range(5):
            optimizer.zero_grad()
            (model(batch()) + 1).square().sum().backward()
            optimizer.step()
        found.append((digest(whole(model)), state.runner.context.step, state.runner.context.updates))
        state.close()
    return found


def test_a_step_that_calls_its_parents_step_is_one():
    for usual, subclass in ranks_of(4).run(nested):
        assert subclass == usual
        assert usual[1] in (4, 5)
