"""Clipping, closures, schedules, zero_grad: whatever lies between backward and step."""

import numpy as np
import pytest
import torch

import grace
from tests.support.training import (
    digest,
    distributed,
    gradients,
    loss_of,
    net,
    same,
    sgd,
    state_of,
    train,
    weights,
    with_closure,
)

pytestmark = pytest.mark.ranks


def clipped(compressor):
    """Clipping between synchronize() and step() clips the mean."""
    model, reference = net(), net()
    optimizer, plain = distributed(model, compressor), sgd(reference.parameters())
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        means = gradients(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        for name, p in reference.named_parameters():
            p.grad = means[name]
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert min(norms) > 0.1
    assert optimizer.traffic.steps == 4
    return same(weights(model), weights(reference)), digest(weights(model))


@pytest.mark.parametrize("compressor", ["none", "qsgd", "topk(ratio=0.1)", "powersgd(rank=2)"])
def test_gradients_clipped_after_synchronize_are_what_step_uses(two_ranks, compressor):
    first, second = two_ranks.run(clipped, compressor)
    assert first == second
    assert first[0]


def clipped_too_early(how):
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif how == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    else:
        model.conv.weight.grad = model.conv.weight.grad * 0.5
    with pytest.raises(grace.ExchangeError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return str(caught.value), digest(weights(model))


@pytest.mark.parametrize("how", ["norm", "value", "assignment"])
def test_gradients_changed_before_synchronize_are_refused(two_ranks, how):
    (first, one), (second, two) = two_ranks.run(clipped_too_early, how)
    assert one == two
    for message in (first, second):
        assert "was changed after its exchange began" in message
        assert "Call optimizer.synchronize() after backward" in message


def skipping(wrong):
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    if wrong:
        with pytest.raises(grace.ExchangeError), optimizer.skip_synchronize():
            pass
    optimizer.synchronize()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert optimizer.traffic.steps == 1
    return digest(weights(model))


def test_horovods_skip_synchronize_is_understood(two_ranks):
    assert len(set(two_ranks.run(skipping, True) + two_ranks.run(skipping, False))) == 1


def scheduled(when, lrs):
    model = net()
    plain = sgd(model.parameters())
    schedule = None
    if when == "before":
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.1)
    optimizer = grace.DistributedOptimizer(plain, model.named_parameters(), "efsignsgd")
    if when == "after":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for step in range(6):
        if schedule is None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(lrs[step])
            schedule.step()
    assert optimizer.traffic.steps == 6
    return weights(model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("error")
def test_a_schedule_made_before_or_after_wrapping_is_followed(two_ranks, when):
    lrs = [0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005]
    by_hand = two_ranks.run(scheduled, None, lrs)
    scheduled_ones = two_ranks.run(scheduled, when, lrs)
    for answer in scheduled_ones:
        for name, value in by_hand[0].items():
            torch.testing.assert_close(answer[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert digest(scheduled_ones[0]) == digest(scheduled_ones[1])


@pytest.mark.parametrize("how", ["keyword", "position"])
def test_step_with_a_closure_is_the_same_step_and_gives_the_mean_loss(two_ranks, how):
    own = two_ranks.run(with_closure, "none")
    for losses, bits in two_ranks.run(with_closure, how):
        assert bits == own[0][1]
        np.testing.assert_allclose(losses, (own[0][0] + own[1][0]) / 2, rtol=1e-6)


def zeroed(set_to_none, drop):
    """Optionally a backward whose gradients are dropped before the step, in every second step."""
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", group_bytes=2000)
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        if drop and step % 2:
            before = digest(state_of(optimizer))
            loss_of(model, 100 + step).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert digest(state_of(optimizer)) == before
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
        loss_of(model, step).backward()
        optimizer.step()
    return digest(weights(model))


def test_zero_grad_both_ways_and_after_a_backward_without_step(two_ranks):
    answers = two_ranks.run(zeroed, True, False) + two_ranks.run(zeroed, False, False)
    dropping = two_ranks.run(zeroed, True, True) + two_ranks.run(zeroed, False, True)
    assert len(set(answers + dropping)) == 1


def steps_without_backward():
    model = net()
    optimizer = distributed(model, "topk")
    optimizer.step()
    before = digest(weights(model))
    optimizer.zero_grad()
    optimizer.step()
    assert digest(weights(model)) == before
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, range(2))
    return digest(weights(model))


def test_a_step_without_backward_changes_nothing(two_ranks):
    assert len(set(two_ranks.run(steps_without_backward))) == 1
