"""Distributed optimizers end: by ``close()``, or when they are deleted; and what is said while they live."""

import abc
import contextlib
import gc
import threading
import weakref

import pytest
import torch

import grace
from grace.torch import Allgather
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.training import ddp, digest, distributed, loss_of, net, refusal, sgd, state_of, train, weights

ENGINES = ["gloo", "horovodrun-gloo", "mpirun-mpi"]


class Abstract(abc.ABC, torch.optim.SGD):
    """Optimizer whose first base has no attributes, so that Python lays its objects out otherwise."""


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_a_deleted_optimizer_leaves_nothing_behind(engine):
    """Optimizers of one model, one after the other, each deleted in another moment of its steps."""
    first, model, reference = net(), net(), net()
    # what torch imports for the first optimizer of a process holds it; Numba's compiling holds its callers' frames
    train(first, distributed(first, "topk(ratio=0.1)", optimizer=plain, group_bytes=2000), range(1))
    gc.collect()
    gc.disable()  # counting references is to be enough
    try:
        for moment in ("after a step", "after backward", "after zero_grad"):
            optimizer = distributed(model, "topk(ratio=0.1)", optimizer=plain, group_bytes=2000)
            train(model, optimizer, range(2))
            if moment == "after backward":
                loss_of(model, 5).backward()
            elif moment == "after zero_grad":
                optimizer.zero_grad()
            gone = [weakref.ref(optimizer), weakref.ref(optimizer._grace), weakref.ref(optimizer._grace.runner)]
            del optimizer
            assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()
    before = grace.init().sent_bytes
    loss_of(model, 0).backward()  # with no hooks
    assert grace.init().sent_bytes == before
    for _ in range(3):
        once = distributed(reference, "topk(ratio=0.1)", optimizer=plain, group_bytes=2000)
        train(reference, once, range(2))
        once.close()
    assert digest(weights(model)) == digest(weights(reference))
    return digest(weights(model))


@on_ranks()
def test_a_closed_optimizer_with_delayed_means_leaves_nothing_behind():
    """Not even if its last means are under way when it is closed."""
    model, others = net(), threading.enumerate()
    optimizer = distributed(model, "topk(ratio=0.1)", communicator="reduce_broadcast(staleness=1)", optimizer=plain)
    train(model, optimizer, range(3))
    runner = optimizer._grace.runner
    gone = [weakref.ref(runner), weakref.ref(runner.communicators[0].memory)]
    (thread,) = [one for one in threading.enumerate() if one.name == "grace exchanges" and one not in others]
    optimizer.close()
    del optimizer, runner
    thread.join(HANGS)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("passes", [1, 2])
@on_ranks()
def test_a_closed_optimizer_is_plain_and_may_be_distributed_anew(engine, passes):
    """Training, closed in the middle of an exchange, a plain step, and training by another method."""
    model = net()
    given = Allgather("topk(ratio=0.1)")
    optimizer = Abstract(model.parameters(), lr=0.05, momentum=0.9)
    before = set(vars(optimizer))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    grace.DistributedOptimizer(
        optimizer, model.named_parameters(), communicator=given, backward_passes_per_step=passes, group_bytes=2000
    )
    for _ in range(passes):
        loss_of(model, 0).backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.close()
    assert type(optimizer) is Abstract
    assert set(vars(optimizer)) - before == {"step", "_opt_called"}  # the schedule's
    assert "grace" not in optimizer.state_dict()
    assert optimizer.state_dict()["state"]
    sent = grace.init().sent_bytes
    model.zero_grad()
    loss_of(model, 1, rank=0).backward()
    optimizer.step()
    assert grace.init().sent_bytes == sent
    again = grace.DistributedOptimizer(optimizer, model.named_parameters(), communicator=given)
    assert again is optimizer
    assert not state_of(again).get("memory")
    train(model, again, range(2, 4))
    assert again.traffic.steps == 2
    again.close()
    train(model, distributed(model, "qsgd"), range(2))
    return digest(weights(model)), digest(optimizer.state_dict())


def test_an_optimizer_that_a_notebooks_last_error_holds_is_refused_with_what_to_do(monkeypatch):
    def cell():
        optimizer = distributed(model, "topk")
        raise ValueError(f"a mistake beside {optimizer}")

    model = net()
    try:
        cell()
    except ValueError as error:
        monkeypatch.setattr("sys.last_value", error, raising=False)
    said = refusal(distributed, model, "topk", kind=grace.ConfigError)
    assert said.endswith("what holds it (a scheduler; this session's last error, too: then make the model anew)")
    model = net()
    train(model, distributed(model, "topk"), range(2))


@pytest.mark.parametrize("everywhere", [True, False])
@on_ranks()
def test_two_optimizers_of_one_parameter_are_refused_by_name_on_all_ranks(everywhere):
    """Then both train one after the other."""
    model = net()
    first = distributed(model, "none") if everywhere or grace.rank() else None
    if not everywhere:  # rank 0 takes part in rank 1's start with another model
        first = first or distributed(net(), "none")
    kind = grace.ConfigError if everywhere or grace.rank() else grace.RankError
    said = refusal(distributed, model, "topk", kind=kind)
    assert "'scale' is exchanged by another distributed optimizer already. Call close() of" in said
    first.close()
    second = distributed(model, "topk")
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)  # a cycle with the optimizer
    train(model, second, range(2))
    del second, schedule
    train(model, distributed(model, "topk"), range(2))
    return digest(weights(model))


@on_ranks(2)
def test_shutdown_with_optimizers_that_live():
    """The run ends while optimizers live; they are deleted, or closed, afterwards."""
    models = [net(), net()]
    optimizers = [distributed(model, "topk") for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    grace.shutdown()
    grace.init("torch")
    optimizers.pop().close()
    del optimizer
    optimizers.clear()
    for model in models:
        train(model, distributed(model, "topk"), range(2))
    return digest([weights(model) for model in models])


@pytest.mark.parametrize("passes", [1, 2])
@on_ranks()
def test_a_gradient_computed_again_after_the_model_cleared_it(passes):
    ends = []
    for how in ("not at all", "to none", "to zeros"):
        model = net()
        optimizer = distributed(model, "none", backward_passes_per_step=passes)
        if how != "not at all":
            loss_of(model, 0).backward()
            model.zero_grad(set_to_none=how == "to none")
        for _ in range(passes if how == "not at all" else passes - 1):
            loss_of(model, 1).backward()
        message = refusal(lambda model=model: loss_of(model, 2).backward(), kind=grace.ExchangeError)
        optimizer.zero_grad()
        train(model, optimizer, range(1))
        assert f"was computed {passes + 1} times before step()" in message
        assert ("Call optimizer.zero_grad() instead" in message) == (how != "not at all")
        assert ("backward_passes_per_step=" in message) == (how == "not at all")
        ends.append(digest(weights(model)))
    return ends


@on_ranks(2)
def test_the_state_of_a_ddp_hook_is_closed():
    model, given = net(), Allgather("topk(ratio=0.1)")
    wrapped = ddp(model)
    state = grace.torch.register_ddp_hook(wrapped, communicator=given)
    train(wrapped, sgd(model.parameters()), range(2))
    state.close()
    with pytest.raises(grace.ExchangeError, match=r"was closed.*make a new DistributedDataParallel"):
        loss_of(wrapped, 2).backward()
    model = net()  # the other one's hooks are still there
    wrapped = ddp(model)
    grace.torch.register_ddp_hook(wrapped, communicator=given)
    train(wrapped, sgd(model.parameters()), range(2))
    return digest(weights(model))


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
@on_ranks()
def test_a_pass_after_synchronize_is_exchanged_in_no_sync_too(engine):
    """A pass between synchronize() and step(), on each rank's data, belongs to the step as well."""
    ends = set()
    for paused in (True, False):
        model = net()
        optimizer = distributed(model, "none")
        for step in (0, 2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            with optimizer.no_sync() if paused else contextlib.nullcontext():
                loss_of(model, step + 1).backward()
            optimizer.step()
        ends.add(digest(weights(model)))
    assert len(ends) == 1
    return ends


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
@on_ranks()
def test_a_step_is_over_whose_means_could_not_be_written(engine):
    model = net()
    optimizer = distributed(model, "topk", op="sum")

    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError

    optimizer._grace._write = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, range(1))
    del optimizer._grace._write
    assert not optimizer._grace.in_progress
    assert optimizer.full_state_dict()["grace"]["step"] == 1
    train(model, optimizer, range(2))
    assert optimizer._grace.context.step == 3
    return digest(weights(model))
