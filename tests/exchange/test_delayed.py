"""Exchanges that are applied later: bounded staleness, means applied as they come, and what a checkpoint keeps."""

import dataclasses
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import grace
from grace.communicators import Allgather, ReduceBroadcast
from grace.compressors.topk import TopK
from grace.core.variable import Variable
from grace.errors import PayloadError, StepError
from grace.exchange.bucket import Bucket
from grace.exchange.delayed import RoundTripFuture
from tests.support import strategies
from tests.support.limits import HANGS, until
from tests.support.own_parts import Shrinking, Whole
from tests.support.pools import on_ranks
from tests.support.training import Given, copied, ddp, digest, distributed, plain_sgd, refusal

LR = 0.1
TARGETS = torch.linspace(-1, 1, 12).reshape(3, 4)


class Quadratic(torch.nn.Module):
    """Pulled towards a point that depends on rank and step: the gradient depends on the weights too."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3, 4))
        self.b = torch.nn.Parameter(torch.zeros(2))

    def gradients(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.w.detach() - (rank + 1) * TARGETS - 0.1 * step, self.b.detach() - rank + step


def made(communicator: ReduceBroadcast | None, model: Quadratic, **options):
    return distributed(model, optimizer=lambda p: plain_sgd(p, LR), communicator=communicator, **options)


def one_step(model: Quadratic, optimizer, step: int, spoil: bool = False) -> None:
    optimizer.zero_grad()
    w, b = model.gradients(step, grace.rank())
    if spoil:
        w[0, 0] = float("nan")
    (model.w * w).sum().add((model.b * b).sum()).backward()
    optimizer.step()


def trained(steps: range, model=None, optimizer=None, **how):
    model = Quadratic() if model is None else model
    optimizer = made(ReduceBroadcast(**how), model) if optimizer is None else optimizer
    history = []
    for step in steps:
        one_step(model, optimizer, step)
        history.append(strategies.weights(model))
    return model, optimizer, history


def delayed(size: int, staleness: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Plain SGD in one process in which the mean of each step's gradients is applied so many steps later."""
    model, means, history = Quadratic(), [], []
    for step in range(steps):
        gradients = [model.gradients(step, rank) for rank in range(size)]
        means.append([sum(parts) / size for parts in zip(*gradients, strict=True)])
        if step >= staleness:
            model.w.data -= LR * means[step - staleness][0]
            model.b.data -= LR * means[step - staleness][1]
        history.append(strategies.weights(model))
    return history


def weights_of(staleness: int, destination: int) -> list:
    return trained(range(7), compressor="none", destination=destination, staleness=staleness)[2]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@on_ranks(2, 3)
def test_the_mean_of_a_step_is_applied_that_many_steps_later(staleness):
    wanted = delayed(grace.size(), staleness, 7)
    for got, expected in zip(weights_of(staleness, grace.size() - 1), wanted, strict=True):
        strategies.assert_close(got, expected)


@on_ranks()
def test_without_staleness_the_bits_are_those_of_plain_all_reduce():  # of two: any order adds alike
    model = Quadratic()
    plain = trained(range(7), model, made(None, model))[2]
    assert [digest(step) for step in weights_of(0, 1)] == [digest(step) for step in plain]


def steps_of(folder, rank: int) -> int:
    """Return the number of steps that a rank has ended."""
    return len(list(Path(folder).glob(f"{rank}-*")))


@pytest.mark.parametrize("late", [0, 1], ids=["a-rank-is-late", "the-destination-is-late"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@on_ranks(2, 3)
def test_a_rank_runs_as_far_ahead_as_it_may_and_no_further(staleness, late, tmp_path):
    """When the late rank begins a step, the others have ended as many steps as they may, and no more a little later."""
    model, steps = Quadratic(), 8
    optimizer = made(ReduceBroadcast(staleness=staleness, destination=1), model)
    others, leads = set(range(grace.size())) - {late}, []
    for step in range(steps):
        if grace.rank() == late:
            until(lambda step=step: all(steps_of(tmp_path, r) >= min(steps, step + staleness) for r in others))
            time.sleep(0.02)  # somebody who may run on does so
            leads.append(max(steps_of(tmp_path, r) for r in others) - step)
        one_step(model, optimizer, step)
        Path(tmp_path, f"{grace.rank()}-{step}").touch()
    optimizer._grace.runner.pending_means()  # so that nobody is still at it when the next test begins
    assert leads == ([min(staleness, steps - step) for step in range(steps)] if grace.rank() == late else [])


METHODS = ("topk(ratio=0.3)", "qsgd(levels=7)", "signsgd", "threshold(value=0.05)", "fp16", "randomk(ratio=0.5)")


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2, 3)
def test_ranks_that_run_ahead_end_with_the_same_bits(method):
    model, optimizer, _ = trained(range(6), compressor=method, staleness=2)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    optimizer._grace.runner.pending_means()
    return digest(strategies.weights(model))


@pytest.mark.parametrize("everyone", [False, True], ids=["each-rank", "all-ranks"])
@pytest.mark.parametrize("method", ["none", "topk(ratio=0.3)", "qsgd(levels=7)"])
@on_ranks(2, 3)
def test_a_run_that_is_resumed_with_means_on_their_way_equals_one_that_never_stopped(method, everyone):
    """Eight steps at once, and five, a new model and optimizer with what was saved, and three."""
    how = {"compressor": method, "destination": 1, "staleness": 2}
    whole, optimizer, _ = trained(range(8), **how)
    optimizer._grace.runner.pending_means()
    part, optimizer, _ = trained(range(5), **how)
    saved = copied(optimizer.full_state_dict() if everyone else optimizer.state_dict())
    again = Quadratic()
    again.load_state_dict(part.state_dict())
    optimizer = made(ReduceBroadcast(**how), again)
    optimizer.load_state_dict(saved)
    trained(range(5, 8), again, optimizer)
    optimizer._grace.runner.pending_means()
    assert digest(strategies.weights(whole)) == digest(strategies.weights(again))


def _strategy(model, staleness, cut):
    from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
    from grace.torch.parameters import make_variables

    part = ShardPlan(Sync("reduce_broadcast", staleness=staleness))
    w, b = make_variables(dict(model.named_parameters()))
    first = VariablePlan(w, (part, part), 0, (1, 2)) if cut else VariablePlan(w, (part,))
    return Strategy((first, VariablePlan(b, (part,))), grace.size(), 1)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("staleness", [0, 1])
@on_ranks(2, 3)
def test_means_on_their_way_are_applied_under_another_staleness(staleness, cut):
    """Six steps of constant gradients add up to the same if the last two are made with less staleness."""
    before = Quadratic()
    before.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2) * step)
    optimizer = made(None, before, strategy=_strategy(before, 3, cut=False))
    trained(range(4), before, optimizer)
    saved = copied(optimizer.full_state_dict())
    after = Quadratic()
    after.load_state_dict(before.state_dict())
    after.gradients = before.gradients
    optimizer = made(None, after, strategy=_strategy(after, staleness, cut))
    optimizer.load_state_dict(saved)
    trained(range(4, 6), after, optimizer)
    pending = [dict(step) for step in optimizer._grace.runner.pending_means()]
    assert len(pending) == staleness
    left = sum(
        (torch.cat([step["w/part_0"], step["w/part_1"]]) if cut else step["w"] for step in pending), torch.zeros(3, 4)
    )
    torch.testing.assert_close(after.w.detach() - LR * left, -LR * 6 * (grace.size() + 1) / 2 * TARGETS)


@on_ranks(2, 3)
def test_within_the_bound_nobody_waits_and_nothing_is_lost(tmp_path):
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2))
    optimizer = made(ReduceBroadcast("none", sync=False), model)
    for step in range(6):
        if grace.rank() == 0 and step == 0:  # the others have ended all their steps before it begins its first
            until(lambda: all(steps_of(tmp_path, rank) == 6 for rank in range(1, grace.size())))
        one_step(model, optimizer, step)
        Path(tmp_path, f"{grace.rank()}-{step}").touch()
    saved = copied(optimizer.state_dict())  # waits for what is on its way
    optimizer.close()
    optimizer = made(ReduceBroadcast("none"), model, broadcast=False)
    optimizer._grace.runner.restore_pending_means(saved["grace"]["pending"])
    one_step(model, optimizer, 6)
    torch.testing.assert_close(model.w.detach(), -LR * 7 * (grace.size() + 1) / 2 * TARGETS)


@on_ranks()
def test_without_sync_no_more_steps_are_under_way_than_may_be(tmp_path):
    model, ahead = Quadratic(), 3
    model.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2))
    optimizer, most = made(ReduceBroadcast("none", sync=False, ahead=ahead), model), 0
    bucket = optimizer._grace.runner.buckets[0]
    for step in range(25):
        if grace.rank() == 0 and step == 0:  # the destination begins when the other one can go no further
            until(lambda: steps_of(tmp_path, 1) >= ahead)
        one_step(model, optimizer, step)
        Path(tmp_path, f"{grace.rank()}-{step}").touch()
        most = max(most, len(bucket.pending))
    assert grace.rank() == 0 or most == ahead
    weights = model.w.detach().clone()
    for step in optimizer._grace.runner.pending_means():
        weights -= LR * step["w"]
    torch.testing.assert_close(weights, -LR * 25 * 1.5 * TARGETS)


def test_a_copied_bucket_has_neither_the_means_nor_the_program_of_the_other():
    bucket = Bucket(0, ReduceBroadcast("topk", staleness=1), [Variable("w", (4,))])
    bucket.pending.append("of an earlier step")
    bucket.program = "made for this communicator"
    copy = dataclasses.replace(bucket, communicator=ReduceBroadcast("topk"))
    assert not copy.pending
    assert copy.program is None


@on_ranks(2, 3)
def test_an_overflow_shows_when_its_step_is_applied_and_enters_no_memory():
    model = Quadratic()
    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", staleness=1), model)
    finite = []
    for step in range(5):
        before = strategies.weights(model)
        one_step(model, optimizer, step, spoil=step == 2 and grace.rank() == 1)
        finite.append(bool(torch.isfinite(model.w.grad).all()) if model.w.grad is not None else True)
        if not finite[-1]:
            for name, p in model.named_parameters():
                p.data.copy_(before[name])  # what a scaler does: the step is skipped
    assert finite == [True, True, True, False, True]
    optimizer._grace.runner.pending_means()
    state = optimizer._grace.runner.state()
    assert all(bool(torch.isfinite(value).all()) for values in state.values() for value in values.values())


@on_ranks()
def test_what_memories_hold_is_sent_once_also_where_gradients_are_missing():
    """Rank 1 has no gradient in its second step, and nobody in the third: what memories hold is sent once, or kept."""
    model = Quadratic()
    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", staleness=1), model)
    for step in range(8):
        optimizer.zero_grad()
        if not (step == 2 or (step == 1 and grace.rank() == 1)) and step < 4:
            (model.w * TARGETS).sum().backward()
        elif step >= 4:  # zeros: what is left comes out
            (model.w * 0).sum().backward()
        optimizer.step()
    left = optimizer._grace.runner.pending_means()
    state, nothing = optimizer._grace.runner.state(), torch.zeros(3, 4)
    owed = sum((step["w"] for step in left if "w" in step), nothing)
    kept = state["memory"].get("w", nothing) / 2 + state["answer_memory"].get("w", nothing)
    total = 2 * grace.allreduce(kept) - (3 + 2) / 2 * TARGETS  # three steps of rank 0, two of rank 1, averaged
    torch.testing.assert_close(model.w.detach() - LR * owed, LR * total)


@on_ranks()
def test_gradients_that_are_dropped_are_not_applied_later():
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS, torch.ones(2))
    optimizer = made(ReduceBroadcast("none", staleness=1), model)
    (model.w * TARGETS).sum().add(model.b.sum()).backward()
    optimizer.zero_grad()  # the exchange is under way
    for step in range(3):
        one_step(model, optimizer, step)
    optimizer._grace.runner.pending_means()
    torch.testing.assert_close(model.w.detach(), -LR * 2 * TARGETS)


def applied(gradients, bad, staleness, cleared, scaler=None) -> list[float]:
    """The sums of the gradients that steps have applied, of two parameters of which one bad step's are cleared after
    ``synchronize()``: those of all, or of one alone."""
    model = Given({"w": (3,), "b": (2,)})
    optimizer = distributed(
        model,
        optimizer=lambda p: plain_sgd(p, 1.0),
        communicator=ReduceBroadcast("none", staleness=staleness),
        grad_scaler=scaler,
    )
    for step, number in enumerate(gradients):
        optimizer.zero_grad()
        loss = model({"w": torch.full((3,), number), "b": torch.full((2,), number)})
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step == bad:
            optimizer.synchronize()
            with pytest.raises(grace.ExchangeError, match=r"after optimizer.step\(\)"):
                optimizer.state_dict()
            if cleared == "all":
                optimizer.zero_grad()
                continue
            model.w.grad = None
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    optimizer._grace.runner.pending_means()
    return [-model.w[0].item(), -model.b[0].item()]


GOOD = [1.0, 10.0, 100.0, 1000.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
@on_ranks()
def test_gradients_that_are_dropped_after_synchronize_are_not_applied_later(staleness, bad):
    """And the means of earlier steps, which synchronize() has put in their place, are applied."""
    wanted = sum(GOOD) - GOOD[bad]
    assert applied(GOOD, bad, staleness, "all") == [wanted, wanted]
    of_one = wanted if bad >= staleness else sum(GOOD)  # before, there is no gradient yet that could be cleared
    assert applied(GOOD, bad, staleness, "one") == [of_one, sum(GOOD)]


@on_ranks()
def test_a_scaler_that_skips_the_means_of_an_overflow_drops_that_step_alone():
    """zero_grad() follows without a step, one step after the one that overflowed."""
    gradients = list(GOOD)
    if grace.rank() == 1:
        gradients[1] = float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert applied(gradients, None, 1, "all", scaler) == [sum(GOOD) - 10.0] * 2


@on_ranks()
def test_a_scaler_is_refused_where_ranks_would_skip_different_steps():
    model = Quadratic()
    made(ReduceBroadcast("none", sync=False), model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)).close()
    message = refusal(made, ReduceBroadcast("none", sync=False), model, grad_scaler=torch.amp.GradScaler("cpu"))
    assert "the means of 'w' are applied when they arrive (sync=False)" in message


@on_ranks()
def test_means_that_come_when_the_loss_scale_has_changed_follow_it():
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS * (4 if step < 2 else 8), torch.ones(2))
    optimizer = made(ReduceBroadcast("none", staleness=2), model)
    for step in range(3):
        optimizer._grace.runner.rescale(4.0 if step < 2 else 8.0)
        one_step(model, optimizer, step)
    torch.testing.assert_close(model.w.grad, 8 * TARGETS)
    optimizer._grace.runner.pending_means()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"compressor": "powersgd", "staleness": 1}, "powersgd needs what a step brought to begin the next"),
        ({"staleness": 2, "sync": False}, "staleness goes with sync=True only"),
        ({"ahead": 3}, "ahead goes with sync=False only"),
        ({"ahead": 0, "sync": False}, "ahead"),
        ({"staleness": -1}, r"staleness must be a whole number in \[0"),
    ],
)
def test_what_cannot_be_delayed_is_refused(how, why):
    with pytest.raises(grace.ConfigError, match=why):
        ReduceBroadcast(**how)


@on_ranks()
def test_where_nothing_can_be_delayed_it_is_refused():
    model, late = Quadratic(), ReduceBroadcast("topk(ratio=0.1)", staleness=1)
    hierarchical = refusal(made, late, model, hierarchical=True)
    assert "which is not possible with hierarchical reduction" in hierarchical
    far = refusal(made, ReduceBroadcast("none", destination=9), model)
    assert "rank 9 cannot be the destination, there are 2 ranks" in far
    wrapped, register = ddp(torch.nn.Linear(2, 2)), grace.torch.register_ddp_hook
    by_hook = refusal(register, wrapped, communicator=late)
    assert "which DDP's hook cannot" in by_hook
    for small in hierarchical, by_hook:  # the user's method is named, though all variables are too small for it
        assert small.startswith("reduce_broadcast(staleness=1), topk(ratio=0.1), residual applies means")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRACE_STRATEGY", "s.yaml")
        by_file = refusal(register, wrapped, "topk")
    assert "the strategy of GRACE_STRATEGY (s.yaml) says how each variable is exchanged, and compressor=" in by_file


@on_ranks()
def test_a_scaler_steps_although_nothing_has_come_yet():
    """The weight after each step of a scaler's loop; gradients are 1 on all ranks."""
    model = Given({"w": (4,)})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    choices = {"communicator": "reduce_broadcast(staleness=2)", "grad_scaler": scaler}
    optimizer = distributed(model, optimizer=lambda p: plain_sgd(p, 1.0), **choices)
    for wanted in (0, 0, -1, -2):
        optimizer.zero_grad()
        scaler.scale(model.w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert float(model.w[0]) == wanted


@pytest.mark.parametrize("resumed", [False, True])
@on_ranks()
def test_a_step_that_a_scaler_skips_for_an_earlier_overflow_is_over(resumed):
    """A scaler's loop that sums overflow in float16; the optimizer is saved at each step, and resumed as a new one."""
    model = Given({"w": (4,)})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    choices = {"compressor": "fp16", "memory": "residual", "communicator": "reduce_broadcast(staleness=1)"}

    def made_anew():
        return distributed(model, optimizer=lambda p: plain_sgd(p, 1.0), **choices, grad_scaler=scaler)

    optimizer = made_anew()
    for scale, weight in ((2.0**15, 0), (2.0**14, 0), (2.0**13, 0), (2.0**13, -1), (2.0**13, -2)):
        optimizer.zero_grad()
        scaler.scale(model.w.sum()).backward()
        optimizer.synchronize()  # before clipping
        scaler.step(optimizer)
        scaler.update()
        saved = optimizer.full_state_dict()
        if resumed:
            optimizer.close()
            optimizer = made_anew()
            optimizer.load_state_dict(saved)
        assert (scaler.get_scale(), float(model.w.detach()[0])) == (scale, weight)


@on_ranks()
def test_means_are_encoded_at_the_learning_rate_of_their_step():
    """The destination's memory of means keeps it, whose thread runs when the rate is another."""
    model, changed, run = Quadratic(), threading.Event(), RoundTripFuture.run

    def run_later(future, check):
        assert changed.wait(HANGS)
        run(future, check)

    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", "efsignsgd", staleness=1), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundTripFuture, "run", run_later)
        one_step(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = LR / 4
        changed.set()
        optimizer._grace.runner.pending_means()
    kept = optimizer._grace.runner.state().get("answer_memory", {})
    assert [of["lr"] for of in kept.values()] == ([LR, LR] if grace.rank() == 0 else [])


@pytest.mark.every
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize(("compressor", "first"), [(Whole, 3), (TopK, 2)], ids=["own", "topk"])
@on_ranks()
def test_steps_share_as_many_programs_as_are_under_way_and_compare_unknown_sizes_once(compressor, first, staleness):
    """Each step starts as many collectives as are expected."""
    model, programs = Quadratic(), set()
    optimizer = made(ReduceBroadcast(compressor(), staleness=staleness), model, group_bytes=1000)
    (bucket,) = optimizer._grace.runner.buckets
    backend = optimizer._grace.runner.exchange_thread().backend
    counts = [backend.started]
    for step in range(8):
        one_step(model, optimizer, step)
        future = bucket.pending[-1]
        programs.add(future.round_trip.program)
        future.done.wait(HANGS)
        counts.append(backend.started)
    optimizer._grace.runner.pending_means()
    assert [after - before for before, after in pairwise(counts)] == [first, *[2] * 7]
    assert len(programs) == staleness + 1


@on_ranks()
def test_payloads_are_held_to_the_sizes_of_the_first_step_though_they_are_compared_once():
    model = Quadratic()
    communicator = ReduceBroadcast(Shrinking(), staleness=1)
    optimizer = made(communicator, model)

    def steps():
        for step in range(8):
            communicator.compressor.wrong = step == 4 and grace.rank() == 1  # seen by the copies for the thread
            one_step(model, optimizer, step)

    here = "rank 1 has not sent its payload of 'w' at step 4, which is laid out otherwise than at the first"
    assert ("the payload of 'w' has the shapes" if grace.rank() else here) in refusal(steps, kind=PayloadError)


@pytest.mark.parametrize("staleness", [0, 2])
@on_ranks()
def test_an_error_about_hyperparameters_names_those_of_the_step_that_differed(staleness):
    """The learning rate of one rank is another for one step, and right again before anybody knows."""
    model = Quadratic()
    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", staleness=staleness), model)

    def steps():
        for step in range(3 + staleness):
            optimizer.param_groups[0]["lr"] = 2 * LR if step == 1 and grace.rank() == 1 else LR
            one_step(model, optimizer, step)
        optimizer._grace.runner.pending_means()

    group = "optimizer SGD, param group 0, lr"
    assert f"rank 0 has {group} 0.1, rank 1 has {group} 0.2" in refusal(steps, kind=StepError)


class OneLater(Allgather):
    """A user's communicator whose means are applied in the next step."""

    name = "one_later"
    delayed = True


@on_ranks()
def test_a_users_communicator_may_delay_means():
    model = Quadratic()
    _, optimizer, history = trained(range(4), model, made(OneLater("none"), model))
    for got, expected in zip(history, delayed(2, 1, 4), strict=True):
        strategies.assert_close(got, expected)
    optimizer._grace.runner.pending_means()
    return digest(history)
