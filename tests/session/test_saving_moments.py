"""When state may be saved and loaded, by whom, and what of the optimizer may be copied."""

import copy
import io
import pickle
import warnings
from functools import partial

import pytest
import torch

import grace
from grace.core.backend import Handle, LocalBackend
from tests.support.checkpoints import SHAPES, made
from tests.support.pools import on_ranks
from tests.support.training import copied, ddp, digest, made_up, state_of, train_given, weights

pytestmark = pytest.mark.ranks


@on_ranks()
def test_nothing_is_saved_or_loaded_between_backward_and_step():
    """One rank lacks a gradient."""
    answers = []
    for compressor in ("topk(ratio=0.1)", "powersgd"):
        model, optimizer = made(compressor)
        train_given(model, optimizer, range(2))
        saved = copied(optimizer.full_state_dict())
        before = digest(optimizer.full_state_dict()["grace"]["ranks"])
        optimizer.zero_grad()
        given = made_up(SHAPES, 2, grace.rank())
        if grace.rank() == 1:
            del given["v"]  # so that this rank has begun less than the other, or nothing
        model.backward(given)
        calls = (optimizer.state_dict, optimizer.full_state_dict, partial(optimizer.load_state_dict, saved))
        for call in calls:
            with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\), or drop .* optimizer.zero_grad"):
                call()
        optimizer.zero_grad()
        dropped = optimizer.full_state_dict()["grace"]
        assert digest(dropped["ranks"]) == before
        assert dropped["step"] == saved["grace"]["step"]  # a dropped step does not count
        model.backward(made_up(SHAPES, 2, grace.rank()))
        optimizer.synchronize()
        for call in calls:  # the step is counted, and memories do not have its residuals
            with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\), or drop .* optimizer.zero_grad"):
                call()
        optimizer.step()
        answers.append(digest(weights(model)))
    return answers


@on_ranks(2)
def test_a_step_that_a_scaler_skipped_is_saved():
    """One rank overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = made(grad_scaler=scaler)
    saves = []
    for factor in (1.0, float("inf") if grace.rank() else 1.0):
        optimizer.zero_grad()
        gradients = made_up(SHAPES, 0, grace.rank())
        scaler.scale(model({name: factor * g for name, g in gradients.items()})).backward()
        scaler.step(optimizer)
        scaler.update()
        saves.append(optimizer.full_state_dict()["grace"])
    assert [saved["step"] for saved in saves] == [1, 2]
    assert digest(saves[0]["ranks"]) == digest(saves[1]["ranks"])


@on_ranks(2, engine="horovodrun-gloo")
def test_horovods_optimizer_says_the_same_and_an_elastic_run_goes_back():
    """The run goes back to what it committed, whoever it was then."""
    from grace.torch.elastic import OptimizerState

    model, optimizer = made()
    train_given(model, optimizer, range(2))
    optimizer.zero_grad()
    model.backward(made_up(SHAPES, 2, grace.rank()))
    for call in (optimizer.state_dict, optimizer.full_state_dict):
        with pytest.raises(grace.ExchangeError, match=r"optimizer.synchronize\(\) and optimizer.zero_grad\(\)"):
            call()
    optimizer.step()
    handler, kept = OptimizerState(optimizer), digest(state_of(optimizer))
    handler.saved["grace"].update(rank=5, size=7)
    train_given(model, optimizer, range(3, 5))
    handler.restore()
    assert (digest(state_of(optimizer)) == kept, optimizer._grace.context.step) == (True, 3)


@on_ranks(2, engine="horovodrun-gloo")
def test_an_elastic_run_commits_all_parts_or_none():
    """A step's means are in the gradients, and not yet in the parameters."""
    from grace.torch.elastic import TorchState

    model, optimizer = made()
    train_given(model, optimizer, range(2))
    state = TorchState(model=model, optimizer=optimizer, epoch=0)
    committed = digest(weights(model)), digest(state_of(optimizer))
    optimizer.zero_grad()
    model.backward(made_up(SHAPES, 2, grace.rank()))
    optimizer.synchronize()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    state.epoch = 1
    with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\), or drop"):
        state.save()
    state.restore()
    assert (digest(weights(model)), digest(state_of(optimizer)), state.epoch) == (*committed, 0)
    train_given(model, optimizer, range(2, 3))
    state.save()
    train_given(model, optimizer, range(3, 4))
    state.restore()
    assert optimizer._grace.context.step == 3


@on_ranks(2)
def test_nor_under_ddp_whose_hook_knows_the_optimizer():
    model = torch.nn.Linear(8, 8)
    wrapped = ddp(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = grace.torch.register_ddp_hook(wrapped, "topk(ratio=0.1)", optimizer=sgd)
    for step in range(2):
        sgd.zero_grad()
        wrapped(torch.full((2, 8), 1.0 + grace.rank() + step)).square().sum().backward()
        with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\)"):
            hook.state_dict()
        sgd.step()
        saved = hook.state_dict()
    wrapped(torch.ones(2, 8)).sum().backward()
    with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\)"):
        hook.load_state_dict(saved)
    sgd.zero_grad()
    hook.load_state_dict(hook.full_state_dict(packed=True))
    hook.load_state_dict(saved)
    other = grace.torch.register_ddp_hook(ddp(torch.nn.Linear(8, 8)), "onebit")
    with pytest.raises(grace.ConfigError, match="memory='keep'"):
        other.load_state_dict(saved)
    other.load_state_dict(saved, memory="keep")
    assert digest(other.state_dict()["state"]["memory"]) == digest(saved["state"]["memory"])


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, saved_and_loaded], ids=lambda way: way.__name__)
def test_the_copy_of_a_distributed_optimizer_steps_once_it_is_distributed(local, way):
    model, optimizer = made()
    train_given(model, optimizer, range(1))
    found = way(optimizer)
    plain = optimizer.state_dict()
    del plain["grace"]
    assert type(found) is torch.optim.SGD
    assert digest(found.state_dict()) == digest(plain)
    with pytest.raises(grace.ConfigError, match=r"copy of a distributed optimizer.*grace.DistributedOptimizer"):
        found.step()
    train_given(model, optimizer, range(1, 2))  # which was not harmed
    optimizer.close()
    with pytest.raises(grace.ConfigError, match="unknown compressor"):
        grace.DistributedOptimizer(found, compressor="typo")
    with pytest.raises(grace.ConfigError, match="copy of a distributed optimizer"):
        found.step()
    again = grace.DistributedOptimizer(found, compressor="topk(ratio=0.1)")
    again.param_groups[0]["params"][0].sum().backward()
    again.step()
    assert again.traffic.steps == 1


def test_schedulers_and_parts_are_copied_too(local):
    _, optimizer = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.save(schedule.state_dict(), io.BytesIO())
    assert type(copy.deepcopy({"schedule": schedule})["schedule"].optimizer) is torch.optim.SGD
    parts = optimizer._grace.runner.buckets[0].communicator
    alike = pickle.loads(pickle.dumps(copy.deepcopy(parts)))
    assert alike.describe() == parts.describe()


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@on_ranks()
def test_rank_0_is_told_once_that_its_state_is_its_own():
    for compressor in ("topk(ratio=0.1)", "fp16"):
        model, optimizer = made(compressor)
        train_given(model, optimizer, range(1))
        full, once, twice = (warned(call) for call in (optimizer.full_state_dict, *[optimizer.state_dict] * 2))
        assert (full, twice) == ([], [])
        told = compressor.startswith("topk") and grace.rank() == 0
        assert ["full_state_dict()" in said for said in once] == [True] * told


class Failing(LocalBackend):
    """One process, whose engine fails when a collective starts, or when it is awaited."""

    fails = ""

    def allgather(self, tensor):
        if self.fails == "start":
            raise RuntimeError("the network is gone")
        return Handle(self.waited, [tensor])

    def waited(self):
        if self.fails == "wait":
            raise RuntimeError("the network is gone")


@pytest.mark.parametrize("when", ["start", "wait"])
def test_the_last_good_state_is_saved_after_the_engine_failed(when):
    backend = grace.init(Failing())
    model, optimizer = made("topk(ratio=0.1)")
    train_given(model, optimizer, range(2))
    good = digest(optimizer.state_dict())
    backend.fails = when
    with pytest.raises(grace.ExchangeError, match="the network is gone"):
        train_given(model, optimizer, range(2, 3))
    assert digest(optimizer.state_dict()) == good
    grace.shutdown()
