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
from grace.core.variable import Variable
from grace.errors import PayloadError, StepError
from grace.exchange.bucket import Bucket
from grace.exchange.delayed import Pending
from tests.support import strategies
from tests.support.limits import HANGS, until
from tests.support.own_parts import Shrinking, Whole
from tests.support.pools import on_ranks
from tests.support.training import Given, copied, digest, distributed, plain_sgd, refusal

pytestmark = pytest.mark.ranks
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
def test_the_mean_of_a_step_is_applied_that_many_steps_later(ranks, staleness):
    wanted = delayed(ranks.size, staleness, 7)
    for history in ranks.run(weights_of, staleness, ranks.size - 1):
        for got, expected in zip(history, wanted, strict=True):
            strategies.assert_close(got, expected)


def plain_weights() -> list:
    model = Quadratic()
    return trained(range(7), model, made(None, model))[2]


def test_without_staleness_the_bits_are_those_of_plain_all_reduce(two_ranks):  # of two: any order adds alike
    for got, wanted in zip(two_ranks.run(weights_of, 0, 1), two_ranks.run(plain_weights), strict=True):
        assert [digest(step) for step in got] == [digest(step) for step in wanted]


def steps_of(folder, rank: int) -> int:
    """How many steps a rank has ended."""
    return len(list(Path(folder).glob(f"{rank}-*")))


def leads_of(staleness: int, late: int, folder: str) -> list[int]:
    """What the others have ended when this rank, which is late, begins a step: as many steps as they may, it waits
    until they have; and what they have a little later."""
    model, steps = Quadratic(), 8
    optimizer = made(ReduceBroadcast(staleness=staleness, destination=1), model)
    others, leads = set(range(grace.size())) - {late}, []
    for step in range(steps):
        if grace.rank() == late:
            until(lambda step=step: all(steps_of(folder, r) >= min(steps, step + staleness) for r in others))
            time.sleep(0.02)  # somebody who may run on does so
            leads.append(max(steps_of(folder, r) for r in others) - step)
        one_step(model, optimizer, step)
        Path(folder, f"{grace.rank()}-{step}").touch()
    optimizer._grace.runner.pending()  # so that nobody is still at it when the next test begins
    return leads


@pytest.mark.parametrize("late", [0, 1], ids=["a-rank-is-late", "the-destination-is-late"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_rank_runs_as_far_ahead_as_it_may_and_no_further(ranks, staleness, late, tmp_path):
    leads = ranks.run(leads_of, staleness, late, str(tmp_path))[late]
    assert leads == [min(staleness, 8 - step) for step in range(8)]


METHODS = ("topk(ratio=0.3)", "qsgd(levels=7)", "signsgd", "threshold(value=0.05)", "fp16", "randomk(ratio=0.5)")


def bits_of(method: str, staleness: int) -> tuple[str, bool]:
    model, optimizer, _ = trained(range(6), compressor=method, staleness=staleness)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    optimizer._grace.runner.pending()
    return digest(strategies.weights(model)), finite


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_run_ahead_end_with_the_same_bits(ranks, method):
    answers = ranks.run(bits_of, method, 2)
    assert len({bits for bits, _ in answers}) == 1
    assert all(finite for _, finite in answers)


def resumed(method: str, staleness: int, everyone: bool) -> bool:
    """Eight steps at once, and five, a new model and optimizer with what was saved, and three."""
    whole, optimizer, _ = trained(range(8), compressor=method, staleness=staleness, destination=1)
    optimizer._grace.runner.pending()
    part, optimizer, _ = trained(range(5), compressor=method, staleness=staleness, destination=1)
    saved = copied(optimizer.full_state_dict() if everyone else optimizer.state_dict())
    again = Quadratic()
    again.load_state_dict(part.state_dict())
    optimizer = made(ReduceBroadcast(method, destination=1, staleness=staleness), again)
    optimizer.load_state_dict(saved)
    trained(range(5, 8), again, optimizer)
    optimizer._grace.runner.pending()
    return digest(strategies.weights(whole)) == digest(strategies.weights(again))


@pytest.mark.parametrize("everyone", [False, True], ids=["each-rank", "all-ranks"])
@pytest.mark.parametrize("method", ["none", "topk(ratio=0.3)", "qsgd(levels=7)"])
def test_a_run_that_is_resumed_with_means_on_their_way_equals_one_that_never_stopped(ranks, method, everyone):
    assert all(ranks.run(resumed, method, 2, everyone))


def under_less(staleness: int, strategy: bool) -> tuple:
    """What six steps of constant gradients add up to if the last two are made with less staleness."""
    before = Quadratic()
    before.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2) * step)
    optimizer = made(None, before, strategy=_strategy(before, 3, cut=False))
    trained(range(4), before, optimizer)
    saved = copied(optimizer.full_state_dict())
    after = Quadratic()
    after.load_state_dict(before.state_dict())
    after.gradients = before.gradients
    optimizer = made(None, after, strategy=_strategy(after, staleness, cut=strategy))
    optimizer.load_state_dict(saved)
    trained(range(4, 6), after, optimizer)
    pending = [dict(step) for step in optimizer._grace.runner.pending()]
    return strategies.weights(after), pending


def _strategy(model, staleness, cut):
    from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
    from grace.torch.parameters import make_variables

    part = ShardPlan(Sync("reduce_broadcast", staleness=staleness))
    w, b = make_variables(dict(model.named_parameters()))
    first = VariablePlan(w, (part, part), 0, (1, 2)) if cut else VariablePlan(w, (part,))
    return Strategy((first, VariablePlan(b, (part,))), grace.size(), 1)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_means_on_their_way_are_applied_under_another_staleness(ranks, staleness, cut):
    total = -LR * (ranks.size + 1) / 2 * TARGETS
    for values, pending in ranks.run(under_less, staleness, cut):
        assert len(pending) == staleness
        left = sum(
            (torch.cat([step["w/part_0"], step["w/part_1"]]) if cut else step["w"] for step in pending),
            torch.zeros(3, 4),
        )
        torch.testing.assert_close(values["w"] - LR * left, 6 * total)


def within_the_bound(folder: str) -> torch.Tensor:
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2))
    optimizer = made(ReduceBroadcast("none", sync=False), model)
    for step in range(6):
        if grace.rank() == 0 and step == 0:  # the others have ended all their steps before it begins its first
            until(lambda: all(steps_of(folder, rank) == 6 for rank in range(1, grace.size())))
        one_step(model, optimizer, step)
        Path(folder, f"{grace.rank()}-{step}").touch()
    saved = copied(optimizer.state_dict())  # waits for what is on its way
    optimizer.close()
    optimizer = made(ReduceBroadcast("none"), model, broadcast=False)
    optimizer._grace.runner.restore_pending(saved["grace"]["pending"])
    one_step(model, optimizer, 6)
    return model.w.detach().clone()


def test_within_the_bound_nobody_waits_and_nothing_is_lost(ranks, tmp_path):
    for value in ranks.run(within_the_bound, str(tmp_path)):
        torch.testing.assert_close(value, -LR * 7 * (ranks.size + 1) / 2 * TARGETS)


def far_ahead(steps: int, ahead: int, folder: str) -> tuple[int, torch.Tensor]:
    """The most exchanges that were ever under way, and the weights when all means are applied."""
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS * (rank + 1), torch.ones(2))
    optimizer, most = made(ReduceBroadcast("none", sync=False, ahead=ahead), model), 0
    bucket = optimizer._grace.runner.buckets[0]
    for step in range(steps):
        if grace.rank() == 0 and step == 0:  # the destination begins when the other one can go no further
            until(lambda: steps_of(folder, 1) >= ahead)
        one_step(model, optimizer, step)
        Path(folder, f"{grace.rank()}-{step}").touch()
        most = max(most, len(bucket.pending))
    weights = model.w.detach().clone()
    for step in optimizer._grace.runner.pending():
        weights -= LR * step["w"]
    return most, weights


def test_without_sync_no_more_steps_are_under_way_than_may_be(two_ranks, tmp_path):
    (_, destination), (most, other) = two_ranks.run(far_ahead, 25, 3, str(tmp_path))
    assert most == 3
    for weights in (destination, other):
        torch.testing.assert_close(weights, -LR * 25 * 1.5 * TARGETS)


def test_a_copied_bucket_has_neither_the_means_nor_the_program_of_the_other():
    bucket = Bucket(0, ReduceBroadcast("topk", staleness=1), [Variable("w", (4,))])
    bucket.pending.append("of an earlier step")
    bucket.program = "made for this communicator"
    copy = dataclasses.replace(bucket, communicator=ReduceBroadcast("topk"))
    assert not copy.pending
    assert copy.program is None


def spoilt() -> tuple[list[bool], bool]:
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
    optimizer._grace.runner.pending()
    state = optimizer._grace.runner.state()
    kept = [value for values in state.values() for value in values.values()]
    return finite, all(bool(torch.isfinite(value).all()) for value in kept)


def test_an_overflow_shows_when_its_step_is_applied_and_enters_no_memory(ranks):
    for finite, kept in ranks.run(spoilt):
        assert finite == [True, True, True, False, True]
        assert kept


def absent() -> tuple[torch.Tensor, torch.Tensor]:
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
    left = optimizer._grace.runner.pending()
    state = optimizer._grace.runner.state()
    owed = sum((step["w"] for step in left if "w" in step), torch.zeros(3, 4))
    kept = state["memory"].get("w", torch.zeros(3, 4))
    return model.w.detach() - LR * owed, LR * kept, LR * state["answer_memory"].get("w", torch.zeros(3, 4))


def test_what_memories_hold_is_sent_once_also_where_gradients_are_missing(two_ranks):
    answers = two_ranks.run(absent)
    total = -LR * (3 + 2) / 2 * TARGETS  # three steps of rank 0, two of rank 1, averaged
    kept = sum(own for _, own, _ in answers) / 2 + sum(answer for _, _, answer in answers)
    for value, _, _ in answers:
        torch.testing.assert_close(value - kept, total)


def dropped() -> torch.Tensor:
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS, torch.ones(2))
    optimizer = made(ReduceBroadcast("none", staleness=1), model)
    (model.w * TARGETS).sum().add(model.b.sum()).backward()
    optimizer.zero_grad()  # the exchange is under way
    for step in range(3):
        one_step(model, optimizer, step)
    optimizer._grace.runner.pending()
    return model.w.detach().clone()


def test_gradients_that_are_dropped_are_not_applied_later(two_ranks):
    for value in two_ranks.run(dropped):
        torch.testing.assert_close(value, -LR * 2 * TARGETS)


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
    optimizer._grace.runner.pending()
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


def scaled_without_a_bound() -> str:
    model = Quadratic()
    made(ReduceBroadcast("none", sync=False), model, grad_scaler=torch.amp.GradScaler("cpu", enabled=False)).close()
    scaler = torch.amp.GradScaler("cpu")
    return refusal(made, ReduceBroadcast("none", sync=False), model, grad_scaler=scaler)


def test_a_scaler_is_refused_where_ranks_would_skip_different_steps(two_ranks):
    for message in two_ranks.run(scaled_without_a_bound):
        assert "the means of 'w' are applied when they arrive (sync=False)" in message


def scaled() -> torch.Tensor:
    """Means that come when the loss scale has changed."""
    model = Quadratic()
    model.gradients = lambda step, rank: (TARGETS * (4 if step < 2 else 8), torch.ones(2))
    optimizer = made(ReduceBroadcast("none", staleness=2), model)
    runner, got = optimizer._grace.runner, []
    for step in range(4):
        runner.rescale(4.0 if step < 2 else 8.0)
        one_step(model, optimizer, step)
        got.append(None if model.w.grad is None else model.w.grad.clone())
    runner.pending()
    return got[2]


def test_means_follow_the_loss_scale(two_ranks):
    for value in two_ranks.run(scaled):
        torch.testing.assert_close(value, 8 * TARGETS)


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


def refusals() -> list[str]:
    model, told = Quadratic(), []
    late = ReduceBroadcast("topk(ratio=0.1)", staleness=1)
    for communicator, options in ((late, {"hierarchical": True}), (ReduceBroadcast("none", destination=9), {})):
        with pytest.raises(grace.ConfigError) as error:
            made(communicator, model, **options)
        told.append(str(error.value))
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(grace.ConfigError) as error:
        grace.torch.register_ddp_hook(ddp, communicator=late)
    told.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRACE_STRATEGY", "s.yaml")
        with pytest.raises(grace.ConfigError) as error:
            grace.torch.register_ddp_hook(ddp, "topk")
    return [*told, str(error.value)]


def test_where_nothing_can_be_delayed_it_is_refused(two_ranks):
    for told in two_ranks.run(refusals):
        assert "which is not possible with hierarchical reduction" in told[0]
        assert "rank 9 cannot be the destination, there are 2 ranks" in told[1]
        assert "which DDP's hook cannot" in told[2]
        for small in told[0], told[2]:  # the user's method is named, though all variables are too small for it
            assert small.startswith("reduce_broadcast(staleness=1), topk(ratio=0.1), residual applies means")
        assert "the strategy of GRACE_STRATEGY (s.yaml) says how each variable is exchanged, and compressor=" in told[3]


def scaled_ahead():
    """The weight after each step of a scaler's loop over a delayed exchange; gradients are 1 on all ranks."""
    model = Given({"w": (4,)})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    choices = {"communicator": "reduce_broadcast(staleness=2)", "grad_scaler": scaler}
    optimizer = distributed(model, optimizer=lambda p: plain_sgd(p, 1.0), **choices)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model.w.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(float(model.w[0]))
    return found


def test_a_scaler_steps_although_nothing_has_come_yet(two_ranks):
    assert two_ranks.run(scaled_ahead) == [[0, 0, -1, -2]] * 2


def overflowing(resumed):
    """The scales and weights of a scaler's loop that sums overflow in float16; the optimizer is saved at each step, and
    ``resumed`` as a new one if that is True."""
    model = Given({"w": (4,)})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    choices = {"compressor": "fp16", "memory": "residual", "communicator": "reduce_broadcast(staleness=1)"}

    def made_anew():
        return distributed(model, optimizer=lambda p: plain_sgd(p, 1.0), **choices, grad_scaler=scaler)

    optimizer = made_anew()
    found = []
    for _ in range(5):
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
        found.append((scaler.get_scale(), float(model.w.detach()[0])))
    return found


@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_that_a_scaler_skips_for_an_earlier_overflow_is_over(two_ranks, resumed):
    scales = [2.0**15, 2.0**14, 2.0**13, 2.0**13, 2.0**13]
    weights = [0, 0, 0, -1, -2]
    assert two_ranks.run(overflowing, resumed) == [list(zip(scales, weights, strict=True))] * 2


def rate_of_means():
    """The learning rate of what the destination's memory of means keeps, whose thread runs when the rate is another."""
    model, changed, run = Quadratic(), threading.Event(), Pending.run

    def run_later(pending, check):
        assert changed.wait(HANGS)
        run(pending, check)

    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", "efsignsgd", staleness=1), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pending, "run", run_later)
        one_step(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = LR / 4
        changed.set()
        optimizer._grace.runner.pending()
    return [kept["lr"] for kept in optimizer._grace.runner.state().get("answer_memory", {}).values()]


def test_means_are_encoded_at_the_learning_rate_of_their_step(two_ranks):
    (of_destination, _) = two_ranks.run(rate_of_means)
    assert of_destination == [LR, LR]


def counted(spec: str, steps: int, staleness: int) -> tuple[list[int], int]:
    """How many collectives each step has started, and of how many programs."""
    model, programs = Quadratic(), set()
    compressor = Whole() if spec == "own" else spec
    optimizer = made(ReduceBroadcast(compressor, staleness=staleness), model, group_bytes=1000)
    (bucket,) = optimizer._grace.runner.buckets
    backend = optimizer._grace.runner.exchange_thread().backend
    counts = [backend.started]
    for step in range(steps):
        one_step(model, optimizer, step)
        pending = bucket.pending[-1]
        programs.add(pending.round_trip.program)
        pending.done.wait(HANGS)
        counts.append(backend.started)
    optimizer._grace.runner.pending()
    return [after - before for before, after in pairwise(counts)], len(programs)


@pytest.mark.parametrize("staleness", [1, 3])
def test_steps_share_as_many_programs_as_are_under_way_and_compare_unknown_sizes_once(two_ranks, staleness):
    for collectives, programs in two_ranks.run(counted, "own", 8, staleness):
        assert collectives == [3, *[2] * 7]
        assert programs == staleness + 1
    for collectives, programs in two_ranks.run(counted, "topk(ratio=0.3)", 8, staleness):
        assert collectives == [2] * 8
        assert programs == staleness + 1


def shrunk() -> str:
    model = Quadratic()
    communicator = ReduceBroadcast(Shrinking(), staleness=1)
    optimizer = made(communicator, model)

    def steps():
        for step in range(8):
            communicator.compressor.wrong = step == 4 and grace.rank() == 1  # seen by the copies for the thread
            one_step(model, optimizer, step)

    return refusal(steps, kind=PayloadError)


def test_payloads_are_held_to_the_sizes_of_the_first_step_though_they_are_compared_once(two_ranks):
    here, there = two_ranks.run(shrunk)
    assert "rank 1 has not sent its payload of 'w' at step 4, which is laid out otherwise than at the first" in here
    assert "the payload of 'w' has the shapes" in there


def drifted(staleness: int) -> str:
    """The learning rate of one rank is another for one step, and right again before anybody knows."""
    model = Quadratic()
    optimizer = made(ReduceBroadcast("topk(ratio=0.3)", staleness=staleness), model)

    def steps():
        for step in range(3 + staleness):
            optimizer.param_groups[0]["lr"] = 2 * LR if step == 1 and grace.rank() == 1 else LR
            one_step(model, optimizer, step)
        optimizer._grace.runner.pending()

    return refusal(steps, kind=StepError)


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_error_about_hyperparameters_names_those_of_the_step_that_differed(two_ranks, staleness):
    for said in two_ranks.run(drifted, staleness):
        assert (
            "rank 0 has optimizer SGD, param group 0, lr 0.1, rank 1 has optimizer SGD, param group 0, lr 0.2" in said
        )


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
    optimizer._grace.runner.pending()
    return digest(history)
