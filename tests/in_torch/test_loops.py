"""Every kind of training loop: without compression what Horovod's own optimizer gives, to the bit, and with it the same
under Horovod as under torch.distributed; and what is refused on the way."""

import copy
import math
import threading
import warnings

import numpy as np
import pytest
import torch

import grace
from tests.support.pools import launched, on_ranks
from tests.support.training import (
    METHODS,
    SPECS,
    Given,
    digest,
    distributed,
    gradients,
    loss_of,
    made_up,
    net,
    plain_sgd,
    refusal,
    same,
    sgd,
    state_of,
    train,
    weights,
    with_closure,
)

pytestmark = pytest.mark.ranks

SOME = ["none", "topk(ratio=0.1)", "powersgd(rank=2)"]
"""Methods: one that sums, one that gathers, and one of several rounds."""
ENGINES = pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])


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
        if how == "one backward":
            (loss_of(model, step) + loss_of(model, step + 1)).backward()
        elif how == "no_sync":
            with optimizer.no_sync():
                loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        else:
            loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        optimizer.step()
    assert method == "plain" or optimizer.traffic.steps == 3
    return weights(model)


def fewer_passes(method):
    """The first step comes before all the passes that were announced."""
    model = net()
    optimizer = wrapped(model, method, backward_passes_per_step=3)
    for passes in (1, 3, 2):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, 10 * passes + i).backward()
        optimizer.step()
    return weights(model)


def frozen_for_a_while(method):
    """The convolution is frozen in every second step."""
    model = net()
    optimizer = wrapped(model, method, lambda p: torch.optim.SGD(p, lr=0.05))
    for step in range(5):
        model.conv.requires_grad_(step % 2 == 0)
        before = model.conv.weight.clone()
        train(model, optimizer, range(step, step + 1))
        assert torch.equal(before, model.conv.weight) == (step % 2 == 1)
    return weights(model)


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
    return [weights(model) for model in models]


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
    return weights(model)


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
    return weights(model)


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
    return weights(model)


def scheduled(method, when="after"):
    """With a learning-rate schedule made before the optimizer is distributed, or after, or with rates set by hand."""
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
    if when == "after":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        if schedule is not None:
            schedule.step()
        elif step % 2:
            optimizer.param_groups[0]["lr"] *= 0.1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1 ** ((step + 1) // 2))
    return weights(model)


LOOPS = [
    *(two_passes, fewer_passes, frozen_for_a_while, in_turns, unused, clipped),
    *(one_rank_idle_after_a_dropped_step, scheduled),
]


def all_loops(method):
    return {loop.__name__: digest(loop(method)) for loop in LOOPS}


def test_without_compression_it_is_horovods_optimizer_to_the_bit(horovod, two_ranks):
    wanted = horovod.run(all_loops, "plain")
    assert wanted[0] == wanted[1]
    assert horovod.run(all_loops, "none") == two_ranks.run(all_loops, "none") == wanted


@pytest.mark.parametrize("method", SOME[1:])
def test_with_compression_it_is_the_same_under_horovod_as_under_torch_distributed(horovod, two_ranks, method):
    first, second = horovod.run(all_loops, method)
    assert first == second
    assert two_ranks.run(all_loops, method) == [first] * 2


@ENGINES
@on_ranks()
def test_passes_may_be_announced_or_held_back(engine):
    methods, hows = (METHODS, ["passes", "no_sync"]) if engine == "gloo" else (SOME, ["passes", "set", "no_sync"])
    found = {method: {digest(two_passes(method, how)) for how in hows} for method in methods}
    assert {method for method, ends in found.items() if len(ends) > 1} == set()
    return found


@pytest.mark.parametrize("how", ["passes", "no_sync"])
@on_ranks(2, 3)
def test_accumulation_adds_gradients_up(how):
    found = two_passes("none", how)
    for name, value in two_passes("none", "one backward").items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    return digest(found)


@pytest.mark.parametrize("compressor", [*SOME, "qsgd"])
@on_ranks(2)
def test_gradients_clipped_after_synchronize_are_what_step_uses(compressor):
    """A plain optimizer that is given the clipped means makes the same steps."""
    model, reference = net(), net()
    optimizer, plain = distributed(model, compressor), sgd(reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        means = gradients(model)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        for name, p in reference.named_parameters():
            p.grad = means[name]
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert optimizer.traffic.steps == 4
    first = same(weights(model), weights(reference)), digest(weights(model))
    assert first[0]
    return first


@on_ranks()
def test_horovods_skip_synchronize_is_understood():
    """Also after it was called too early."""
    ends = []
    for wrong in (True, False):
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
        ends.append(digest(weights(model)))
    assert ends[0] == ends[1]
    return ends


@ENGINES
@on_ranks()
def test_a_schedule_made_before_or_after_wrapping_is_followed(engine):
    """Without a warning."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("none", "topk", "efsignsgd"):
            found[method] = {digest(scheduled(method, when)) for when in ("before", "after", "by hand")}
    assert {len(ends) for ends in found.values()} == {1}
    return found


@ENGINES
@pytest.mark.parametrize("how", ["keyword", "position"])
def test_step_with_a_closure_is_the_same_step_and_gives_the_mean_loss(engine, how):
    own = launched(engine, 2).run(with_closure, "none")
    for losses, bits in launched(engine, 2).run(with_closure, how):
        assert bits == own[0][1]
        np.testing.assert_allclose(losses, (own[0][0] + own[1][0]) / 2, rtol=1e-6)


def zeroed(set_to_none, drop):
    """The weights after a backward, in every second step, whose gradients are dropped before the step, or without."""
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


@on_ranks()
def test_zero_grad_both_ways_and_after_a_backward_without_step():
    ends = {zeroed(set_to_none, drop) for set_to_none in (True, False) for drop in (False, True)}
    assert len(ends) == 1
    return ends


@on_ranks(2, engine="horovodrun-gloo")
def test_zero_grad_is_refused_between_backward_and_step_by_horovod():
    ends = []
    for set_to_none in (True, False):
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
        ends.append(digest(weights(model)))
    assert ends[0] == ends[1]
    return ends


@on_ranks(2)
def test_a_step_without_backward_changes_nothing():
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


@pytest.mark.parametrize("method", SOME[1:])
def test_an_overflow_on_one_rank_skips_the_step_on_all(horovod, two_ranks, method):
    alone, unscaled = horovod.run(scaled, method, False), horovod.run(scaled, method, True)
    assert alone + unscaled == two_ranks.run(scaled, method, False) * 2
    assert alone[0] == alone[1]
    assert alone[0][0] == [1024.0, 1024.0, 512.0, 512.0, 512.0]


@pytest.mark.parametrize("compressor", METHODS)
def test_every_method_trains_in_one_process(local, compressor):
    model = net()
    optimizer = distributed(model, compressor)
    before = loss_of(model, 0).item()
    for _ in range(10):
        train(model, optimizer, range(1))
    assert torch.isfinite(loss_of(model, 0))
    assert loss_of(model, 0).item() < before or compressor == "signsgd"
    assert (optimizer.traffic.sent_bytes, optimizer.traffic.steps) == (0, 10)


def test_none_in_one_process_is_the_plain_optimizer_bit_for_bit(local):
    model, reference = net(), net()
    train(model, distributed(model, "none"), range(5))
    train(reference, sgd(reference.parameters()), range(5))
    assert same(weights(model), weights(reference))


# -- what is refused, whereupon training goes on ----------------------------------------------------------------------


TWICE = ["was computed 2 times before step()", "backward_passes_per_step=2", "optimizer.no_sync()"]
CHANGED = ["was changed after its exchange began", "Call optimizer.synchronize() after backward"]


@pytest.mark.parametrize(
    ("how", "words"), [("twice", TWICE), ("norm", CHANGED), ("value", CHANGED), ("assignment", CHANGED)]
)
@on_ranks()
def test_gradients_that_come_again_or_are_changed_are_refused_with_what_to_write(how, words):
    """Gradients that are computed twice, or changed before the mean is there."""
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    if how == "twice":
        said = refusal(lambda: loss_of(model, 1).backward(), kind=grace.ExchangeError)
    else:
        if how == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif how == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        else:
            model.conv.weight.grad = model.conv.weight.grad * 0.5
        said = refusal(optimizer.step, kind=grace.ExchangeError)
    assert [word for word in words if word not in said] == []
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return digest(weights(model))


@on_ranks()
def test_a_layer_of_two_reentrant_checkpoints_trains_as_its_refusal_says():
    """Each checkpoint adds to the gradients in a backward pass of its own."""

    def backward(layer):
        x = torch.ones(2, 8, requires_grad=True)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
        x.square().mean().backward()

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    reference = copy.deepcopy(layer)
    optimizer, other = distributed(layer, "none", optimizer=plain_sgd), plain_sgd(reference.parameters())
    said = refusal(backward, layer, kind=grace.ExchangeError)
    assert "use_reentrant=False, or run all passes under no_sync()" in said
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(layer)
    optimizer.step()
    backward(reference)
    other.step()
    assert same(weights(layer), weights(reference))


@pytest.mark.parametrize("scaler", [False, True])
@on_ranks(2)
def test_a_gradient_that_waits_for_a_layer_left_out_is_not_to_be_changed_either(scaler):
    """The bucket starts in step(): each rank would clip its own gradient, by its own norm."""
    used, unused = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    model = torch.nn.ModuleList([used, unused])  # of one bucket
    grad_scaler = torch.amp.GradScaler("cpu") if scaler else None
    optimizer = distributed(model, "none", grad_scaler=grad_scaler)
    loss = used(torch.full((1, 8), 1.0 + 9 * grace.rank())).sum()
    if scaler:
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    said = refusal(optimizer.step, kind=grace.ExchangeError)
    assert "'0.weight' was changed before its exchange began (by clipping, unscaling" in said
    optimizer.zero_grad()
    if scaler:
        grad_scaler.update()
    used(torch.ones(1, 8)).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return digest(weights(model))


@on_ranks(2)
def test_a_gradient_whose_elements_share_memory_gets_its_mean():
    """``torch.autograd.grad`` returns such a gradient of a sum."""
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = grace.DistributedOptimizer(sgd([p], lr=1.0), [("p", p)], "topk(ratio=1.0)")
    (p.grad,) = torch.autograd.grad((1.0 + grace.rank()) * p.sum(), p)
    optimizer.step()
    assert p.tolist() == [-1.5] * 4


@ENGINES
@on_ranks(2)
def test_gradients_may_be_views_of_one_buffer(engine):
    """Each backward pass of one of them increases the version of all."""

    def made():
        model = net()
        return model, distributed(model, "topk(ratio=0.1)", bucket_bytes=600)

    model, optimizer = made()
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    views = buffer.split([p.numel() for p in model.parameters()])
    for p, view in zip(model.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()
    reference, plain = made()
    train(reference, plain, range(3))
    assert same(weights(model), weights(reference))
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 3).backward()
    buffer.mul_(0.5)
    assert CHANGED[0] in refusal(optimizer.step, kind=grace.ExchangeError)
    return digest(weights(model))


@on_ranks(2)
def test_hooks_of_two_threads_start_each_bucket_once_and_in_order():
    """Autograd has a thread for each device."""
    layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(8)])
    optimizer = distributed(layers, "topk(ratio=0.5)", bucket_bytes=1)
    failed = []

    def backward(part):
        try:
            sum(layer(torch.ones(1, 64)).sum() for layer in part).backward()
        except Exception as error:
            failed.append(error)

    for _ in range(20):
        optimizer.zero_grad()
        threads = [threading.Thread(target=backward, args=(layers[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
    assert failed == []
    return digest(weights(layers))


@pytest.mark.parametrize("groups", [None, 2])
@on_ranks(2, engine="horovodrun-gloo")
def test_too_many_passes_are_refused_as_horovod_does(groups):
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


@on_ranks(2)
def test_a_default_device_changes_nothing_for_a_model_on_another():
    for spec in SPECS:
        runs = []
        for default in ("cpu", "meta"):
            model = net()
            with torch.device(default):
                optimizer = distributed(model, spec, optimizer=plain_sgd)
            for step in range(2):
                loss = loss_of(model, step)
                with torch.device(default):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            with torch.device(default):
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.close()
            runs.append(weights(model))
        assert same(*runs), spec
