"""Overflows under DDP's hook, a GradScaler and in narrow payloads; test_catalogue.py has those of every method."""

import math

import pytest
import torch

import grace
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.training import (
    METHODS,
    Given,
    ddp,
    digest,
    distributed,
    loss_of,
    made_up,
    net,
    refusal,
    sgd,
    state_of,
    train,
    used,
    weights,
)

SHAPES = {"matrix": (20, 30), "vector": (200,), "tiny": (1,)}
HALVES = "topk(ratio=0.1) | fp16"


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
@on_ranks()
def test_the_ddp_hook_keeps_its_state_from_bad_numbers_too(compressor):
    states, finite = zip(*around_overflow_under_ddp(compressor), strict=True)
    assert finite == (True, True, True, False, True)
    assert states[3] == states[2]
    assert (states[4] != states[3]) == (grace.make("compressor", compressor).traits.memory != "none")


@pytest.mark.parametrize(("size", "compressor", "give_scaler"), pairwise([2, 3], METHODS, [True, False]))
@on_ranks()
def test_a_grad_scaler_skips_overflows_on_every_rank_and_recovers(size, compressor, give_scaler):
    """The mixed-precision loop; rank 1's gradient overflows in two of its steps."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    optimizer = distributed(model, compressor, grad_scaler=scaler if give_scaler else None)
    scales = []
    for step in range(10):
        before = digest(weights(model))
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step in (2, 5) and grace.rank() == 1:
            loss = loss * 1e38 * 1e10
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert (digest(weights(model)) == before) == (step in (2, 5))
        scales.append(scaler.get_scale())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert scales[2] == scales[1] / 2
    assert scales[5] == scales[2] / 2 == scales[-1] / 2  # and grew again after three good steps
    return scales, digest(weights(model))


@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "randomk(ratio=0.1)", "efsignsgd"])
@on_ranks()
def test_residuals_follow_the_loss_scale_exactly(compressor):
    """Loss scales of 4, 4, 16 and 1 give the same unscaled means and residuals as no scale."""
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
    assert digest(residuals) == digest(reference)


@pytest.mark.parametrize(("give_scaler", "clip"), [(True, False), (True, True), (False, True)])
@on_ranks()
def test_unscaling_before_synchronize_is_refused_and_training_can_go_on(give_scaler, clip):
    model = net()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = distributed(model, "topk", grad_scaler=scaler if give_scaler else None)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "synchronize()" in refusal(optimizer.step, kind=grace.ExchangeError)
    scaler.update()
    optimizer.zero_grad()
    train(model, optimizer, range(1, 3))
    return digest(weights(model))


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
@on_ranks()
def test_scaler_step_alone_synchronizes_before_it_unscales(compressor, fused):
    ends = {scaler_steps(compressor, fused, synchronize) for synchronize in (True, False)}
    assert len(ends) == 1
    return ends


@pytest.mark.parametrize("communicator", ["allgather", "reduce_broadcast"])
@on_ranks()
def test_a_value_beyond_the_range_of_its_payload_is_an_overflow(communicator):
    """A finite gradient beyond float16's range, on rank 1, reaches no memory."""
    model = Given({"w": (100,)})
    optimizer = distributed(model, HALVES, memory="residual", communicator=communicator)
    model.backward(made_up({"w": (100,)}, 0, grace.rank()))
    optimizer.step()
    before = digest(state_of(optimizer))
    optimizer.zero_grad()
    given = made_up({"w": (100,)}, 1, grace.rank())
    given["w"][7] = 1e6 * grace.rank()
    model.backward(given)
    optimizer.synchronize()
    assert not torch.isfinite(model.w.grad).all()
    used(model, optimizer)
    assert before == digest(state_of(optimizer))


@on_ranks()
def test_a_delayed_value_beyond_the_range_of_its_payload_reaches_no_memory():
    """Over a delayed exchange its mean comes a step later."""
    model = Given({"w": (100,)})
    optimizer = distributed(model, HALVES, memory="residual", communicator="reduce_broadcast(staleness=1)")
    for step in range(4):
        optimizer.zero_grad()
        given = made_up({"w": (100,)}, step, grace.rank())
        given["w"][7] += 1e6 * (step == 1 and grace.rank() == 1)
        model.backward(given)
        optimizer.synchronize()
        finite = model.w.grad is None or bool(torch.isfinite(model.w.grad).all())
        assert finite == (step != 2)
        if finite:  # else a scaler skips the step
            optimizer.step()
    kept = [value for values in state_of(optimizer).values() for value in values.values()]
    assert all(bool(torch.isfinite(value).all()) for value in kept)
