"""Momentum that a memory or compressor applies itself is not applied by the optimizer as well, at any step."""

import pytest
import torch

import grace
from tests.support.pools import launched
from tests.support.training import adam, ddp, digest, distributed, loss_of, net, sgd, train, weights

pytestmark = pytest.mark.ranks

OWNERS = {"dgc": "memory", "signum": "compressor"}


def refused(compressor):
    """What is said of optimizers that have momentum when they are made distributed, or their model's hook is."""
    found = []
    for make in (sgd, adam):
        with pytest.raises(grace.ConfigError) as caught:
            distributed(net(), compressor, optimizer=make)
        found.append(str(caught.value))
    wrapped = ddp(net())
    for optimizer in (sgd(wrapped.parameters()), None):
        with pytest.raises(grace.ConfigError) as caught:
            grace.torch.register_ddp_hook(wrapped, compressor, optimizer=optimizer)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(("compressor", "part"), OWNERS.items())
def test_momentum_inside_and_outside_is_refused_at_the_start(two_ranks, compressor, part):
    for *twice, without in two_ranks.run(refused, compressor):
        for message in twice:
            assert f"the {part} {compressor} applies momentum itself, and the optimizer's group 0 has" in message
            assert f"{part}='{compressor}(momentum=0.9)'" in message
        assert f"the {part} {compressor} replaces the optimizer's momentum: register_ddp_hook(" in without


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def cycled(compressor, hooked):
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
    with pytest.raises(grace.ConfigError) as caught:
        loss_of(forward, 2).backward()
    assert (digest(weights(model)), grace.init().sent_bytes) == before
    if not hooked:  # as a step without a backward pass is
        with pytest.raises(grace.ConfigError, match="it would be applied twice"):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0
        train(model, optimizer, range(2, 4))
    return str(caught.value), digest(weights(model))


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
def test_momentum_that_a_schedule_brings_later_is_refused_before_anything_is_exchanged(engine):
    for compressor, hooked in [("dgc", False), ("signum", False), *([("dgc", True)] if engine == "gloo" else [])]:
        answers = launched(engine, 2).run(cycled, compressor, hooked)
        assert len(set(answers)) == 1
        assert "has momentum 0.95 now (a scheduler may have set it" in answers[0][0]
        assert "cycle_momentum=False" in answers[0][0]
