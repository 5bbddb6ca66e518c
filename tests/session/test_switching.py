"""Another strategy in the middle of training: memories go along, nothing is lost, and all ranks switch or none."""

import numpy as np
import pytest
import torch

import grace
from grace.strategy import ShardPlan, Sync
from tests.support.pools import launched, on_ranks
from tests.support.strategies import cut, strategy_of
from tests.support.training import Given, copied, digest, made_up, refusal, train_given, weights

pytestmark = pytest.mark.ranks

SHAPES = {"w": (12, 8), "v": (40, 6), "b": (5,)}
PLAIN, TOPK = "uniform", "uniform(compressor=topk(ratio=0.1))"
POWERSGD = "uniform(compressor=powersgd(rank=1))"
EFSIGNSGD = "uniform(compressor=efsignsgd)"


def made(strategy, momentum=0.0, **options):
    model = Given(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    return model, grace.DistributedOptimizer(optimizer, model, strategy=strategy, **options)


def switching(*strategies, momentum=0.0):
    """Weights after two steps of each strategy, and one more of the last."""
    model, optimizer = made(strategies[0], momentum)
    train_given(model, optimizer, range(2))
    for i, strategy in enumerate(strategies[1:], 1):
        optimizer.use_strategy(strategy)
        train_given(model, optimizer, range(2 * i, 2 * i + 2))
    assert optimizer.traffic.steps == 2 * len(strategies)
    return {name: w.numpy() for name, w in weights(model).items()}


def on_the_mean(count, size):
    return {
        name: -sum(made_up(SHAPES, step, rank)[name] for step in range(count) for rank in range(size)) / size
        for name in SHAPES
    }


def parts(compressor="topk(ratio=0.1)"):
    """One variable in three parts, each summed up by another method."""
    gathered = ShardPlan(Sync("allgather", group=0), compressor, "residual")
    dense = ShardPlan(Sync("allreduce", group=1), "none", "none")
    plans = [cut(name, SHAPES[name], [gathered, dense, gathered], 0, [SHAPES[name][0] - 2, 1, 1]) for name in SHAPES]
    return strategy_of(*plans).to_dict()


@pytest.mark.parametrize("between", [[TOPK], [TOPK, POWERSGD], [EFSIGNSGD], [POWERSGD, TOPK, EFSIGNSGD]], ids=str)
def test_nothing_is_lost_on_the_way_back_to_plain_sums(two_ranks, between):
    for got in two_ranks.run(switching, PLAIN, *between, PLAIN):
        wanted = on_the_mean(2 * (len(between) + 2), 2)
        for name in SHAPES:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-4)


@on_ranks(3)
def test_nothing_is_lost_where_variables_are_cut_anew():
    got = switching(TOPK, parts(), TOPK, PLAIN)
    for name, wanted in on_the_mean(8, 3).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-4)


def test_a_switch_to_the_same_changes_no_bit(two_ranks):
    again = two_ranks.run(switching_with_momentum, TOPK, TOPK, TOPK)
    once = two_ranks.run(unswitched, TOPK)
    assert [digest(one) for one in again] == [digest(one) for one in once]


def switching_with_momentum(*strategies):
    return switching(*strategies, momentum=0.9)


def unswitched(strategy):
    model, optimizer = made(strategy, momentum=0.9)
    train_given(model, optimizer, range(6))
    return {name: w.numpy() for name, w in weights(model).items()}


def refusing(strategies, before_step=False):
    """What is said, and weights after training goes on."""
    model, optimizer = made(TOPK, momentum=0.9)
    train_given(model, optimizer, range(3))
    if before_step:
        model.backward(made_up(SHAPES, 9, grace.rank()))
    said = refusal(optimizer.use_strategy, strategies[grace.rank()], kind=grace.GraceError)
    train_given(model, optimizer, range(3, 6))
    return said, {name: w.numpy() for name, w in weights(model).items()}


def foreign():
    return strategy_of(cut("other", (4,), [ShardPlan(Sync("allreduce", group=0))] * 2, 0, [2, 2]), size=2).to_dict()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [("uniform(compressor=tokp)", "did you mean 'topk'"), (foreign(), "other")],
    ids=["name", "model"],
)
def test_what_is_refused_changes_nothing(two_ranks, strategy, said):
    once = two_ranks.run(unswitched, TOPK)
    for (why, got), wanted in zip(two_ranks.run(refusing, [strategy] * 2), once, strict=True):
        assert said in why
        assert digest(got) == digest(wanted)


def test_no_switch_in_the_middle_of_a_step(two_ranks):
    for why, _ in two_ranks.run(refusing, [PLAIN] * 2, True):
        assert why.startswith("the exchange of a step is under way")


@on_ranks()
def test_a_checkpoint_after_a_switch():
    """A run that was saved after a switch and went on ends as one that loaded that."""
    one, optimizer = made(TOPK, momentum=0.9)
    train_given(one, optimizer, range(2))
    optimizer.use_strategy(POWERSGD)
    train_given(one, optimizer, range(2, 4))
    saved = copied({"model": one.state_dict(), "optimizer": optimizer.full_state_dict()})
    two, other = made(POWERSGD, momentum=0.9)
    two.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train_given(one, optimizer, range(4, 6))
    train_given(two, other, range(4, 6))
    assert digest(weights(one)) == digest(weights(two))


@on_ranks(2)
def test_residuals_are_given_back_in_units_of_the_loss_scale():
    """With a loss scale of 8, and back to plain sums: the residual is in its units."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    model, optimizer = made(TOPK, grad_scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(made_up(SHAPES, step, grace.rank()))).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            optimizer.use_strategy(PLAIN)
    got = {name: w.numpy() for name, w in weights(model).items()}
    for name, wanted in on_the_mean(8, 2).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("thrown_away", ["overflow", "zero_grad"])
@on_ranks(2)
def test_residuals_are_given_back_by_the_first_step_that_is_used(thrown_away):
    """Right after the switch one rank overflows, or all clear the means of synchronize()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    model, optimizer = made(TOPK, grad_scaler=scaler)

    def backward(step, factor=1.0):
        optimizer.zero_grad()
        gradients = made_up(SHAPES, step, grace.rank())
        scaler.scale(model({name: factor * g for name, g in gradients.items()})).backward()

    for step in range(6):
        backward(step)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            continue
        optimizer.use_strategy(PLAIN)
        if thrown_away == "overflow":
            backward(9, factor=np.inf if grace.rank() else 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            backward(9)
            optimizer.synchronize()
    for name, wanted in on_the_mean(6, 2).items():
        np.testing.assert_allclose(weights(model)[name].numpy(), wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_a_residual_is_given_back_once_where_nothing_skips_a_step_that_overflowed():
    model, optimizer = made(TOPK)
    train_given(model, optimizer, range(2))
    optimizer.use_strategy(PLAIN)
    before = weights(model)["w"]
    optimizer.zero_grad()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    model.backward({**zeros, "b": np.full(SHAPES["b"], np.inf, np.float32)})
    optimizer.step()
    assert torch.equal(weights(model)["w"], before)
    train_given(model, optimizer, range(2, 4))
    np.testing.assert_allclose(weights(model)["w"].numpy(), on_the_mean(4, 2)["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi"])
def test_on_other_engines(engine):
    for got in launched(engine, 2).run(switching, PLAIN, TOPK, PLAIN):
        for name, wanted in on_the_mean(6, 2).items():
            np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-4)
