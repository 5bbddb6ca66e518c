"""DDP's hook where DDP hands over more, or something else, than a gradient per parameter: parameters that no rank used,
those whose memory is not in the order of their shape, and ranks that have no batches left."""

import pytest
import torch

import grace
from grace.integrations.wrapped import train_alone
from tests.support.pools import on_ranks
from tests.support.training import Given, ddp, digest, sgd

TOPK = "topk(ratio=0.1)"


TWO = {"a": (100,), "b": (100,)}
"""Parameters of which a step uses one."""


def in_turns(between, stale, bucket_view):
    """Count the elements of a's one gradient that do not arrive, or twice, where steps that use b alone follow it."""
    both = [torch.arange(1.0, 101.0), torch.arange(1.0, 101.0).flip(0)]
    own, wanted = both[grace.rank()], sum(both) / 2
    model = Given(TWO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = ddp(model, find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    grace.torch.register_ddp_hook(wrapped, TOPK, optimizer=optimizer)
    total = torch.zeros(100)
    for step in range(1 + between + 15):
        which = "b" if 1 <= step <= between else "a"
        if stale:  # each optimizer of toggled GANs clears its own
            getattr(model, which).grad = None
        else:
            optimizer.zero_grad()
        wrapped({which: own if step == 0 or which == "b" else torch.full((100,), 1e-6)}).backward()
        if which == "a":
            total += model.a.grad
        optimizer.step()
    return int((wanted - total).abs().gt(1e-3).sum())


@on_ranks(2)
def test_what_is_left_over_of_a_parameter_arrives_when_it_is_used_again():
    ways = [(1, False, False), (4, False, False), (4, True, False), (4, True, True)]
    answers = {way: in_turns(*way) for way in ways}
    assert {way: lost for way, lost in answers.items() if lost} == {}


@on_ranks()
def test_without_compression_it_is_ddp_whoever_uses_what():
    """p.grad where ranks use different parameters in turns, and nobody clears what a step leaves behind."""
    ends = []
    for hook in (False, True):
        model, found = Given(TWO), []
        wrapped = ddp(model, find_unused_parameters=True)
        if hook:
            grace.torch.register_ddp_hook(wrapped, "none")
        given = torch.arange(1.0, 101.0)
        for step in range(4):
            wrapped({"ab"[(grace.rank() + step // 2) % 2]: given + step}).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in (model.a, model.b)])
        ends.append(digest(found))
    assert ends[0] == ends[1]


@on_ranks(2)
def test_an_overflow_that_is_left_in_a_parameter_that_is_not_used_is_not_told_again():
    """An infinite gradient is left in p.grad of a parameter that is not used: the other one's memory goes on."""
    found = []
    for overflows in (True, False):
        model = Given(TWO)
        wrapped = ddp(model, find_unused_parameters=True)
        state = grace.torch.register_ddp_hook(wrapped, TOPK)
        if overflows:
            wrapped({"a": torch.full((100,), float("inf"))}).backward()
        for _ in range(3):
            model.b.grad = None
            wrapped({"b": torch.arange(1.0, 101.0)}).backward()
            with torch.no_grad():
                model.b -= model.b.grad
        found.append(digest(state.full_state_dict()["state"]["memory"]["b"]))
    after, never = found
    assert after == never


class One(torch.nn.Module):
    """A parameter whose gradient is what it is given."""

    def __init__(self, value):
        super().__init__()
        self.w = torch.nn.Parameter(value)

    def forward(self, given):
        return (self.w * given).sum()


@pytest.mark.parametrize("bucket_view", [False, True])
@on_ranks()
def test_methods_see_the_shape_of_a_transposed_parameter(bucket_view):
    """PowerSGD of rank 1 gives a gradient of rank 1."""
    given = torch.outer(torch.arange(1.0, 21.0), torch.arange(1.0, 31.0).sin())
    model = One(torch.zeros(30, 20).t())
    wrapped = ddp(model, gradient_as_bucket_view=bucket_view)
    grace.torch.register_ddp_hook(wrapped, "powersgd(rank=1)")
    wrapped(given).backward()
    assert float((model.w.grad - given).abs().max() / given.abs().max()) < 1e-3


def made(form, weight):
    model = One(weight.clone().contiguous(memory_format=form))
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, wrapped, optimizer, grace.torch.register_ddp_hook(wrapped, TOPK, optimizer=optimizer)


def train(wrapped, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + grace.rank())
        wrapped(torch.randn(8, 6, 3, 3, generator=generator)).backward()
        optimizer.step()


@on_ranks(2)
def test_a_residual_of_a_channels_last_model_is_that_of_a_contiguous_one():
    """A channels_last run ends as one that went on from its checkpoint in the shape's order."""
    model, wrapped, optimizer, state = made(torch.channels_last, torch.zeros(8, 6, 3, 3))
    train(wrapped, optimizer, range(4))
    saved, weights = state.full_state_dict(), model.w.detach().clone()
    train(wrapped, optimizer, range(4, 8))
    again, wrapped, optimizer, state = made(torch.contiguous_format, weights)
    state.load_state_dict(saved)
    train(wrapped, optimizer, range(4, 8))
    assert torch.equal(model.w, again.w)


def uneven(batches, early, alone=False):
    """Return the error of a rank with so many batches under DDP's join(): under the hook, or where ranks train
    alone."""
    model = torch.nn.Linear(6, 4)
    wrapped, optimizer = ddp(model), sgd(model.parameters())
    if alone:
        train_alone(wrapped, optimizer, compressor=TOPK, outer="none", period=2)
    else:
        grace.torch.register_ddp_hook(wrapped, TOPK, optimizer=optimizer)
    done = 0
    try:
        with wrapped.join(throw_on_early_termination=early):
            for _ in range(batches[grace.rank()]):
                optimizer.zero_grad()
                wrapped(torch.ones(2, 6)).square().mean().backward()
                optimizer.step()
                done += 1
    except Exception as error:
        return done, type(error).__name__, str(error)


@pytest.mark.parametrize(("batches", "alone"), [((3, 2), False), ((2, 0), False), ((3, 2), True)], ids=str)
def test_ddps_join_is_refused_by_name_on_all_ranks_before_any_step(two_ranks, batches, alone):
    for done, kind, said in two_ranks.run(uneven, batches, False, alone):
        assert (done, kind) == (0, "ConfigError")
        assert "DistributedDataParallel's join() does not go with Grace:" in said
    two_ranks.stop()  # what DDP had begun is in their process group


@pytest.mark.parametrize("alone", [False, True])
def test_join_that_ends_all_ranks_with_the_first_is_not_refused(two_ranks, alone):
    for done, kind, said in two_ranks.run(uneven, (3, 2), True, alone):
        assert (done, kind) == (2, "RuntimeError")
        assert "exhausted" in said
    two_ranks.stop()
