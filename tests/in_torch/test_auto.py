"""``strategy="auto"``: what is tried and kept, on real ranks whose steps take as long as a test says."""

import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import grace
from grace.planner import auto_planner, step_timer
from grace.planner.driver import WARM
from tests.support.drawing import THOROUGH
from tests.support.passing import passing, time_by_hand
from tests.support.planners import (
    METHODS,
    NONE_FASTEST,
    SHAPES,
    SLEEPS,
    TOPK,
    TURN,
    UNTIL_CHOSEN,
    UNTIL_TRYING,
    Planning,
)
from tests.support.pools import on_ranks
from tests.support.training import Given, copied, digest, made_up, refusal, train_given, weights

PLANNING = auto_planner.AutoPlanner
"""The planner itself."""
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def made(failing=None, replan=0, lr=1.0, momentum=0.0, planner=Planning, **options):
    """A model and its optimizer under auto, whose planner is made up."""
    time_by_hand()
    auto_planner.AutoPlanner = planner  # which the driver is made with
    planner.failing = failing
    model = Given(SHAPES)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, grace.DistributedOptimizer(optimizer, model, strategy=f"auto(replan={replan})", **options)


def steps(model, optimizer, numbers, sleeps=SLEEPS):
    for step in numbers:
        optimizer.zero_grad()
        model.backward(made_up(SHAPES, step, grace.rank()))
        passing.sleep(sleeps[optimizer._grace.driver.current])
        optimizer.step()


def on_the_mean(count, size):
    return {
        name: -sum(made_up(SHAPES, step, rank)[name] for step in range(count) for rank in range(size)) / size
        for name in SHAPES
    }


def choosing(sleeps=SLEEPS, **options):
    """Return the choice, the methods tried, and the weights, which are the same on all ranks all the time."""
    model, optimizer = made(**options)
    seen = []
    for step in range(UNTIL_CHOSEN + 3):
        steps(model, optimizer, [step], sleeps)
        seen.append(optimizer._grace.driver.current)
        assert len(set(grace.init().allgather_object(digest(weights(model))))) == 1
    plan = optimizer._grace.driver.plan
    return plan and plan["chosen"], seen, weights(model)


@pytest.mark.parametrize("engine", ["gloo", *(["horovodrun-gloo"] if THOROUGH else []), "mpirun-mpi"])
@on_ranks()
def test_the_fastest_is_kept(engine):
    chosen, seen, _ = choosing()
    assert chosen == TOPK
    assert seen[: UNTIL_TRYING - 1] == ["none"] * (UNTIL_TRYING - 1)
    assert set(seen) == set(METHODS)
    assert set(seen[UNTIL_CHOSEN:]) == {TOPK}


@on_ranks(3)
def test_nothing_is_lost_by_trying():
    chosen, _, got = choosing(NONE_FASTEST)
    assert chosen == "none"
    for name, wanted in on_the_mean(UNTIL_CHOSEN + 3, 3).items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-3)


@on_ranks()
def test_another_plan_is_made_where_steps_take_something_else():
    """Gradients are not lost in between."""
    model, optimizer = made(replan=4)
    count = UNTIL_CHOSEN
    steps(model, optimizer, range(count))
    auto = optimizer._grace.driver
    assert (auto.plan, auto.current) == ({"chosen": TOPK}, TOPK)
    more = 4 + UNTIL_CHOSEN - WARM + 1  # with a step that sends what the last trial kept
    steps(model, optimizer, range(count, count + more), NONE_FASTEST)
    auto = optimizer._grace.driver
    assert (auto.plan, auto.current) == ({"chosen": "none"}, "none")
    for name, wanted in on_the_mean(count + more, 2).items():
        np.testing.assert_allclose(weights(model)[name], wanted, rtol=1e-4, atol=1e-3)


@on_ranks()
def test_all_train_on_where_planning_fails_on_one():
    chosen, seen, _ = choosing(failing=1)
    assert chosen is None
    assert set(seen) == {"none"}


def resumed(stop, count, folder=None):
    """Digests of a run in one piece, and of one that was saved and went on in another model: by a full state, or by
    torch.distributed.checkpoint, with memories as a part of their own."""
    engine, parts = grace.init(), {}
    if folder is not None and engine.name != "torch":  # each saves for itself
        folder = folder / str(engine.rank)

    def all_of(model, optimizer):
        """Return the states that a program saves; memories are apart from here on."""
        memories = parts.setdefault(id(optimizer), grace.torch.Memories(optimizer))
        torchs = get_optimizer_state_dict(model, optimizer, options=FLAT)
        return {"model": model.state_dict(), "optimizer": torchs, "memories": memories}

    one, optimizer = made(lr=0.1, momentum=0.9)
    steps(one, optimizer, range(stop))
    if folder is None:
        saved = copied({"model": one.state_dict(), "optimizer": optimizer.full_state_dict()})
    else:
        dcp.save(all_of(one, optimizer), checkpoint_id=folder)
    steps(one, optimizer, range(stop, stop + count))
    two, other = made(lr=0.1, momentum=0.9)
    steps(two, other, range(2))
    if folder is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(saved["optimizer"])
    else:
        dcp.load(saved := all_of(two, other), checkpoint_id=folder)
        set_optimizer_state_dict(two, other, saved["optimizer"], options=FLAT)
    two.load_state_dict(saved["model"])
    started = other._grace.driver.current
    assert other.strategy is not None
    steps(two, other, range(stop, stop + count))
    return started, digest(weights(one)), digest(weights(two)), optimizer._grace.driver.plan, other._grace.driver.plan


RESUMED = [("gloo", False), ("horovodrun-gloo", True)]
if THOROUGH:  # the engines' states are the same
    RESUMED += [("mpirun-mpi", False), ("gloo", True)]


@pytest.mark.parametrize(("engine", "apart"), RESUMED)
@on_ranks()
def test_a_settled_run_resumes_bit_for_bit_also_from_torchs_checkpoints(engine, apart, tmp_path):
    folder = tmp_path if apart else None
    started, one, two, plan, other = resumed(UNTIL_CHOSEN + 2, 5, folder)
    assert started == TOPK
    assert one == two
    assert plan == other == {"chosen": TOPK}


@on_ranks()
def test_a_run_that_still_tries_resumes_with_what_it_tried():
    started, _, _, _, other = resumed(UNTIL_TRYING + TURN + 2, UNTIL_CHOSEN)
    assert started == TOPK
    assert other == {"chosen": TOPK}


def saved_plan():
    model, optimizer = made()
    steps(model, optimizer, range(UNTIL_CHOSEN + 1))
    return copied(optimizer.full_state_dict())


def loading(saved):
    model, optimizer = made()
    steps(model, optimizer, range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.load_state_dict(saved)
        except grace.GraceError as error:
            return f"{type(error).__name__}: {error}", optimizer._grace.driver.current
    steps(model, optimizer, range(2, UNTIL_CHOSEN + 3))
    return " ".join(str(w.message) for w in caught), optimizer._grace.driver.current


def saved_run():
    model, optimizer = made()
    steps(model, optimizer, range(UNTIL_CHOSEN + 1))
    return copied({"model": model.state_dict(), "optimizer": optimizer.full_state_dict()})


def going_on(saved):
    """Resume where no compression is the fastest now; return the choice and the weights."""
    model, optimizer = made()
    model.load_state_dict(saved["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, range(UNTIL_CHOSEN + 1, 2 * UNTIL_CHOSEN + 3), NONE_FASTEST)
    return optimizer._grace.driver.plan, optimizer._grace.driver.current, weights(model)


def test_another_number_of_ranks_plans_anew_and_nothing_is_lost(two_ranks, three_ranks):
    (saved, _) = two_ranks.run(saved_run)
    before, after = UNTIL_CHOSEN + 1, 2 * UNTIL_CHOSEN + 3
    for plan, current, got in three_ranks.run(going_on, saved):
        assert (plan, current) == ({"chosen": "none"}, "none")
        for name, wanted in on_the_mean(before, 2).items():
            wanted = wanted + on_the_mean(after, 3)[name] - on_the_mean(before, 3)[name]
            np.testing.assert_allclose(got[name], wanted, rtol=1e-4, atol=1e-3)


@on_ranks()
def test_a_damaged_plan_is_refused_by_all():
    saved = saved_plan()
    said, current = loading({**saved, "grace": {**saved["grace"], "plan": "{"}})
    assert "damaged" in said
    assert current == "none"


@on_ranks()
def test_steps_that_overflow_and_gradients_that_accumulate():
    """With a scaler, an overflow in each phase, and two backward passes a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    model, optimizer = made(grad_scaler=scaler, backward_passes_per_step=2)
    for step in range(UNTIL_CHOSEN + 12):
        optimizer.zero_grad()
        for half in range(2):
            given = made_up(SHAPES, 2 * step + half, grace.rank())
            if step % 9 == 4:
                given["w"][0, 0] = np.inf
            scaler.scale(model(given)).backward()
        passing.sleep(SLEEPS[optimizer._grace.driver.current])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer._grace.driver.plan == {"chosen": TOPK}
    assert all(w.isfinite().all() for w in weights(model).values())
    return digest(weights(model))


@pytest.mark.parametrize("count", [WARM + 1, UNTIL_TRYING + TURN + 1])
@on_ranks()
def test_a_choice_by_hand_ends_planning(count):
    model, optimizer = made()
    steps(model, optimizer, range(count))
    optimizer.use_strategy(f"uniform(compressor={TOPK})")
    steps(model, optimizer, range(count, UNTIL_CHOSEN), {**SLEEPS, "": 0.0})
    kinds = {plan.parts[0].compressor for plan in optimizer.strategy.plans if plan.variable.name != "b"}
    assert optimizer.plan is None
    assert "plan" not in optimizer.full_state_dict()["grace"]
    assert kinds == {TOPK}
    return digest(weights(model))


@on_ranks()
def test_all_ranks_plan_or_none():
    model = Given(SHAPES)
    optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.1), "auto" if grace.rank() == 0 else "uniform"
    said = refusal(grace.DistributedOptimizer, optimizer, model, strategy=strategy, kind=grace.RankError)
    assert "the strategy auto" in said


def planned(count, slower=0.0):
    """A small network planned by the planner itself, whose last rank computes longer."""
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.01
    auto_planner.AutoPlanner, step_timer.time = PLANNING, time
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(
        optimizer, model, strategy="auto(methods=['fp16', 'topk(ratio=0.01)', 'powersgd(rank=2)'])"
    )
    assert optimizer.plan is None
    for step in range(count):
        torch.manual_seed(100 * step + grace.rank())
        optimizer.zero_grad()
        time.sleep(slower * (grace.rank() == grace.size() - 1))
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    plan, strategy = optimizer.plan, optimizer.strategy
    methods = {part.compressor for each in strategy.plans for part in each.parts}
    # on a busy machine all may have gone back to the sums that they began with
    executed = strategy.id == plan.chosen.strategy.id if plan.compresses else methods == {"none"}
    return str(plan), digest(weights(model)), executed, plan.plain.prediction


@on_ranks()
def test_the_planner_itself():
    plan, ends, executed, _ = planned(80)
    assert executed
    for words in ("none", "fp16  ", "measured"):
        assert words in plan
    return plan, ends


@on_ranks()
def test_waiting_for_a_slower_rank_is_no_time_of_the_link():
    plan, *_, plain = planned(80, 0.03)
    assert plain.compute > 0.03
    assert plain.exposed < 0.03
    assert "the slowest rank computes" in plan
    assert "no compression shortens what the others wait for it" in plan


def test_one_process_has_nothing_to_exchange(local, capfd):
    auto_planner.AutoPlanner = PLANNING
    model = Given(SHAPES)
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy="auto")
    train_given(model, optimizer, range(UNTIL_TRYING + 1))
    assert optimizer.plan is None
    assert "uncompressed: there is one rank" in capfd.readouterr().err
