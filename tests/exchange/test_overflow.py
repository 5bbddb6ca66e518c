"""Overflows under DDP's hook, a GradScaler and in narrow payloads; test_catalogue.py has those of every method."""

import math

import pytest
import torch

import grace
from tests.support.pairwise import pairwise
from tests.support.training import (
    METHODS,
    Given,
    ddp,
    digest,
    distributed,
    loss_of,
    made_up,
    net,
    sgd,
    state_of,
    train,
    used,
    weights,
)

pytestmark = pytest.mark.ranks

SHAPES = {"matrix": (20, 30), "vector": (200,), "tiny": (1,)}


class Outputs(Given):
    def forward(self):
        return dict(self.named_parameters())


def around_overflow_under_ddp(compressor, communicator=None):
    """Digests of the state, and whether the aggregate was finite, after each step; the fourth overflows on rank 1."""
    model = Outputs(SHAPES)
    wrapped = ddp(model)
    optimizer = sgd(model.parameters())
    state = grace.torch.register_ddp_hook(wrapped, compressor, communicator=communicator, optimizer=optimizer)
    found = []
    for step in range(5):
        given = made_up(SHAPES, step, grace.rank())
        if step == 3 and grace.rank() == 1:
            given["matrix"].flat[7] = math.nan
        optimizer.zero_grad()
        outputs = wrapped()
        sum((outputs[name] * torch.from_numpy(g)).sum() for name, g in given.items()).backward()
        finite = bool(torch.isfinite(model.matrix.grad).all())
        if finite:  # as a scaler does
            optimizer.step()
        found.append((digest(state.state_dict()["state"]), finite))
    return found


@pytest.mark.parametrize("compressor", METHODS)
def test_the_ddp_hook_keeps_its_state_from_bad_numbers_too(two_ranks, compressor):
    for found in two_ranks.run(around_overflow_under_ddp, compressor):
        states, finite = zip(*found, strict=True)
        assert finite == (True, True, True, False, True)
        assert states[3] == states[2]
        assert (states[4] != states[3]) == (grace.make("compressor", compressor).traits.memory != "none")


def with_scaler(compressor, give_scaler, blow_up):
    """The mixed-precision loop; rank 1's gradient overflows in two of its steps."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    optimizer = distributed(model, compressor, grad_scaler=scaler if give_scaler else None)
    skipped, scales = [], []
    for step in range(10):
        before = digest(weights(model))
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if blow_up and step in (2, 5) and grace.rank() == 1:
            loss = loss * 1e38 * 1e10
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(digest(weights(model)) == before)
        scales.append(scaler.get_scale())
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    assert finite
    return skipped, scales, digest(weights(model))


@pytest.mark.parametrize(
    ("ranks", "compressor", "give_scaler"), pairwise([2, 3], METHODS, [True, False]), indirect=["ranks"]
)
def test_a_grad_scaler_skips_overflows_on_every_rank_and_recovers(ranks, compressor, give_scaler):
    answers = ranks.run(with_scaler, compressor, give_scaler, True)
    assert answers[1:] == answers[:-1]
    skipped, scales, _ = answers[0]
    assert skipped == [step in (2, 5) for step in range(10)]
    assert scales[2] == scales[1] / 2
    assert scales[5] == scales[2] / 2 == scales[-1] / 2  # and grew again after three good steps


def residuals_when_the_scale_changes(compressor):
    """The same gradients with the loss scale going 4, 4, 16, 1, and without: aggregates unscaled, and residuals."""
    plain, scaled = Given(SHAPES), Given(SHAPES)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # a scaler knows its scale from its first use on
    optimizers = [distributed(plain, compressor), distributed(scaled, compressor, grad_scaler=scaler)]
    for step, scale in enumerate((4.0, 4.0, 16.0, 1.0)):
        scaler.update(scale)
        given = made_up(SHAPES, step, grace.rank())
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain.backward(given)
        scaled.backward({name: g * scale for name, g in given.items()})
        for optimizer in optimizers:
            optimizer.synchronize()
        unscaled = {name: p.grad / scale for name, p in scaled.named_parameters()}
        assert digest(unscaled) == digest({name: p.grad for name, p in plain.named_parameters()}), step
        for optimizer in optimizers:
            optimizer.step()
    residuals, reference = (state_of(optimizer)["memory"] for optimizer in optimizers[::-1])
    assert reference
    return digest(residuals) == digest(reference)


@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "randomk(ratio=0.1)", "efsignsgd"])
def test_residuals_follow_the_loss_scale_exactly(two_ranks, compressor):
    assert two_ranks.run(residuals_when_the_scale_changes, compressor) == [True, True]


def unscaled_too_early(give_scaler, clip):
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = distributed(model, "topk", grad_scaler=scaler if give_scaler else None)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    try:
        optimizer.step()
        message = "nothing was noticed"
    except grace.ExchangeError as error:
        message = str(error)
    scaler.update()
    optimizer.zero_grad()
    train(model, optimizer, range(1, 3))
    return message, digest(weights(model))


@pytest.mark.parametrize(("give_scaler", "clip"), [(True, False), (True, True), (False, True)])
def test_unscaling_before_synchronize_is_refused_and_training_can_go_on(two_ranks, give_scaler, clip):
    (first, one), (second, two) = two_ranks.run(unscaled_too_early, give_scaler, clip)
    assert "synchronize()" in first
    assert "synchronize()" in second
    assert one == two


def scaler_steps(compressor, fused, synchronize):
    """The loop without clipping: scaler.step() unscales by itself."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = distributed(
        model, compressor, optimizer=lambda p: torch.optim.SGD(p, lr=0.05, fused=fused), grad_scaler=scaler
    )
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (1e38 * 1e10 if (step, grace.rank()) == (3, 1) else 1)
        scaler.scale(loss).backward()
        if synchronize:
            optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**7
    return digest(weights(model))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
def test_scaler_step_alone_synchronizes_before_it_unscales(two_ranks, compressor, fused):
    with_call = two_ranks.run(scaler_steps, compressor, fused, True)
    without = two_ranks.run(scaler_steps, compressor, fused, False)
    assert len(set(with_call + without)) == 1


def beyond_half(compressor, communicator):
    """A finite gradient beyond float16's range, on rank 1: what comes out, and what memories hold, before and after."""
    model = Given({"w": (100,)})
    optimizer = distributed(model, compressor, memory="residual", communicator=communicator)
    model.backward(made_up({"w": (100,)}, 0, grace.rank()))
    optimizer.step()
    before = digest(state_of(optimizer))
    optimizer.zero_grad()
    given = made_up({"w": (100,)}, 1, grace.rank())
    given["w"][7] = 1e6 * grace.rank()
    model.backward(given)
    optimizer.synchronize()
    finite = bool(torch.isfinite(model.w.grad).all())
    used(model, optimizer)
    return finite, before == digest(state_of(optimizer))


@pytest.mark.parametrize("communicator", ["allgather", "reduce_broadcast"])
def test_a_value_beyond_the_range_of_its_payload_is_an_overflow(two_ranks, communicator):
    assert two_ranks.run(beyond_half, "topk(ratio=0.1) | fp16", communicator) == [(False, True)] * 2


def late_beyond_half():
    """The same over a delayed exchange: whether the mean that comes a step later is finite, and all that is kept."""
    model = Given({"w": (100,)})
    optimizer = distributed(
        model, "topk(ratio=0.1) | fp16", memory="residual", communicator="reduce_broadcast(staleness=1)"
    )
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        given = made_up({"w": (100,)}, step, grace.rank())
        given["w"][7] += 1e6 * (step == 1 and grace.rank() == 1)
        model.backward(given)
        optimizer.synchronize()
        seen.append(model.w.grad is None or bool(torch.isfinite(model.w.grad).all()))
        if seen[-1]:  # else a scaler skips the step
            optimizer.step()
    kept = [value for values in state_of(optimizer).values() for value in values.values()]
    return seen, all(bool(torch.isfinite(value).all()) for value in kept)


def test_a_delayed_value_beyond_the_range_of_its_payload_reaches_no_memory(two_ranks):
    assert two_ranks.run(late_beyond_half) == [([True, True, False, True], True)] * 2
