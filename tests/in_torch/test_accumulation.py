"""Several backward passes before a step."""

import pytest
import torch

import grace
from tests.support.training import (
    METHODS,
    digest,
    distributed,
    loss_of,
    net,
    train,
    weights,
)

pytestmark = pytest.mark.ranks


def mean_over_ranks(step, model):
    """The mean gradient, from all ranks' losses worked out here."""
    sum(loss_of(model, step, rank) for rank in range(grace.size())).div(grace.size()).backward()


def accumulated(compressor, how):
    model = net()
    passes = 2 if how == "passes" else 1
    optimizer = distributed(model, compressor, backward_passes_per_step=passes)
    for step in (0, 2, 4):
        optimizer.zero_grad()
        if how == "one backward":
            (loss_of(model, step) + loss_of(model, step + 1)).backward()
        elif how == "passes":
            loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        else:
            with optimizer.no_sync():
                loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        optimizer.step()
    assert optimizer.traffic.steps == 3
    return weights(model)


@pytest.mark.parametrize("compressor", METHODS)
def test_two_passes_per_step_and_no_sync_are_the_same_bit_for_bit(two_ranks, compressor):
    by_passes = two_ranks.run(accumulated, compressor, "passes")
    by_no_sync = two_ranks.run(accumulated, compressor, "no_sync")
    assert len({digest(answer) for answer in by_passes + by_no_sync}) == 1


@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_accumulation_adds_gradients_up(ranks, how):
    expected = ranks.run(accumulated, "none", "one backward")[0]
    for answer in ranks.run(accumulated, "none", how):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-4, atol=1e-6, msg=name)


def step_before_all_passes():
    model, reference = net(), net()
    optimizer = distributed(model, "none", backward_passes_per_step=3)
    loss_of(model, 0).backward()
    optimizer.step()
    mean_over_ranks(0, reference)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_step_after_fewer_passes_exchanges_what_there_is(two_ranks):
    two_ranks.run(step_before_all_passes)


def backward_twice():
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    with pytest.raises(grace.ExchangeError) as caught:
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return str(caught.value), digest(weights(model))


def test_a_second_backward_before_the_step_is_refused_with_what_to_write(two_ranks):
    (first, one), (second, two) = two_ranks.run(backward_twice)
    assert one == two
    for message in (first, second):
        assert "was computed 2 times before step()" in message
        assert "backward_passes_per_step=2" in message
        assert "optimizer.no_sync()" in message
