"""Momentum that a memory or compressor applies itself is not applied by the optimizer as well, at any step."""

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import adam, ddp, digest, distributed, loss_of, net, refusal, sgd, train, weights

OWNERS = {"dgc": "memory", "signum": "compressor"}


@pytest.mark.parametrize(("compressor", "part"), OWNERS.items())
@on_ranks()
def test_momentum_inside_and_outside_is_refused_at_the_start(compressor, part):
    wrapped = ddp(net())
    momentum = sgd(wrapped.parameters())
    for setting, said in (
        ("momentum", refusal(distributed, net(), compressor, optimizer=sgd)),
        ("betas[0]", refusal(distributed, net(), compressor, optimizer=adam)),
        ("momentum", refusal(grace.torch.register_ddp_hook, wrapped, compressor, optimizer=momentum)),
    ):
        assert f"the {part} {compressor} applies momentum itself, and the optimizer's group 0 has {setting} 0.9" in said
        assert f"Give the optimizer {setting} 0" in said
        assert f"{part}='{compressor}(momentum=0.9)'" in said
    without = refusal(grace.torch.register_ddp_hook, wrapped, compressor)
    assert f"the {part} {compressor} replaces the optimizer's momentum: register_ddp_hook(" in without


@on_ranks()
def test_betas_of_none_are_no_momentum():
    for compressor in OWNERS:
        optimizer = torch.optim.SGD([{"params": net().parameters(), "betas": None}], lr=0.1)
        grace.DistributedOptimizer(optimizer, compressor=compressor).close()


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


HOW = [("gloo", "dgc", False), ("horovodrun-gloo", "signum", False), ("gloo", "dgc", True)]


@pytest.mark.every
@pytest.mark.parametrize(("engine", "compressor", "hooked"), HOW)
@on_ranks()
def test_momentum_that_a_schedule_brings_later_is_refused_before_anything_is_exchanged(engine, compressor, hooked):
    """A schedule gives the optimizer momentum after two steps; without it training goes on."""
    model = net()
    if hooked:
        forward, optimizer = ddp(model), plain(model.parameters())
        grace.torch.register_ddp_hook(forward, compressor, optimizer=optimizer)
    else:
        forward, optimizer = model, distributed(model, compressor, optimizer=plain)
    train(forward, optimizer, range(2))
    before = digest(weights(model)), grace.init().sent_bytes
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    optimizer.zero_grad()
    said = refusal(lambda: loss_of(forward, 2).backward())
    assert "has momentum 0.95 now (a scheduler may have set it" in said
    assert "cycle_momentum=False" in said
    assert (digest(weights(model)), grace.init().sent_bytes) == before
    if not hooked:  # as a step without a backward pass is
        assert "it would be applied twice" in refusal(optimizer.step)
        optimizer.param_groups[0]["momentum"] = 0
        train(model, optimizer, range(2, 4))
    return digest(weights(model))
