"""Outer rounds: what they compute, on real ranks, against the formulas and torch's own optimizers."""

import contextlib
import io
import json
import threading
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import grace
from grace.core.compressor import Compressor
from grace.core.outer import Outer, OuterOptimizer
from grace.core.registry import known, legal_memories, make
from grace.errors import ExchangeError, PayloadError, StepError
from grace.kernels import kernels_of
from grace.strategy import ShardPlan, Sync
from tests.support.pools import on_ranks, ranks_of
from tests.support.strategies import Tables, executed, sent_by_rank, strategy_of, whole
from tests.support.training import Given, batch, copied, digest, loss_of, made_up, net, refusal, train, weights

pytestmark = pytest.mark.ranks

SHAPES = {"matrix": (13, 6), "vector": (7,), "scalar": ()}


class Doubling(Compressor):
    """A user's method, of whose payloads Grace knows no sizes beforehand."""

    def compress(self, tensor, name):
        return [2 * tensor.flatten()], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        return payload[0].reshape(ctx) / 2


def sgd(parameters, lr=0.05, momentum=0.0):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def distributed(model, compressor=None, inner=sgd, **choices):
    return grace.DistributedOptimizer(inner(model.parameters()), model, compressor, **choices)


def anchors(optimizer):
    """Copies of the anchors, and of the outer optimizer's momenta."""
    rounds = optimizer._grace.runner.outer_rounds
    momenta = {f"{name} v": v for one in rounds.optimizers for name, v in one.state.items()}
    return {name: value.clone() for name, value in {**dict(rounds.anchors.state), **momenta}.items()}


def run_given(optimizer, model, steps, apart=True):
    """Iterations on gradients that differ by rank."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for step in steps:
        optimizer.zero_grad()
        model.backward(made_up(shapes, step, grace.rank() if apart else 0))
        optimizer.step()


# -- what a round computes ---------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_rounds_after_every_step_of_plain_sgd_are_data_parallel_training():
    plain, local = net(), net()
    train(plain, distributed(plain), range(4))
    train(local, distributed(local, outer="none", period=1), range(4))
    for name, wanted in weights(plain).items():
        torch.testing.assert_close(weights(local)[name], wanted, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_averaging_is_an_outer_step_of_rate_1():
    ends = []
    for period in (1, 3):
        found = []
        for choices in ({"outer": "none", "period": period}, {"outer": "sgd(lr=1.0)", "period": period}, {}):
            model = Given(SHAPES)
            if not choices:
                part = ShardPlan(Sync("none", period=period))
                choices = {"strategy": strategy_of(*(whole(name, shape, part) for name, shape in SHAPES.items()))}
            run_given(distributed(model, **choices), model, range(5))
            found.append(digest(weights(model)))
        assert len(set(found)) == 1
        ends.append(found[0] if period == 1 else "ranks are apart after five steps of periods of three")
    return ends


@on_ranks(2)
def test_parameters_that_a_program_sets_after_a_round_are_in_the_last_one():
    """Averages of weights are set so at the end of a training."""
    model = Given(SHAPES)
    optimizer = distributed(model, outer="none", period=2)
    run_given(optimizer, model, range(4))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 + grace.rank())
    optimizer.flush()
    for p in model.parameters():
        torch.testing.assert_close(p, torch.full_like(p, 1.5))
    return digest(weights(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_a_last_round_right_behind_a_round_changes_nothing(dtype):
    """Though anchors are kept wider than parameters, and the outer optimizer has momentum."""
    model = Given(SHAPES, dtype)
    optimizer = distributed(model, outer="nesterov", period=2)
    run_given(optimizer, model, range(4))
    before = digest(weights(model))
    optimizer.flush()
    assert digest(weights(model)) == before
    return before


def test_ranks_that_meet_anew_compare_the_payloads_of_drifts_again(local):
    """Some ranks are new under elastic Horovod: all must begin with the same collective."""
    model = Given(SHAPES)
    optimizer = distributed(model, Doubling(), outer="none", period=1)
    run_given(optimizer, model, range(1))
    (bucket,) = optimizer._grace.runner.outer_rounds.buckets
    assert bucket.sizes_compared
    optimizer._grace.runner.agree()
    assert not bucket.sizes_compared


def test_alone_an_outer_step_of_rate_1_changes_nothing(local):
    plain, local = net(), net()
    wanted = sgd(plain.parameters(), momentum=0.9)
    for step in range(7):
        wanted.zero_grad()
        loss_of(plain, step, 0).backward()
        wanted.step()
    optimizer = distributed(local, inner=lambda p: sgd(p, momentum=0.9), outer="sgd", period=3)
    train(local, optimizer, range(7))
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(local)[name], value, rtol=1e-5, atol=1e-6)


def followed(spec, lr, momentum, nesterov):
    """The weights after rounds, beside those of torch's SGD stepped on the anchor by the mean drift."""
    model, period = Given(SHAPES), 2
    run = distributed(model, inner=lambda p: sgd(p, 1.0), outer=spec, period=period)
    anchor = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    wanted = torch.optim.SGD(anchor, lr=lr, momentum=momentum, nesterov=nesterov)
    for round_ in range(4):
        steps = range(period * round_, period * round_ + period)
        for i, (name, shape) in enumerate(SHAPES.items()):
            drifts = [sum(made_up({name: shape}, s, r)[name] for s in steps) for r in range(grace.size())]
            anchor[i].grad = torch.as_tensor(np.mean(drifts, axis=0)).reshape(shape)
        wanted.step()
        for step in steps:
            run.zero_grad()
            model.backward({name: made_up({name: shape}, step, grace.rank())[name] for name, shape in SHAPES.items()})
            run.step()
        for p, a in zip(model.parameters(), anchor, strict=True):
            torch.testing.assert_close(p.detach(), a.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("lr", "momentum", "nesterov"), [(0.7, 0.0, False), (0.5, 0.9, False), (0.7, 0.6, True)])
@on_ranks(2)
def test_the_anchor_moves_as_torchs_sgd_moves_it(lr, momentum, nesterov):
    followed(f"{'nesterov' if nesterov else 'sgd'}(lr={lr}, momentum={momentum})", lr, momentum, nesterov)


class Doubled(OuterOptimizer):
    """A user's own."""

    name = "doubled"

    def step(self, anchor, drift, name):
        self.state[name] = self.state.get(name, 0) + 1
        return anchor - 2 * drift


@on_ranks(2)
def test_an_outer_optimizer_of_ones_own():
    model, own = Given(SHAPES), Doubled()
    optimizer = distributed(model, inner=lambda p: sgd(p, 1.0), outer=own, period=2)
    run_given(optimizer, model, range(2), apart=False)
    for name in SHAPES:
        wanted = -2 * sum(made_up(SHAPES, step, 0)[name] for step in range(2))
        np.testing.assert_allclose(weights(model)[name].numpy(), wanted, rtol=1e-5, atol=1e-5)
        assert own.state[name] == 1
    assert list(optimizer.state_dict()["grace"]["state"]["outer"]) == list(SHAPES)


class Returning(Doubled):
    """A user's own that returns anything."""

    def __init__(self, result):
        self.result = result

    def step(self, anchor, drift, name):
        return self.result(anchor)


@on_ranks(2)
def test_what_a_step_of_ones_own_returns_must_be_an_anchor():
    for result, message in (
        (lambda anchor: None, "doubled: step() gave None, where a tensor of shape (13, 6) is wanted: return the next"),
        (lambda anchor: anchor[:1], "gave a tensor of shape (1, 6), where (13, 6) is wanted"),
        (lambda anchor: anchor.double(), "step() gave float64 for the anchor of 'matrix', which is float32"),
    ):
        model = Given(SHAPES)
        optimizer = distributed(model, outer=Returning(result), period=1)
        assert message in refusal(run_given, optimizer, model, range(1))


# -- equal anchors -----------------------------------------------------------------------------------------

METHODS = ("none", "block(bits=4)", "topk(ratio=0.1)", "qsgd", "powersgd(rank=2)", "topk(ratio=0.1) | efsignsgd")


class Failing(Doubled):
    """One whose step fails at a variable, as without memory."""

    fails = False

    def step(self, anchor, drift, name):
        if self.fails and name == "vector":
            raise OSError("no memory")
        return super().step(anchor, drift, name)


@on_ranks(2)
def test_a_step_of_ones_own_that_fails_moves_no_anchor():
    model, own = Given(SHAPES), Failing()
    optimizer = distributed(model, outer=own, period=2)
    run_given(optimizer, model, range(3))
    kept = optimizer._grace.outer_rounds.anchors.state
    before, counts = digest(dict(kept)), dict(own.state)
    own.fails = True
    refusal(run_given, optimizer, model, range(3, 4), kind=OSError)
    assert (digest(dict(kept)), dict(own.state)) == (before, counts)
    own.fails = False
    optimizer.flush()  # with the means that have come
    assert dict(own.state) == {name: count + 1 for name, count in counts.items()}


class Pair(OuterOptimizer):
    """One that keeps a dict of tensors on the CPU."""

    name = "pair"
    offload = True

    def step(self, anchor, drift, name):
        self.state[name] = {"m": torch.full_like(drift, 41.0), "v": torch.full_like(drift, 42.0)}
        return anchor - drift


@on_ranks(2)
def test_all_that_an_outer_optimizer_keeps_goes_to_its_device_when_it_is_loaded():
    model = Given(SHAPES)
    optimizer = distributed(model, outer=Pair(), period=2)
    run_given(optimizer, model, range(2))
    saved = copied(optimizer.state_dict())
    optimizer.close()
    optimizer = distributed(Given(SHAPES), outer=Pair(), period=2)
    kernels = type(kernels_of(torch.ones(1)))
    with mock.patch.object(kernels, "to_device_of", autospec=True, side_effect=kernels.to_device_of) as moved:
        optimizer.load_state_dict(saved)
    values = {float(call.args[1].flatten()[0]) for call in moved.call_args_list}
    assert {41.0, 42.0} <= values


@pytest.mark.parametrize("method", METHODS)
@on_ranks(3)
def test_anchors_and_momenta_have_the_same_bits_on_all_ranks(method):
    model = net()
    optimizer = distributed(model, method, outer="nesterov(momentum=0.6)", period=2)
    found = []
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        found.append(digest(anchors(optimizer)))
    assert len(set(found)) == 4  # they move after each round
    with optimizer.anchor():
        found.append(digest(weights(model)))
    return found


@on_ranks(2)
def test_a_drift_that_is_not_finite_on_one_rank_drops_the_round_everywhere():
    model = Given(SHAPES)
    optimizer = distributed(model, "topk(ratio=0.2)", inner=lambda p: sgd(p, 1.0), outer="nesterov", period=2)
    run_given(optimizer, model, range(2))
    before, kept = digest(anchors(optimizer)), digest(optimizer._grace.runner.state()["memory"])
    run_given(optimizer, model, range(2, 3))
    if grace.rank() == 1:
        model.matrix.data[0, 0] = float("inf")
        with pytest.warns(UserWarning, match="'matrix' was not finite on rank 1 after iteration 4"):
            run_given(optimizer, model, range(3, 4))
        assert torch.equal(model.matrix.data, anchors(optimizer)["matrix"])
    else:
        run_given(optimizer, model, range(3, 4))
    assert digest(anchors(optimizer)) == before
    assert digest(optimizer._grace.runner.state()["memory"]) == kept
    run_given(optimizer, model, range(4, 6))
    assert digest(anchors(optimizer)) != before
    return digest(anchors(optimizer))


def spoiled(optimizer, model, step):
    """An iteration after which no parameter of rank 1 is finite, nor a buffer, nor a moment of its optimizer."""
    images, labels = batch(step)
    if grace.rank() == 1:
        images = images * float("nan")
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{"fragments": 1, "delay": 0}, {"delay": 0}, {}], ids=str)
@pytest.mark.parametrize("inner", [sgd, torch.optim.AdamW])
@on_ranks(2)
def test_a_rank_that_was_not_finite_once_trains_on_from_the_anchors(inner, settings):
    model = net()
    optimizer = distributed(model, inner=inner, strategy=fragmented(**settings))
    train(model, optimizer, range(5))
    spoiled(optimizer, model, 5)
    train(model, optimizer, range(6, 12))
    before = digest(anchors(optimizer))
    train(model, optimizer, range(12, 21))
    assert all(p.isfinite().all() for p in model.parameters())
    assert digest(anchors(optimizer)) != before
    return digest(anchors(optimizer))


@on_ranks(2)
def test_the_last_round_makes_ranks_equal_even_if_one_of_them_is_not_finite():
    model = net()
    optimizer = distributed(model, outer="nesterov", period=4)
    train(model, optimizer, range(5))
    moved = [p.clone() for p in model.parameters()]
    spoiled(optimizer, model, 5)
    optimizer.flush()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not any(torch.equal(p, before) for p, before in zip(model.parameters(), moved, strict=True))
    return digest(weights(model))


@on_ranks(2)
def test_drifts_that_no_payload_can_hold_are_told_at_each_round_and_refused_in_the_last_one():
    model = Given(SHAPES)
    optimizer = distributed(model, "fp16", outer="none", period=2)
    run_given(optimizer, model, range(2))
    before = digest(anchors(optimizer))
    if grace.rank() == 1:
        model.matrix.data.fill_(1e6)
    told = contextlib.nullcontext()
    if grace.rank() == 0:
        told = pytest.warns(UserWarning, match="the round of 'matrix' after iteration 4 was dropped: on a rank its dr")
    with told:
        run_given(optimizer, model, range(2, 4))
    own = digest(weights(model))
    with pytest.raises(PayloadError, match=r"bucket 0 \(matrix .. scalar; .*\) are finite and their payloads are not"):
        optimizer.flush()
    assert (digest(weights(model)), digest(anchors(optimizer))) == (own, before)
    model.matrix.data.fill_(1.0 + grace.rank())
    optimizer.flush()
    torch.testing.assert_close(model.matrix.data, torch.full((13, 6), 1.5), rtol=0, atol=0.002)
    return digest(weights(model))


@on_ranks(2)
def test_ranks_whose_scalers_skip_other_steps_stay_together():
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = distributed(model, outer="nesterov", period=2, grad_scaler=scaler)
    skipped = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step in (1 + grace.rank(), 4, 7 - grace.rank()):  # step 1 of rank 0, which ends a period, is one of them
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = digest(weights(model))
        scaler.step(optimizer)
        skipped.append(before == digest(weights(model)))
        scaler.update()
    assert sum(skipped) == 3
    return digest(anchors(optimizer))


@on_ranks(2)
def test_layers_may_be_frozen_or_unused_on_one_rank():
    model = Given(SHAPES)
    optimizer = distributed(model, outer="sgd", period=2)
    for step in range(4):
        optimizer.zero_grad()
        given = made_up(SHAPES, step, grace.rank())
        if grace.rank() == 1:
            del given["vector"]
        model.backward(given)
        optimizer.step()
    with optimizer.anchor():
        assert model.vector.abs().sum() > 0
    return digest(anchors(optimizer))


@on_ranks(2)
def test_a_closures_loss_stays_that_of_a_rank_which_trains_alone():
    model = net()
    optimizer = distributed(model, outer="none", period=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    for step in range(3):
        own = loss_of(model, step).item()
        assert optimizer.step(closure).item() == own
    assert optimizer._grace.runner.context.step == 3
    return digest(weights(model))


# -- nothing is lost ---------------------------------------------------------------------------------------


def memories_of_methods():
    found = []
    for method in ("topk(ratio=0.1)", "qsgd", "efsignsgd", "block(bits=4)", "topk(ratio=0.1) | qsgd", "onebit"):
        for memory in legal_memories(make("compressor", method)):
            if known("memory")[memory].stateful and memory in ("residual", "efsignsgd"):
                found.append((method, memory))
    return [*found, ("topk(ratio=0.1)", "residual(beta=0.95)")]


@pytest.mark.parametrize(("method", "memory"), memories_of_methods())
@on_ranks(2)
def test_what_is_sent_and_what_is_kept_are_what_was_kept_and_the_drift(method, memory):
    model = Given({"matrix": (40, 25)})
    optimizer = distributed(model, method, memory=memory, inner=lambda p: sgd(p, 1.0), outer="none", period=2)
    runner = optimizer._grace.runner
    beta = 0.95 if "beta" in memory else 1.0

    def kept():
        value = runner.shards["matrix"].communicator.memory.residual_tensors("matrix")
        return value[0].clone() if value else torch.zeros(40, 25)

    for step in range(0, 6, 2):
        run_given(optimizer, model, range(step, step + 1))
        before, anchor = kept(), anchors(optimizer)["matrix"]
        run_given(optimizer, model, range(step + 1, step + 2))
        drift = sum(torch.as_tensor(made_up({"matrix": (40, 25)}, s, grace.rank())["matrix"]) for s in (step, step + 1))
        left = beta * before + drift - kept()  # what this rank has sent
        sent = grace.allreduce(left)
        torch.testing.assert_close(anchor - anchors(optimizer)["matrix"], sent, rtol=1e-3, atol=1e-3)


# -- fragments and delays ------------------------------------------------------------------------------------

RECORDED = json.loads((Path(__file__).parent / "data" / "outer_trajectories.json").read_text())["cases"]


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"delay{case['delay']}-alpha{case['alpha']}")
@on_ranks(2)
def test_fragments_go_the_way_that_torchft_recorded(case):
    model = Given({"first": (1,), "second": (1,)})
    for p in model.parameters():
        p.data.fill_(1.0)
    outer = Outer("sgd(lr=2.0)", period=6, fragments=2, delay=case["delay"], merge=case["alpha"])
    part = ShardPlan(outer=outer)
    optimizer = distributed(
        model,
        inner=lambda p: sgd(p, 1.0),
        strategy=strategy_of(whole("first", (1,), part), whole("second", (1,), part)),
    )
    for values in case["values"]:
        assert [p.item() for p in model.parameters()] == values[grace.rank()]
        optimizer.zero_grad()
        model.backward({"first": np.full(1, 2.0), "second": np.full(1, 2.0)})
        optimizer.step()


def fragmented(method="topk(ratio=0.2)", **settings):
    """Net with outer rounds in two fragments that travel for one iteration."""
    outer = Outer(
        "nesterov(lr=0.7, momentum=0.6)", **{"period": 4, "fragments": 2, "delay": 1, "merge": 0.5, **settings}
    )
    return {
        "version": 1,
        "rules": [
            {
                "match": {},
                "sync": {"type": "allreduce" if method == "none" else "allgather"},
                "compressor": method,
                "outer": outer.to_dict(),
            }
        ],
    }


# -- anchors, ends and checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{}, {"outer": "none", "period": 2}], ids=["every step", "outer"])
@on_ranks(2)
def test_the_context_of_anchors_changes_nothing_else(choices):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = distributed(model, **choices)
    with torch.no_grad(), optimizer.anchor():
        assert not torch.is_grad_enabled()
        model(torch.ones(2, 4))  # which counts in the statistics, but for those at the anchor
    assert torch.is_grad_enabled()
    assert bool(model[1].running_var.eq(1).all()) is bool(choices)
    return digest(weights(model))


@on_ranks(2)
def test_the_anchor_is_the_same_on_all_ranks_and_goes_away():
    model = net()
    optimizer = distributed(model, "qsgd", outer="nesterov", period=4)
    train(model, optimizer, range(6))
    own = digest(weights(model))
    with optimizer.anchor(), optimizer.anchor():
        shared = digest(weights(model))
        assert shared == digest({name: anchors(optimizer)[name] for name in weights(model)})
        with pytest.raises(grace.ExchangeError, match="outside of it"):
            optimizer.step()
    assert digest(weights(model)) == own != shared
    return shared


@on_ranks(2)
def test_an_optimizer_is_not_closed_at_the_anchor():
    model = Given(SHAPES)
    optimizer = distributed(model, outer="none", period=4)
    run_given(optimizer, model, range(2))
    own = digest(weights(model))
    with optimizer.anchor():
        assert "close() under `with optimizer.anchor():`" in refusal(optimizer.close, kind=ExchangeError)
    assert digest(weights(model)) == own
    optimizer.close()


@pytest.mark.parametrize("depth", [1, 2])
@on_ranks(2)
def test_a_state_that_is_loaded_at_the_anchor_stays(depth):
    """A program may load the best state so far where it has evaluated."""
    model, other = with_buffers(), with_buffers()
    optimizer, resumed = (distributed(one, outer="nesterov", period=4) for one in (model, other))
    train(model, optimizer, range(6))
    saved, own, wanted = copied(optimizer.state_dict()), digest(weights(model)), buffers_of(model, optimizer)
    train(model, optimizer, range(6, 7))
    for one, its in ((model, optimizer), (other, resumed)):
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(its.anchor())
            its.load_state_dict(saved)
        assert digest(weights(one)) == own
    assert buffers_of(model, optimizer) == buffers_of(other, resumed) == wanted
    train(model, optimizer, range(6, 7))  # is not refused as one at the anchor


@on_ranks(2)
def test_parameters_that_are_loaded_at_the_anchor_are_undone_with_a_warning():
    model = net()
    optimizer = distributed(model, outer="nesterov", period=4)
    train(model, optimizer, range(2))
    own, said = digest(weights(model)), []
    for load in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with optimizer.anchor(), optimizer.anchor():
                best = {name: p * 2 if load else p.clone() for name, p in model.state_dict().items()}
                model.load_state_dict(best)
        said.append([str(warning.message) for warning in caught])
    assert digest(weights(model)) == own
    assert said[0] == []
    [words] = said[1]
    assert "was changed under `with optimizer.anchor():`, whose end has undone it" in words


@on_ranks(2)
def test_an_end_between_rounds_is_told_once_where_nobody_asked_for_the_anchors():
    """Rank 0 tells it when it ends its optimizer, or its run, after 6 iterations of periods of 4; not after a round."""

    def told(steps, use, ends_run=False):
        model = net()
        optimizer = distributed(model, outer="none", period=4)
        train(model, optimizer, range(steps))
        use(optimizer)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            if ends_run:
                vars(optimizer._grace.runner.backend)["closing"][-1]()
            optimizer.close()
        return said.getvalue().count("optimizer.flush() on all ranks")

    def evaluate(optimizer):
        with optimizer.anchor():
            pass

    once = int(grace.rank() == 0)
    assert [told(6, id), told(6, id, ends_run=True), told(8, id)] == [once, once, 0]
    assert told(6, evaluate) == told(6, lambda optimizer: optimizer.flush()) == 0


@pytest.mark.parametrize("choices", ["plain", "fragmented"])
@on_ranks(2)
def test_the_last_round_makes_all_ranks_equal(choices):
    model = net()
    how = {"strategy": fragmented()} if choices == "fragmented" else {"outer": "sgd", "period": 4}
    optimizer = distributed(model, **how)
    train(model, optimizer, range(7))
    optimizer.flush()
    once = weights(model)
    assert digest(once) == digest({name: anchors(optimizer)[name] for name in once})
    optimizer.flush()  # nothing is left to send
    assert digest(weights(model)) == digest(once)
    return digest(once)


@on_ranks(2)
def test_a_scaler_that_was_not_given_is_named_when_it_skips_a_step_of_one_rank():
    model = net()
    optimizer = distributed(model, outer="nesterov", period=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def trained():
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * (float("inf") if grace.rank() == 0 == step else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(StepError, match=r"left out optimizer\.step\(\) \(if a GradScaler skipped it, give grad_"):
        trained()


class Estimating(torch.optim.SGD):
    """An optimizer that estimates its step size from the gradients that it has seen, as Prodigy does."""

    def __init__(self, params):
        super().__init__(params, lr=0.05)
        self.param_groups[0]["d"] = 1e-6

    def step(self, closure=None):
        super().step(closure)
        (group,) = self.param_groups
        group["d"] += sum(float(p.grad.norm()) for p in group["params"])


@on_ranks(2)
def test_an_optimizer_that_estimates_a_hyperparameter_is_refused_at_the_first_round():
    model = net()
    optimizer = distributed(model, inner=Estimating, outer="none", period=2)
    said = refusal(lambda: train(model, optimizer, range(4)), kind=StepError)
    assert "rank 0 has optimizer Estimating, param group 0, d " in said
    assert "An optimizer that estimates it from gradients (Prodigy, D-Adaptation) needs those of all ranks" in said
    assert optimizer._grace.context.step == 2
    optimizer.close()
    train(model, distributed(model, inner=Estimating), range(4))


@on_ranks(2)
def test_ranks_with_other_numbers_of_iterations_are_told_so():
    model = net()
    optimizer = distributed(model, outer="none", period=4)
    train(model, optimizer, range(3))
    with pytest.raises(StepError, match="rank 1 is at step 3, rank 0 is at step 4"):
        optimizer.flush() if grace.rank() == 1 else train(model, optimizer, range(3, 4))


@pytest.mark.parametrize("made", [3, 4])
@on_ranks(2)
def test_a_rank_without_iterations_is_told_so_in_the_last_round(made):
    model = net()
    optimizer = distributed(model, outer="none", period=4)
    optimizer.flush()  # all ranks alike: nothing has moved
    assert not anchors(optimizer)

    def train_and_flush():
        train(model, optimizer, range(made if grace.rank() == 0 else 0))
        optimizer.flush()

    with pytest.raises(StepError, match=f"rank 1 is at step 0, rank 0 is at step {made}: rank 1 left out optim"):
        train_and_flush()


def with_buffers(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))


@on_ranks(2)
def test_buffers_are_averaged_at_a_round():
    model = with_buffers()
    if grace.rank() == 0:
        with pytest.warns(UserWarning, match=r"the buffers of the model \(1.running_mean, ...\) differ by rank"):
            optimizer = distributed(model, outer="sgd", period=2)
    else:
        optimizer = distributed(model, outer="sgd", period=2)
    norm = model[1]
    train(model, optimizer, range(1))
    first = norm.running_mean.clone()
    assert not torch.equal(first, grace.broadcast(first, 0)) or grace.rank() == 0
    momentum, images = norm.momentum, batch(1)[0].flatten(1)
    wanted = grace.allreduce((1 - momentum) * first + momentum * images.mean(0))
    train(model, optimizer, range(1, 2))
    torch.testing.assert_close(norm.running_mean, wanted)
    shared = norm.running_mean.clone()
    train(model, optimizer, range(2, 3))
    with optimizer.anchor():
        assert torch.equal(norm.running_mean, shared)
    assert not torch.equal(norm.running_mean, shared)
    return digest(shared)


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])
@pytest.mark.every
@on_ranks(2)
def test_buffers_of_a_model_that_is_not_known_are_told_at_the_users_line(engine):
    model, told = with_buffers(), contextlib.nullcontext()
    if grace.rank() == 0:
        told = pytest.warns(
            UserWarning, match=r"\(1.running_mean, ...\) may differ by rank .* not averaged: pass the model"
        )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with told:
        grace.DistributedOptimizer(sgd, model.named_parameters(), outer="sgd", period=2).close()
    if grace.rank() == 0:
        assert [one.filename for one in told] == [__file__]


@on_ranks(2)
def test_statistics_that_are_not_finite_on_one_rank_leave_the_mean_of_the_others():
    model = with_buffers()
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    optimizer = distributed(model, outer="sgd", period=2)
    norm = model[1]
    train(model, optimizer, range(1))
    if grace.rank() == 1:
        norm.running_var.fill_(float("inf"))
        train(model, optimizer, range(1, 2))
    else:
        train(model, optimizer, range(1, 2))
    assert norm.running_var.isfinite().all()
    assert norm.running_mean.isfinite().all()
    assert model.mask.isneginf().all()
    return digest({name: b for name, b in model.named_buffers()})


class Centred(torch.nn.Module):
    """A model that assigns its statistics, as many implementations of codebooks do."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.linear(x - self.mean)


@on_ranks(2)
def test_buffers_that_a_module_assigns_are_averaged_too():
    model = Centred()
    optimizer = distributed(model, outer="none", period=2)

    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + grace.rank())).square().sum().backward()
            optimizer.step()

    run(2)
    torch.testing.assert_close(model.mean, torch.full((4,), 0.19 * 1.5))
    shared = model.mean.clone()
    run(1)
    own = model.mean.clone()
    with optimizer.anchor():
        assert torch.equal(model.mean, shared)
    assert torch.equal(model.mean, own)
    if grace.rank() == 1:  # as for a longer sequence
        model.mean = torch.zeros(5)
    optimizer.flush()
    assert model.mean.shape == ((5,) if grace.rank() == 1 else (4,))
    if grace.rank() == 0:
        assert torch.equal(model.mean, own)


def buffers_of(model, optimizer):
    """Digests of a model's statistics, now and at the anchor."""

    def statistics():
        return digest({name: b for name, b in model.named_buffers() if b.is_floating_point()})

    with optimizer.anchor():
        shared = statistics()
    return statistics(), shared


@on_ranks(2)
def test_buffers_are_resumed_where_two_optimizers_of_one_model_save_at_their_anchors():
    def made():
        model = with_buffers()
        halves = [[p for p in model.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
        inner = [torch.optim.SGD(half, lr=0.05) for half in halves]
        return model, [grace.DistributedOptimizer(one, model, outer="nesterov", period=4) for one in inner]

    def go_on(model, optimizers, steps):
        for step in steps:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()

    model, optimizers = made()
    go_on(model, optimizers, range(6))
    with optimizers[0].anchor(), optimizers[1].anchor():
        saved = [copied(part.state_dict()) for part in (model, *optimizers)]
    resumed, others = made()
    for part, state in zip((resumed, *others), saved, strict=True):
        part.load_state_dict(state)
    for run in ((model, optimizers), (resumed, others)):
        go_on(*run, range(6, 7))
    own = [{name: b for name, b in one.state_dict().items() if b.is_floating_point()} for one in (model, resumed)]
    assert digest(own[0]) == digest(own[1])
    go_on(model, optimizers, range(7, 8))  # with a round
    return digest({name: b for name, b in model.state_dict().items() if b.is_floating_point()})


class Run:
    """A run that saves and loads itself."""

    def __init__(self, choices, seed=0):
        self.model = with_buffers(seed)
        self.model.register_buffer("mask", torch.full((3,), -torch.inf))
        self.optimizer = distributed(self.model, inner=lambda p: torch.optim.AdamW(p, lr=0.01), **choices)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)

    def train(self, steps):
        for step in steps:
            train(self.model, self.optimizer, range(step, step + 1))
            self.schedule.step()

    def ends(self):
        values = [weights(self.model), anchors(self.optimizer), self.optimizer._grace.runner.state()]
        return digest(values), buffers_of(self.model, self.optimizer)


RESUMED = {
    "plain": {"outer": "nesterov", "period": 4, "compressor": "topk(ratio=0.2)"},
    "quantized": {"outer": "nesterov(momentum=0.6)", "period": 4, "compressor": "block(bits=4)", "memory": "residual"},
    "averaged": {"outer": "none", "period": 4},
    "fragments": {"strategy": fragmented()},
    "low rank": {"outer": "sgd(momentum=0.5)", "period": 4, "compressor": "powersgd(rank=2)"},
}


STOPS = (2, 4, 5, 6, 7)
"""Before the first round, at a round's end, in the middle, and while fragments travel."""


@pytest.mark.parametrize("choices", RESUMED)
@on_ranks(2)
def test_a_run_that_is_resumed_in_the_middle_of_a_period_goes_on_bit_for_bit(choices):
    run = Run(RESUMED[choices])
    saved = []
    for step in range(10):
        if step in STOPS:  # in turns as it is, and where it evaluates
            with run.optimizer.anchor() if step % 2 else contextlib.nullcontext():
                saved.append(copied({"optimizer": run.optimizer.state_dict(), "schedule": run.schedule.state_dict()}))
        run.train(range(step, step + 1))
    for stop, states in zip(STOPS, saved, strict=True):
        resumed = Run(RESUMED[choices], seed=9)
        resumed.optimizer.load_state_dict(states["optimizer"])
        resumed.schedule.load_state_dict(states["schedule"])
        resumed.train(range(stop, 10))
        assert resumed.ends() == run.ends(), stop


@on_ranks(2)
def test_buffers_are_averaged_where_a_round_arrives_that_was_dropped_also_of_a_resumed_run():
    run = Run(RESUMED["fragments"])
    run.train(range(2))
    spoiled(run.optimizer, run.model, 2)  # whose round arrives an iteration later
    saved = copied({"optimizer": run.optimizer.state_dict(), "schedule": run.schedule.state_dict()})
    assert not saved["optimizer"]["grace"]["state"]["coming"]
    resumed = Run(RESUMED["fragments"], seed=9)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.schedule.load_state_dict(saved["schedule"])
    for one in (run, resumed):
        one.train(range(3, 4))
    assert resumed.ends() == run.ends()


@on_ranks(2)
def test_means_of_a_save_that_failed_are_in_no_later_one():
    run = Run(RESUMED["fragments"])
    run.train(range(1))
    rounds = run.optimizer._grace.outer_rounds
    collect = rounds._collect
    with mock.patch.object(rounds, "_collect", side_effect=[collect(rounds.fragments[0]), OSError("lost")]):
        refusal(run.optimizer.state_dict, kind=OSError)
    run.train(range(1, 2))
    assert not run.optimizer.state_dict()["grace"]["state"]["coming"]


@pytest.mark.parametrize("period", [6, 4])
@on_ranks(2)
def test_means_that_travelled_are_applied_by_a_run_with_another_schedule(period):
    """The next iteration applies them, also if a round is due after it, which would replace them."""
    model = Given(SHAPES)
    optimizer = distributed(model, strategy=fragmented())
    run_given(optimizer, model, range(3))
    saved, before = copied(optimizer.state_dict()), anchors(optimizer)
    means = saved["grace"]["state"]["coming"]
    assert 0 < len(means) < len(SHAPES)
    optimizer.close()
    model = Given(SHAPES)
    how = {"compressor": "topk(ratio=0.2)", "outer": "nesterov(lr=0.7, momentum=0.6)", "period": period}
    optimizer = distributed(model, **how)
    optimizer.load_state_dict(saved)
    applied = []
    step = optimizer._grace.outer_rounds._apply_outer_step
    optimizer._grace.outer_rounds._apply_outer_step = lambda *args: (step(*args), applied.append(anchors(optimizer)))
    run_given(optimizer, model, range(3, 4))
    for name, mean in means.items():
        velocity = mean + 0.6 * before.get(f"{name} v", torch.zeros_like(mean))
        wanted = before[name] - 0.7 * (mean + 0.6 * velocity).reshape(before[name].shape)
        torch.testing.assert_close(applied[0][name], wanted)
    assert len(applied) == (1 if period == 6 else 2)


@pytest.mark.parametrize("in_anchor", [False, True])
@on_ranks(2)
def test_parameters_that_a_program_sets_after_a_round_are_resumed(in_anchor):
    def train_and_clip(run, steps):
        for step in steps:
            run.train(range(step, step + 1))
            for p in run.model.parameters():
                p.data.clamp_(-0.1, 0.1)

    run = Run(RESUMED["averaged"])
    train_and_clip(run, range(4))
    with run.optimizer.anchor() if in_anchor else contextlib.nullcontext():
        saved = copied({"optimizer": run.optimizer.state_dict(), "schedule": run.schedule.state_dict()})
    resumed = Run(RESUMED["averaged"], seed=9)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.schedule.load_state_dict(saved["schedule"])
    for one in (run, resumed):
        train_and_clip(one, range(4, 6))
    assert resumed.ends() == run.ends()


@on_ranks(2)
def test_a_run_that_resumes_without_its_anchors_goes_on_from_those_of_rank_0():
    """Each rank loads its own model of the middle of a period, and starts with empty memories."""
    run = Run(RESUMED["plain"])
    run.train(range(6))
    saved = copied({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
    resumed = Run(RESUMED["plain"], seed=9)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"], memory="reset")
    resumed.train(range(6, 9))
    return digest(anchors(resumed.optimizer))


@pytest.mark.parametrize("kind", ["anchor", "outer"])
@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_shared_state_that_is_damaged_on_one_rank_is_dropped_on_all(rank, kind):
    settings = {"outer": "nesterov(lr=0.7, momentum=0.6)", "period": 3}
    model = net()
    optimizer = distributed(model, **settings)
    train(model, optimizer, range(4))
    saved = copied(optimizer.state_dict())
    optimizer.close()
    if grace.rank() == rank:
        saved["grace"]["state"][kind]["conv.weight"] += 1
    resumed = net()
    optimizer = distributed(resumed, **settings)
    resumed.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=f"the {kind} of 'conv.weight'"):
        optimizer.load_state_dict(saved, memory="keep")
    train(resumed, optimizer, range(4, 6))
    return digest(weights(resumed))  # equal on all ranks


@on_ranks(2)
def test_rounds_begin_anew_from_the_state_of_a_plain_optimizer():
    run = Run(RESUMED["plain"])
    run.train(range(3))
    plain = copied(torch.optim.AdamW(with_buffers().parameters(), lr=0.01).state_dict())
    with pytest.warns(UserWarning, match="saved by a plain optimizer"):
        run.optimizer.load_state_dict(plain, memory="keep")
    run.train(range(3, 6))
    return digest(anchors(run.optimizer))


@pytest.mark.parametrize("packed", [False, True])
@on_ranks(2)
def test_one_file_of_all_ranks_goes_on_bit_for_bit(packed):
    """The file has the states of all ranks' own optimizers, which are Adam's."""
    run = Run(RESUMED["plain"])
    run.train(range(6))
    states = run.optimizer.full_state_dict(packed), run.schedule.state_dict()
    optimizer, schedule = copied(grace.broadcast_object(states, 0))
    resumed = Run(RESUMED["plain"], seed=9)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.schedule.load_state_dict(schedule)
    for one in (run, resumed):
        one.train(range(6, 10))
    assert resumed.ends() == run.ends()


def saved_by_all():
    run = Run(RESUMED["plain"])
    run.train(range(6))
    rounds = run.optimizer._grace.runner.outer_rounds
    drifts = {name: rounds.drift(shard) for name, shard in run.optimizer._grace.runner.shards.items()}
    saved = {"state": run.optimizer.full_state_dict(), "anchors": anchors(run.optimizer), "drifts": drifts}
    return copied({**saved, "buffers": buffers_of(run.model, run.optimizer)})


def loaded_by_others(states):
    run = Run(RESUMED["plain"], seed=9)
    run.optimizer.load_state_dict(states[0]["state"])
    rounds = run.optimizer._grace.runner.outer_rounds
    for name, shard in run.optimizer._grace.runner.shards.items():
        wanted = sum(one["drifts"][name] for one in states) / len(states)
        torch.testing.assert_close(rounds.drift(shard), wanted, rtol=1e-4, atol=1e-6)
    assert digest(anchors(run.optimizer)) == digest(states[0]["anchors"])
    assert buffers_of(run.model, run.optimizer) == (states[0]["buffers"][1],) * 2
    run.train(range(6, 9))
    return digest(anchors(run.optimizer))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_ranks_goes_on_from_the_anchors_the_mean_drift_and_the_buffers_of_the_last_round(
    before, after
):
    states = ranks_of(before).run(saved_by_all)
    assert len({state["buffers"][0] for state in states}) == before
    assert len(set(ranks_of(after).run(loaded_by_others, states))) == 1


@on_ranks(2)
def test_another_strategy_goes_on_from_a_last_round():
    """The momenta of ranks that trained alone are made equal, or their parameters would drift apart in step."""
    model = net()
    adam = {"inner": lambda p: torch.optim.AdamW(p, lr=0.01)}
    optimizer = distributed(model, "topk(ratio=0.2)", outer="nesterov", period=4, **adam)
    train(model, optimizer, range(6))
    optimizer.use_strategy("uniform(compressor=topk(ratio=0.2))")
    assert optimizer._grace.runner.state().get("memory", {}) == {}  # what is left of drifts is no part of a gradient
    before = digest(weights(model))
    train(model, optimizer, range(6, 8))
    return before, digest(weights(model))


def test_a_refused_strategy_does_not_end_a_period(local):
    model = net()
    optimizer = distributed(model, outer="nesterov(lr=0.5)", period=4)
    train(model, optimizer, range(1))
    before = digest(weights(model))
    assert "did you mean 'topk'" in refusal(optimizer.use_strategy, "uniform(compressor=tokp)")
    assert digest(weights(model)) == before
    optimizer.use_strategy("uniform")
    assert digest(weights(model)) != before


@pytest.mark.parametrize(("in_one_file", "each_alone"), [(True, False), (True, True), (False, False)])
@on_ranks(2)
def test_a_run_in_step_that_loads_ranks_which_trained_alone_keeps_them_together(in_one_file, each_alone):
    """Over Horovod each rank loads alone."""
    run = Run({"outer": "nesterov", "period": 4})
    run.train(range(6))
    states = run.optimizer.full_state_dict() if in_one_file else run.optimizer.state_dict()
    if each_alone:
        states = grace.broadcast_object(copied(states), 0)
    run.optimizer.flush()
    later = Run({"compressor": "none"}, seed=9)
    later.optimizer._grace.ranks_load_alone = each_alone
    later.model.load_state_dict(run.model.state_dict())
    with pytest.warns(UserWarning, match="dropped"):
        later.optimizer.load_state_dict(copied(states), memory="keep")
    later.train(range(6, 9))
    return digest(weights(later.model))


@on_ranks(2)
def test_gradients_may_be_accumulated_where_nothing_is_exchanged():
    ends = []
    for passes in (1, 2):
        model = net()
        optimizer = distributed(model, outer="nesterov", period=2)
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                (loss_of(model, step) / passes).backward()
            optimizer.step()
        ends.append(weights(model))
    torch.testing.assert_close(*ends)


@on_ranks(2)
def test_anchors_may_lie_on_the_cpu():
    ends = []
    for spec in ("nesterov", "nesterov(offload=True)"):
        model = net()
        optimizer = distributed(model, "qsgd", outer=spec, period=2)
        train(model, optimizer, range(4))
        ends.append(digest(weights(model)))
        assert all(value.device.type == "cpu" for value in anchors(optimizer).values())
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
@on_ranks(2)
def test_anchors_are_at_least_float32(dtype, wide):
    found = []
    for compressor in ("none", "qsgd"):
        model, other = Given(SHAPES, dtype), Given(SHAPES, dtype)
        optimizer = distributed(model, compressor, outer="nesterov", period=2)
        run_given(optimizer, model, range(5))
        assert all(value.dtype is wide for value in anchors(optimizer).values())
        resumed = distributed(other, compressor, outer="nesterov", period=2)
        resumed.load_state_dict(copied(optimizer.state_dict()))
        assert digest(weights(other)) == digest(weights(model))
        assert all(p.dtype is dtype for p in other.parameters())
        found.append(digest(anchors(resumed)))
    return found


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 5, "fragments": 2}, "outer.period: 5 iterations cannot be dealt to 2 fragments"),
        ({"period": 6, "fragments": 2, "delay": 3}, "outer.delay: 3 must be less than period / fragments = 3"),
        ({"period": 6, "merge": 1.5}, "outer.merge: must be a number from 0"),
        ({"period": 6, "over": "racks"}, "outer.over: must be one of 'ranks', 'nodes', not 'racks'"),
        ({"period": 6, "optimizer": "adam"}, "outer.optimizer: unknown outer optimizer 'adam'"),
        ({"period": 0}, "outer.period: must be a whole number of at least 1, not 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, message):
    with pytest.raises(grace.ConfigError, match=f"variable 'w', {message}"):
        strategy_of(whole("w", (3,), ShardPlan(outer=Outer(**settings))), size=1)


@on_ranks(2)
def test_an_outer_optimizer_may_be_given_as_text_dict_or_object():
    ends = []
    for outer in ("sgd(lr=0.5)", {"name": "sgd", "lr": 0.5}, grace.make("outer", "sgd(lr=0.5)")):
        model = Given(SHAPES)
        run_given(distributed(model, outer=outer, period=2), model, range(2))
        ends.append(digest(weights(model)))
    assert len(set(ends)) == 1


def refused(**choices):
    grace.init("local")
    try:
        with pytest.raises(grace.ConfigError) as raised:
            distributed(Given(SHAPES), **choices)
        return str(raised.value)
    finally:
        grace.shutdown()


def test_arguments_that_do_not_go_together_are_refused():
    assert "outer= and period= go together" in refused(outer="nesterov")
    assert "outer= and period= go together" in refused(period=3)
    assert "outer= for all of them" in refused(outer="none", period=2, strategy="uniform")
    assert "period: must be a whole number of at least 1, not 0" in refused(outer="none", period=0)
    assert "has no parameter 'rate'" in refused(outer="nesterov(rate=1)", period=2)
    assert "none: offload must be one of False, True, not 1" in refused(outer="none(offload=1)", period=2)
    too_many = "3 variables (or parts) cannot be dealt to 4 fragments: give fragments=3 or less"
    assert too_many in refused(strategy=fragmented(fragments=4, delay=0))
    in_step = {"match": {"name": "matrix"}, "sync": {"type": "allreduce"}}
    mixed = {"version": 1, "rules": [in_step, *fragmented(fragments=1, delay=0)["rules"]]}
    assert "keeps 'matrix' in step" in refused(strategy=mixed, grad_scaler=torch.amp.GradScaler("cpu"))
    delayed = "'matrix' has outer's delay, which is not possible over nodes: leave out the delay"
    assert delayed in refused(strategy=fragmented(over="nodes"))
    assert "applies means in later steps: with outer" in refused(
        outer="none", period=2, communicator="reduce_broadcast(staleness=1)"
    )


# -- bytes -------------------------------------------------------------------------------------------------


def counted(part, steps):
    model = Tables({"w": (50, 40), "v": (7,)})
    strategy = strategy_of(whole("w", (50, 40), part), whole("v", (7,), part))
    optimizer = executed(model, strategy)
    before = optimizer._grace.runner.channel.sent_bytes
    for step in range(steps):
        optimizer.zero_grad()
        model.backward(made_up({"w": (50, 40), "v": (7,)}, step, grace.rank()))
        optimizer.step()
    sent = optimizer._grace.runner.channel.sent_bytes - before
    return strategy, sent, optimizer.traffic, optimizer.metrics()


CARRIERS = [
    ("allreduce", "none"),
    ("allgather", "topk(ratio=0.1)"),
    ("scatter_reduce", "qsgd"),
    ("allgather", "block(bits=4)"),
]


@pytest.mark.parametrize(("sync", "compressor"), CARRIERS)
@on_ranks(2, 3)
def test_bytes_of_rounds_are_those_that_the_strategy_predicts_per_iteration(sync, compressor):
    part = ShardPlan(Sync(sync), compressor, outer=Outer("nesterov", period=3))
    strategy, sent, traffic, metrics = counted(part, 6)
    assert traffic.sent_bytes == sent
    said = 6 * sent_by_rank(strategy)[grace.rank()]
    assert said <= sent <= said + grace.size() * traffic.header_bytes + 6
    assert metrics["bytes_round"] == sent / 2
    assert metrics["drift_norm"] == 0.0
    assert traffic.steps == 6


# -- over nodes --------------------------------------------------------------------------------------------


@on_ranks(3)
def test_nodes_average_gradients_in_every_step_and_drifts_now_and_then():
    outer = Outer("nesterov(lr=0.7, momentum=0.6)", period=2, over="nodes")
    plans = [whole(name, shape, ShardPlan(outer=outer)) for name, shape in SHAPES.items()]
    model = Given(SHAPES)
    optimizer = executed(model, strategy_of(*plans), lambda p: sgd(p, 1.0))  # nodes of 2 and 1 ranks
    node = [0, 1] if grace.rank() < 2 else [2]
    anchor = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    velocity = dict(anchor)
    for step in range(4):
        run_given(optimizer, model, range(step, step + 1))
        drifts = {}
        for name in SHAPES:
            steps = range(step - step % 2, step + 1)
            of_rank = [sum(made_up(SHAPES, s, rank)[name] for s in steps) for rank in range(3)]
            drifts[name] = sum(of_rank) / 3
            if step % 2 == 0:
                wanted = anchor[name] - sum(of_rank[rank] for rank in node) / len(node)
            else:
                velocity[name] = 0.6 * velocity[name] + drifts[name]
                wanted = anchor[name] = anchor[name] - 0.7 * (drifts[name] + 0.6 * velocity[name])
            np.testing.assert_allclose(weights(model)[name].numpy(), wanted, rtol=1e-4, atol=1e-3)
    return digest(weights(model))


@on_ranks(3)
def test_a_run_over_nodes_is_resumed_by_ranks_that_lead_none():
    outer = Outer("nesterov(lr=0.7, momentum=0.6)", period=2, over="nodes")
    shard = ShardPlan(Sync("allgather"), compressor="topk(ratio=0.5)", outer=outer)
    strategy = strategy_of(*(whole(name, shape, shard) for name, shape in SHAPES.items()))
    whole_run, model, resumed = Given(SHAPES), Given(SHAPES), Given(SHAPES)
    optimizer = executed(whole_run, strategy)
    run_given(optimizer, whole_run, range(7))
    optimizer.close()
    optimizer = executed(model, strategy)
    run_given(optimizer, model, range(3))  # within a period
    saved = copied(optimizer.state_dict())
    optimizer.close()
    optimizer = executed(resumed, strategy)
    optimizer.load_state_dict(saved)
    run_given(optimizer, resumed, range(3, 7))
    assert digest(weights(resumed)) == digest(weights(whole_run))


@on_ranks(2)
def test_training_goes_on_while_a_fragment_travels():
    model = net()
    optimizer = distributed(model, strategy=fragmented(period=8, delay=3))
    runner = optimizer._grace.runner
    arrived, check = threading.Event(), runner.exchange_thread().check

    def late(*args):
        assert arrived.wait(30)
        check(*args)

    runner.exchange_thread().check = late
    train(model, optimizer, range(1))
    first = runner.outer_rounds.fragments[0]
    pending = first.under_way[0]  # sent after iteration 1, and applied after iteration 4
    before = digest(anchors(optimizer))
    train(model, optimizer, range(1, 3))
    assert not pending.done.is_set()
    assert digest(anchors(optimizer)) == before
    arrived.set()
    train(model, optimizer, range(3, 4))
    assert pending.done.is_set()
    assert digest(anchors(optimizer)) != before
    return digest(anchors(optimizer))


# -- engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mpirun-mpi", "horovodrun-gloo"])
@on_ranks(2)
def test_other_engines_run_the_same_rounds(engine):
    found = []
    plain = {"outer": "nesterov", "period": 2, "compressor": "block(bits=4)"}
    for choices in (plain, {"outer": "none", "period": 3}, {"strategy": fragmented()}):
        model = net()
        optimizer = distributed(model, **choices)
        train(model, optimizer, range(5))
        with optimizer.anchor():
            found.append(digest(weights(model)))
        optimizer.flush()
        found.append(digest(weights(model)))
        assert engine.startswith(("mpirun", "horovodrun"))
        optimizer.close()
    assert len(set(found)) == 6
    return found


@pytest.mark.parametrize("inner", [3, None, [3], ["x"], [b"abc"], {"a": 1}], ids=str)
def test_damaged_states_of_inner_optimizers_are_refused_and_change_nothing(local, inner):
    optimizer = distributed(torch.nn.Linear(3, 2), inner=lambda p: sgd(p, momentum=0.9), outer="nesterov", period=4)
    before = optimizer.full_state_dict()
    with pytest.raises(grace.ConfigError, match="damaged"):
        optimizer.load_state_dict({**before, "grace.inner": inner})
    assert optimizer.full_state_dict()["grace"]["step"] == before["grace"]["step"]
    optimizer.load_state_dict(before)


@on_ranks(2)
def test_ranks_share_anchors_where_the_first_forward_pass_changes_parameters():
    for iterations in (4, 1):  # two rounds, and an end before the first round is due
        torch.manual_seed(3)
        model = torch.nn.Embedding(4, 6, max_norm=1.0)
        assert (model.weight.norm(dim=1) > 1).all()  # looking rows up shortens them
        opt = distributed(model, "none", outer="none", period=2)
        for _ in range(iterations):
            opt.zero_grad()
            model(torch.tensor([grace.rank(), 2 + grace.rank()])).square().mean().backward()
            opt.step()
        opt.flush()
        assert len(set(opt._grace.runner.backend.allgather_object(digest(weights(model))))) == 1, iterations
        opt.close()


def saved_where_one_rank_set_its_parameters(dtype):
    model = Given(SHAPES, dtype)
    optimizer = distributed(model, outer="none", period=2)
    run_given(optimizer, model, range(2))
    if grace.rank() == 0:
        for p in model.parameters():
            p.data.mul_(0.5)
    means = grace.allreduce(torch.nn.utils.parameters_to_vector(model.parameters()).float())
    return copied({"state": optimizer.full_state_dict(), "means": means})


def loaded_from(saved, dtype):
    model = Given(SHAPES, dtype)
    distributed(model, outer="none", period=2).load_state_dict(saved["state"])
    own = torch.nn.utils.parameters_to_vector(model.parameters()).float()
    torch.testing.assert_close(own, saved["means"], rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_number_of_ranks_starts_from_the_mean_where_only_some_ranks_had_left_the_anchor(dtype):
    saved = ranks_of(3).run(saved_where_one_rank_set_its_parameters, dtype)[0]
    ranks_of(2).run(loaded_from, saved, dtype)
