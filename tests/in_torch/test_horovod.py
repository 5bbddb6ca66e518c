"""Horovod's optimizer with Grace's exchange in it: in every kind of training loop what Horovod's own gives, to the
bit where nothing is compressed, and what torch.distributed gives where something is."""

import copy
import math

import numpy as np
import pytest
import torch

import grace
from tests.support.pools import launched
from tests.support.training import (
    Given,
    digest,
    distributed,
    loss_of,
    made_up,
    net,
    same,
    sgd,
    state_of,
    train,
    weights,
    with_closure,
)

pytestmark = pytest.mark.ranks


@pytest.fixture
def horovod():
    """2 ranks under horovodrun."""
    return launched("horovodrun-gloo", 2)


def wrapped(model, method, optimizer=sgd, **options):
    """The model's optimizer under Horovod itself ("plain"), or under Grace with a method."""
    if method == "plain":
        import horovod.torch as hvd

        return hvd.DistributedOptimizer(optimizer(model.parameters()), model.named_parameters(), **options)
    return distributed(model, method, optimizer=optimizer, **options)


# -- loops ------------------------------------------------------------------------------------------------------------


def two_passes(method, how="passes"):
    """Every step has the gradients of two backward passes."""
    model = net()
    optimizer = wrapped(model, method, backward_passes_per_step=2 if how == "passes" else 1)
    if how == "set":
        optimizer.set_backward_passes_per_step(2)
    for step in (0, 2, 4):
        optimizer.zero_grad()
        if how == "no_sync":
            with optimizer.no_sync():
                loss_of(model, step).backward()
        else:
            loss_of(model, step).backward()
        loss_of(model, step + 1).backward()
        optimizer.step()
    return digest(weights(model))


def fewer_passes(method):
    """The first step comes before all the passes that were announced."""
    model = net()
    optimizer = wrapped(model, method, backward_passes_per_step=3)
    for passes in (1, 3, 2):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, 10 * passes + i).backward()
        optimizer.step()
    return digest(weights(model))


def frozen_for_a_while(method):
    """The convolution is frozen in every second step."""
    model = net()
    optimizer = wrapped(model, method, lambda p: torch.optim.SGD(p, lr=0.05))
    for step in range(5):
        model.conv.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        before = model.conv.weight.clone()
        loss_of(model, step).backward()
        optimizer.step()
        assert torch.equal(before, model.conv.weight) == (step % 2 == 1)
    return digest(weights(model))


def in_turns(method):
    """A generator and a discriminator with an optimizer each; the one that is not trained is frozen."""
    torch.manual_seed(0)
    models = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)
    optimizers = [wrapped(model, method) for model in models]
    noise = torch.Generator().manual_seed(grace.rank())
    for turn in range(6):
        for i, model in enumerate(models):
            model.requires_grad_(i == turn % 2)
            optimizers[i].zero_grad()
        models[1](models[0](torch.randn(4, 6, generator=noise))).square().sum().backward()
        assert [model.weight.grad is None for model in models] == [turn % 2 == 1, turn % 2 == 0]
        optimizers[turn % 2].step()
    return digest([weights(model) for model in models])


def unused(method):
    """``matrix`` gets a gradient on rank 0 only, ``idle`` nowhere."""
    shapes = {"matrix": (12, 20), "vector": (300,), "idle": (40, 10)}
    model = Given(shapes)
    optimizer = wrapped(model, method)
    for step in range(4):
        given = made_up(shapes, step, grace.rank())
        optimizer.zero_grad()
        model.backward({name: given[name] for name in (("vector",) if grace.rank() else ("matrix", "vector"))})
        optimizer.step()
    assert model.matrix.any()
    assert not model.idle.any()
    return digest(weights(model))


def clipped(method):
    """The mean gradient is clipped, not this rank's."""
    model = net()
    optimizer = wrapped(model, method)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        with optimizer.skip_synchronize():
            optimizer.step()
    return digest(weights(model))


def one_rank_idle_after_a_dropped_step(method):
    """A step is dropped after its exchange, as a GradScaler does; then one rank has no gradient at all."""
    model = net()
    optimizer = wrapped(model, method)
    for step in range(4):
        optimizer.zero_grad()
        if step != 2 or grace.rank() == 0:
            loss_of(model, step).backward()
        optimizer.synchronize()
        if step != 1:
            with optimizer.skip_synchronize():
                optimizer.step()
    return digest(weights(model))


LOOPS = [
    *(two_passes, fewer_passes, frozen_for_a_while, in_turns, unused, clipped),
    one_rank_idle_after_a_dropped_step,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_without_compression_it_is_horovods_optimizer_to_the_bit(horovod, loop):
    assert len(set(horovod.run(loop, "plain") + horovod.run(loop, "none"))) == 1


@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2)"])
@pytest.mark.parametrize("loop", LOOPS)
def test_with_compression_it_gives_what_torch_distributed_gives(horovod, two_ranks, loop, method):
    assert len(set(horovod.run(loop, method) + two_ranks.run(loop, method))) == 1


@pytest.mark.parametrize("method", ["none", "topk(ratio=0.1)", "powersgd(rank=2)"])
def test_passes_may_be_announced_later_or_held_back(horovod, method):
    answers = [answer for how in ("passes", "set", "no_sync") for answer in horovod.run(two_passes, method, how)]
    assert len(set(answers)) == 1


def too_many_passes(groups):
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", backward_passes_per_step=2, groups=groups)
    for step in range(2):
        loss_of(model, step).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times before call to step"):
        loss_of(model, 2).backward()
    with pytest.raises(grace.ExchangeError, match="was changed after its exchange began"):
        optimizer.step()
    optimizer.zero_grad()  # and goes on: nothing is under way any more
    optimizer.set_backward_passes_per_step(1)
    train(model, optimizer, range(2))
    return digest(weights(model))


@pytest.mark.parametrize("groups", [None, 2])
def test_too_many_passes_are_refused_as_horovod_does(horovod, groups):
    first, second = horovod.run(too_many_passes, groups)
    assert first == second


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaled(method, unscale):
    """Rank 1 overflows in the third step, which is skipped everywhere."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = distributed(model, method, grad_scaler=scaler)
    scales = []
    for step in range(5):
        before, remembered = weights(model), digest(state_of(optimizer))
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * math.inf if step == 2 and grace.rank() == 1 else loss).backward()
        if unscale:
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        assert same(before, weights(model)) == (step == 2)
        assert (remembered == digest(state_of(optimizer))) == (step == 2)
        scales.append(scaler.get_scale())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return scales, digest(weights(model))


@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2)"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(horovod, two_ranks, method):
    alone, unscaled = horovod.run(scaled, method, False), horovod.run(scaled, method, True)
    assert alone + unscaled == two_ranks.run(scaled, method, False) * 2
    assert alone[0] == alone[1]
    assert alone[0][0] == [1024.0, 1024.0, 512.0, 512.0, 512.0]


# -- the optimizer stays the user's -----------------------------------------------------------------------------------


def scheduled(method, when):
    """With a learning-rate schedule made before the optimizer is distributed, or after."""
    model = net()
    optimizer = sgd(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1) if when == "before" else None
    if method == "plain":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        made = grace.DistributedOptimizer(optimizer, model.named_parameters(), method)
        assert made is optimizer
        assert isinstance(made, torch.optim.SGD)
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
    return digest(weights(model))


def test_a_schedule_made_before_or_after_is_followed(horovod):
    plain, after = horovod.run(scheduled, "plain", "after"), horovod.run(scheduled, "none", "after")
    assert len(set(plain + after + horovod.run(scheduled, "none", "before"))) == 1
    assert len(set(horovod.run(scheduled, "topk", "after") + horovod.run(scheduled, "topk", "before"))) == 1


@pytest.mark.parametrize("how", ["keyword", "position"])
def test_step_with_a_closure_is_the_same_step_and_gives_the_mean_loss(horovod, how):
    own = horovod.run(with_closure, "none")
    for losses, bits in horovod.run(with_closure, how):
        assert bits == own[0][1]
        np.testing.assert_allclose(losses, (own[0][0] + own[1][0]) / 2, rtol=1e-6)


def zeroed(set_to_none):
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    for step in range(3):
        loss_of(model, step).backward()
        if step == 1:
            with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward\(\)"):
                optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    return digest(weights(model))


def test_zero_grad_is_refused_between_backward_and_step(horovod):
    assert len(set(horovod.run(zeroed, True) + horovod.run(zeroed, False))) == 1


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resumed(method, everyone):
    """Whether a run that loads what another saved ends where that one did."""
    model = net()
    optimizer = distributed(model, method)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.full_state_dict() if everyone else optimizer.state_dict())
    start = weights(model)
    train(model, optimizer, range(3, 6))
    other = net(seed=99)
    again = distributed(other, method)
    other.load_state_dict(start)
    again.load_state_dict(saved)
    train(other, again, range(3, 6))
    return same(weights(model), weights(other)), bool(state_of(again)["memory"])


@pytest.mark.parametrize("everyone", [False, True], ids=["own state", "full state"])
@pytest.mark.parametrize("method", ["topk(ratio=0.1)", "powersgd(rank=2)"])
def test_resuming_continues_bit_for_bit(horovod, method, everyone):
    assert horovod.run(resumed, method, everyone) == [(True, True)] * 2


def from_a_plain_checkpoint():
    model = net()
    plain = sgd(model.parameters())
    loss_of(model, 0).backward()
    plain.step()
    optimizer = distributed(net(), "topk")
    with pytest.raises(grace.ConfigError) as refused:
        optimizer.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(plain.state_dict(), memory="reset")
    assert len(optimizer.state) == len(plain.state)
    return str(refused.value)


def test_a_plain_optimizers_checkpoint_is_refused_with_what_to_do(horovod):
    for message in horovod.run(from_a_plain_checkpoint):
        assert "saved by a plain optimizer" in message
        assert "load_state_dict(state, memory='reset')" in message
