"""Horovod's own functions in scripts written for it: each works with Grace's optimizers, or says what does."""

import copy
import time
import warnings

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import copied, digest, distributed, loss_of, net, refusal, state_of, train, weights

# -- broadcasts -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
}


def broadcast_state(kind, restored):
    """Rank 0, or nobody, has restored an optimizer; then all get rank 0's state as Horovod's scripts do it."""
    import horovod.torch as hvd

    model = net()
    frozen = next(model.parameters()).requires_grad_(False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if restored and grace.rank() == 0:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.02
    optimizer.param_groups[0]["lr"], lr = 0.05, optimizer.param_groups[0]["lr"]
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)")
    optimizer.param_groups[0]["lr"] = lr
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    before = weights(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert digest(before) == digest(weights(model))
    assert frozen.grad is None
    had = restored and grace.rank() == 0
    assert all(p.grad is None if had else not p.grad.any() for p in model.parameters() if p.requires_grad)
    assert len(optimizer.state) == (len(list(model.parameters())) - 1 if restored else 0)
    sent = digest([copy.deepcopy(optimizer.state_dict()[key]) for key in ("state", "param_groups")])
    train(model, optimizer, range(2))
    return sent, digest(weights(model)), bool(state_of(optimizer)["memory"])


@on_ranks(2, engine="horovodrun-gloo")
def test_horovods_broadcast_of_the_state_gives_all_ranks_the_roots_and_makes_no_step():
    found = [broadcast_state(kind, restored) for kind in OPTIMIZERS for restored in (False, True)]
    assert all(remembers for *_, remembers in found)
    return found


def resumed(how):
    """Train, save, and go on in another optimizer as Horovod's scripts do it; what came of it."""
    import horovod.torch as hvd

    def new():
        model = net()
        return model, grace.DistributedOptimizer(
            OPTIMIZERS["SGD"](model.parameters()), model.named_parameters(), "randomk(ratio=0.2)", memory="none"
        )

    saves = []
    for steps in (range(2), range(2, 4)):  # two runs, as far as each other
        model, optimizer = new()
        train(model, optimizer, steps)
        saves.append(copy.deepcopy((model.state_dict(), optimizer.full_state_dict())))
        optimizer.close()
    model, optimizer = new()
    if how == "uninterrupted":
        train(model, optimizer, range(2))
    elif how == "different" or grace.rank() == 0:
        weights_then, optimizer_then = saves[grace.rank()]
        model.load_state_dict(weights_then)
        optimizer.load_state_dict(optimizer_then)
    if how == "rank 0 for all":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    try:
        train(model, optimizer, range(2, 5))
    except grace.errors.StepError as error:
        return str(error)
    return digest([weights(model), optimizer.state_dict()["state"]])


@on_ranks(2, engine="horovodrun-gloo")
def test_rank_0_restores_for_all_and_other_states_are_told_at_the_next_step():
    whole = resumed("uninterrupted")
    assert resumed("rank 0 for all") == whole
    assert "rank 1 is at step 0, rank 0 is at step 2" in resumed("forgotten")
    assert "the first difference: rank 0 has gone on from what is called" in resumed("different")
    return whole


@on_ranks(2, engine="horovodrun-gloo")
def test_rank_0s_settings_are_everyones_once_they_are_broadcast():
    """Until then the ranks have settings of their own."""
    import horovod.torch as hvd

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + grace.rank()), momentum=0.9)
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)")
    before = digest(weights(model))
    said = refusal(train, model, optimizer, range(1), kind=grace.errors.StepError)
    group = "optimizer SGD, param group 0, lr"
    assert f"rank 0 has {group} 0.05, rank 1 has {group} 0.1" in said
    assert digest(weights(model)) == before
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["lr"] == 0.05
    return digest(weights(model))


@on_ranks(2, engine="horovodrun-gloo")
def test_horovods_broadcast_of_parameters_takes_every_dtype_and_layout():
    """Tensors that Horovod's own broadcast does not take."""
    import horovod.torch as hvd

    distributed(net(), "none")
    torch.manual_seed(grace.rank())
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    half = torch.nn.Linear(3, 2).bfloat16()
    mask = torch.tensor([True, False]) if grace.rank() == 0 else torch.zeros(2, dtype=torch.bool)
    hvd.broadcast_parameters(conv.state_dict(), 0)
    hvd.broadcast_parameters(list(half.parameters()), root_rank=0)
    hvd.broadcast_parameters({"mask": mask, "version": 3}, 0)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    return digest([weights(conv), weights(half), mask])


# -- operations without a name ----------------------------------------------------------------------------------------


@on_ranks(2, engine="horovodrun-gloo")
def test_operations_without_a_name_find_each_other_beside_exchanges():
    """The script sums, gathers and broadcasts without names while exchanges run beside training, and before ``step()``
    while a rank that leaves a layer out has begun fewer exchanges."""
    import horovod.torch as hvd

    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", communicator="reduce_broadcast(staleness=2)")
    for step in range(20):
        optimizer.zero_grad()
        model.conv.requires_grad_(step % 3 != grace.rank())
        loss_of(model, step).backward()
        mine = torch.tensor([float(grace.rank() + step)])
        assert hvd.allreduce(mine).item() == step + 0.5
        optimizer.step()
        time.sleep(0.002 * (step % 3) * grace.rank())
        assert hvd.grouped_allreduce([mine])[0].item() == step + 0.5
        assert hvd.allgather(mine).tolist() == [step, step + 1]
        assert hvd.broadcast(mine, 1).item() == step + 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.state_dict()
    assert [w.filename for w in told] == [__file__] * (grace.rank() == 0)
    optimizer.full_state_dict()  # waits for what is on its way
    return digest(weights(model))


# -- elastic mode -----------------------------------------------------------------------------------------------------


@on_ranks(2, engine="horovodrun-gloo")
def test_horovods_elastic_state_keeps_memories():
    """Horovod's state of a Grace optimizer keeps memories and counters, and goes back to them."""
    import horovod.torch as hvd

    assert grace.torch.elastic.TorchState is hvd.elastic.TorchState
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    train(model, optimizer, range(2))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=2)
    committed = digest(state_of(optimizer))
    train(model, optimizer, range(2, 4))
    assert digest(state_of(optimizer)) != committed
    state.restore()
    assert digest(state_of(optimizer)) == committed
    assert optimizer._grace.context.step == 2
    return digest(weights(model))


def with_buffers():
    """A model with statistics, made distributed in outer rounds of four iterations over Adam."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, grace.DistributedOptimizer(inner, model, "topk(ratio=0.1)", outer="nesterov", period=4)


@on_ranks(2, engine="horovodrun-gloo")
def test_an_elastic_run_of_outer_rounds_goes_back_to_a_commit_within_a_period_bit_for_bit():
    """The run fails in the next period. The model's handler, before or after the optimizer's, gives all ranks rank 0's
    parameters."""
    import horovod.torch as hvd

    ends = []
    for failing, name in ((False, "optimizer"), (True, "optimizer"), (True, "before")):
        torch.manual_seed(0)
        model, optimizer = with_buffers()
        state = hvd.elastic.TorchState(model=model, **{name: optimizer})
        state.sync()
        train(model, optimizer, range(6))
        if failing:
            state.save()
            train(model, optimizer, range(20, 23))
            state.restore()
            state.sync()
            state.restore()
        train(model, optimizer, range(6, 10))
        ends.append(digest([dict(model.state_dict()), state_of(optimizer), optimizer.state_dict()["state"]]))
    assert len(set(ends)) == 1


@on_ranks(2, engine="horovodrun-gloo")
def test_ranks_that_train_alone_take_the_roots_place_in_the_period():
    """Rank 0 alone loads a state of the middle of a period, and Horovod's functions broadcast it."""
    import horovod.torch as hvd

    model, optimizer = with_buffers()
    train(model, optimizer, range(6))
    saved = copied({"model": model.state_dict(), "optimizer": optimizer.full_state_dict()})
    resumed_model, resumed = with_buffers()
    if grace.rank() == 0:
        resumed_model.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(resumed_model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(resumed, root_rank=0)
    train(resumed_model, resumed, range(6, 9))
    return digest(dict(resumed._grace.runner.outer_rounds.anchors.state))


@pytest.mark.parametrize("where", ["on one rank", "everywhere"])
@on_ranks(2, engine="horovodrun-gloo")
def test_a_shared_momentum_that_is_damaged_on_one_rank_is_told_in_the_next_round(where):
    model, optimizer = with_buffers()
    train(model, optimizer, range(6))
    saved = copied(optimizer.full_state_dict())
    if where == "everywhere" or grace.rank() == 1:
        saved["grace"]["state"]["outer"]["2.weight"] += 1
    optimizer.close()
    model, optimizer = with_buffers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(saved, memory="keep")
    if where == "everywhere":
        train(model, optimizer, range(6, 9))
        return digest(dict(optimizer._grace.runner.outer_rounds.anchors.state))
    message = refusal(train, model, optimizer, range(6, 9), kind=grace.errors.StepError)
    assert "has gone on from what is called" in message


@on_ranks(2, engine="horovodrun-gloo")
def test_ranks_that_train_alone_may_throw_gradients_away_and_accumulate():
    """Horovod refuses both while it exchanges gradients."""
    ends = []
    for passes in (1, 2):
        model = net()
        optimizer = distributed(model, "topk(ratio=0.1)", outer="nesterov", period=2)
        for step in range(5):
            if passes == 2:
                loss_of(model, 100 + step).backward()
                optimizer.state_dict()
            optimizer.zero_grad()
            for _ in range(passes):
                (loss_of(model, step) / passes).backward()
            optimizer.step()
        optimizer.flush()
        ends.append(digest(weights(model)))
        optimizer.close()
    assert len(set(ends)) == 1
    return ends


@on_ranks(2, engine="horovodrun-gloo")
def test_a_rank_that_trains_alone_skips_a_step_under_a_scaler_and_counts_it():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", outer="nesterov", period=2, grad_scaler=scaler)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 2 and grace.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (1.0 if grace.rank() else 2.0)
    return digest(weights(model))


@on_ranks(2, engine="horovodrun-gloo")
def test_sums_follow_the_number_of_ranks():
    optimizer = distributed(net(), "topk(ratio=0.1)", op="sum")
    session = optimizer._grace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.runner.backend, "rejoin", lambda: None)
        patch.setattr(session.runner.backend, "size", 3)
        session.rejoin()
    assert set(session.factors.values()) == {3.0}
    assert {c.world_size for c in session.runner.communicators} == {3}
    assert session.context.size == session.runner.outer_rounds.context.size == 3


# -- what was Horovod's -----------------------------------------------------------------------------------------------


@on_ranks(2, engine="horovodrun-gloo")
def test_what_a_script_left_in_of_horovod_is_refused_by_name():
    """The plain optimizer then works."""
    import horovod.torch as hvd

    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = hvd.DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    said = refusal(grace.DistributedOptimizer, theirs)
    assert "is Horovod's DistributedOptimizer already: leave that out" in said
    by_keyword = refusal(distributed, model, "fp16", compression=hvd.Compression.fp16)
    assert "Grace's is compressor=" in by_keyword
    assert refusal(grace.DistributedOptimizer, plain, model.named_parameters(), hvd.Compression.none) == by_keyword
    optimizer = distributed(model, "topk")
    assert "leave out hvd.DistributedOptimizer" in refusal(hvd.DistributedOptimizer, optimizer)
    assert refusal(grace.DistributedOptimizer, optimizer) == "this optimizer is distributed already"
    train(model, optimizer, range(2))
