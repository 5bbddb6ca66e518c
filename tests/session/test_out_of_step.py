"""Ranks that go different ways: one that leaves out a step, or makes it with other hyperparameters, is an error on all
ranks at the next exchange, which names it; what all leave out together is none."""

import itertools
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import grace
from grace.communicators import Allgather
from grace.core.context import Context
from grace.errors import PayloadError, StepError
from grace.exchange import header
from grace.memories.residual import Residual
from grace.torch.parameters import hyperparameters
from tests.communicators.test_own import Gathering
from tests.support.by_hand import started_by_hand
from tests.support.engine_pools import available, command, environment
from tests.support.limits import HANGS
from tests.support.own_parts import Shrinking
from tests.support.pools import launched, on_ranks
from tests.support.strategies import uneven
from tests.support.training import ddp, digest, distributed, loss_of, net, refusal, sgd, state_of, weights

pytestmark = pytest.mark.ranks
PROGRAMS = Path(__file__).parent.parent / "programs"

STALE = "exchange of bucket 0 (weight .. bias; reduce_broadcast(staleness=2), none, none)"
STEPS, WRONG_AT, WRONG = 6, 2, 1
"""Steps are made, and this rank is wrong in this one."""
LEFT_OUT = "rank 1 is at step 2, {others} at step 3: rank 1 left out optimizer.step()"
SKIPPED = "{others} at step 2, rank 1 is at step 3: rank 1 called optimizer.zero_grad() and left out backward()"
CLEARED = "rank 1 called optimizer.zero_grad() and left out backward(), or cleared once more than the others: clear on"
SLOWER = (
    "the first difference: rank 0 has optimizer SGD, param group 0, lr 0.05, rank 1 has optimizer SGD, param group 0, "
    "lr 0.01"
)
FAULTS = {"step": LEFT_OUT, "step after synchronize": LEFT_OUT, "backward": SKIPPED, "learning rate": SLOWER}


def one_step(model, optimizer, step: int, fault: str = "") -> None:
    """A step of a loop that leaves out what is faulty."""
    optimizer.zero_grad()
    if fault == "clear once more":
        optimizer.zero_grad()
    loss = loss_of(model, step)
    if fault == "backward":
        return
    loss.backward()
    if fault == "step":
        return
    if fault == "step after synchronize":
        optimizer.synchronize()
        return
    if fault == "learning rate":
        optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()


def with_fault(fault: str, method: str, everywhere: bool = False, **options) -> tuple[str, bool, int]:
    """Train with a fault on one rank: the error, whether it changed anything, and in which step it came."""
    model = net()
    with uneven():
        optimizer = distributed(model, method, **options)
    for step in range(STEPS):
        before = digest([weights(model), state_of(optimizer)])
        wrong = step == WRONG_AT and (everywhere or grace.rank() == WRONG)
        try:
            one_step(model, optimizer, step, fault if wrong else "")
        except StepError as error:
            return str(error), digest([weights(model), state_of(optimizer)]) != before, step
    return digest(weights(model)), False, STEPS


def all_faults(faults, method, communicator=None, everywhere=False):
    return {fault: with_fault(fault, method, everywhere, communicator=communicator) for fault in faults}


def check(answers, faults=tuple(FAULTS)) -> None:
    """Every rank has said who is wrong, in the step after, and kept what it had."""
    others = "rank 0 is" if len(answers) == 2 else "ranks 0 and 2 are"
    for fault in faults:
        for rank, (said, changed, step) in enumerate(answer[fault] for answer in answers):
            assert FAULTS[fault].format(others=others) in said, (fault, rank, said)
            assert not changed, fault
            assert step == WRONG_AT + (fault != "backward" or rank == WRONG)  # where no exchange was dropped, at once


METHODS = [
    ("none",),
    ("bf16",),
    ("topk(ratio=0.1)",),
    ("threshold(value=0.001)",),
    ("powersgd(rank=2)",),
    ("qsgd", "scatter_reduce"),
    ("topk(ratio=0.1)", "reduce_broadcast(destination=1)"),
    ("threshold(value=0.001)", "reduce_broadcast"),
    ("fp16", "reduce_broadcast"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_rank_that_goes_its_own_way_is_named_by_all_before_they_update(three_ranks, method):
    check(three_ranks.run(all_faults, FAULTS, *method))


def test_a_rank_that_only_clears_once_more_is_not_accused_of_more(three_ranks):
    for said, changed, step in three_ranks.run(with_fault, "clear once more", "none"):
        assert CLEARED in said
        assert (changed, step) == (False, WRONG_AT)


class FailsOnce(Residual):
    """A user's memory whose ``update`` raises on one rank, while payloads travel."""

    name = "fails_once"
    failed = False

    def update(self, tensor, name, compressor, payload, ctx):
        if grace.rank() == WRONG and self.context.step == WRONG_AT and not self.failed:
            self.failed = True
            raise ValueError("this memory failed")
        super().update(tensor, name, compressor, payload, ctx)


def with_failing_memory(communicator: type[grace.Communicator]) -> list[str]:
    """The errors of each step of a loop that goes on after an error; two variables, a bucket for each."""
    model = net()
    optimizer = distributed(model, communicator=communicator("topk(ratio=0.5)", FailsOnce()), num_groups=2)
    said = []
    for step in range(WRONG_AT + 2):
        try:
            one_step(model, optimizer, step)
            said.append("")
        except (ValueError, StepError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("communicator", [Allgather, Gathering])
def test_a_rank_that_goes_on_after_its_memory_failed_is_named_at_the_next_step(two_ranks, communicator):
    answers = two_ranks.run(with_failing_memory, communicator)
    for rank, said in enumerate(answers):
        assert said[:WRONG_AT] == [""] * WRONG_AT
        assert said[WRONG_AT] == ("this memory failed" if rank == WRONG else "")
        assert LEFT_OUT.format(others="rank 0 is") in said[WRONG_AT + 1]


@pytest.mark.parametrize("engine", ["mpirun-mpi", "horovodrun-gloo"])
def test_a_rank_that_goes_its_own_way_is_named_on_other_engines(engine):
    """Horovod's zero_grad() itself refuses to drop a step, on the rank that left it out."""
    faults = [fault for fault in FAULTS if fault != "step" or engine == "mpirun-mpi"]
    for method in ("none", "topk(ratio=0.1)"):
        check(launched(engine, 2).run(all_faults, faults, method), faults)


def test_what_all_ranks_leave_out_together_is_as_if_it_had_not_been(two_ranks):
    whole = two_ranks.run(all_faults, ["", "backward", "step"], "randomk(ratio=0.2)", None, True)
    for answer in whole:
        assert answer["backward"] == answer["step"] == whole[0]["backward"]  # random numbers are counted in steps
        assert answer[""] != answer["step"]
        assert answer["step"][2] == STEPS


def on_nodes(fault):
    return with_fault(fault, "topk(ratio=0.1)", hierarchical=True)


def test_ranks_of_one_node_are_named_there_and_all_others_hear_of_it(three_ranks):
    for fault in ("step", "backward"):
        answers = three_ranks.run(on_nodes, fault)
        assert not any(changed for _, changed, _ in answers)
        for rank, (said, *_) in enumerate(answers):
            named = "ranks that exchange through rank 0" if rank == 2 else FAULTS[fault].format(others="rank 0 is")
            assert named in said
    answers = three_ranks.run(on_nodes, "learning rate")
    assert [changed for _, changed, _ in answers] == [False] * 3
    assert all("the optimizer's hyperparameters differ at step 3" in said for said, *_ in answers[:2])
    assert "ranks that exchange through rank 0 went different ways" in answers[2][0]


@pytest.mark.parametrize("given", [True, False])
@on_ranks(3)
def test_a_rank_that_leaves_out_its_step_is_named_under_ddp(given):
    """The hook is told the optimizer or not."""
    for compressor in ("none", "topk(ratio=0.1)"):
        model = net()
        optimizer = sgd(model.parameters())
        wrapped = ddp(model)
        grace.torch.register_ddp_hook(wrapped, compressor, optimizer=optimizer if given else None)

        def steps(wrapped=wrapped, optimizer=optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(wrapped, step).backward()
                if not (step == WRONG_AT and grace.rank() == WRONG):
                    optimizer.step()

        said = refusal(steps, kind=Exception)  # DDP makes another of it
        assert LEFT_OUT.format(others="ranks 0 and 2 are") in said


@on_ranks()
def test_tensors_exchanged_one_by_one_are_counted():
    """The communicator is called in a loop of one's own."""
    communicator = grace.torch.Allgather("topk(ratio=0.5)")
    communicator.bind(Context(rank=grace.rank(), size=grace.size()), grace.init())

    def steps():
        for step in range(3):
            communicator.step(torch.ones(4), "w")
            communicator.context.step += step == grace.rank() == WRONG  # one that others did not have

    assert "rank 0 is at step 2, rank 1 is at step 3" in refusal(steps, kind=StepError)


@on_ranks()
def test_a_difference_of_hyperparameters_that_the_digest_of_one_step_hides_shows_in_the_next_ones():
    """Digests travel modulo 254."""
    model = net()
    optimizer = distributed(model, "none")
    (group,) = optimizer.param_groups

    def digest_with(rate: float) -> int:
        group["lr"] = rate
        return header.digest(hyperparameters(optimizer)) % header.CYCLE

    right = group["lr"]
    hidden = next(rate for rate in itertools.count(right + 1, 1) if digest_with(rate) == digest_with(right))
    group["lr"] = right

    def steps():
        for step in range(STEPS):
            group["lr"] = hidden if step >= WRONG_AT and grace.rank() == WRONG else right
            one_step(model, optimizer, step)

    assert f"lr {right}, rank 1 has optimizer SGD, param group 0, lr {hidden}" in refusal(steps, kind=StepError)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("kinds", "first", "second", "said"),
    [
        ((SGD, ADAM), {"lr": 0.1}, {"lr": 0.1}, "rank 0 has optimizer SGD, rank 1 has optimizer Adam."),
        ((SGD, SGD), {"lr": 0.1}, {"lr": 0.01}, "SGD, param group 0, lr 0.1, rank 1 has optimizer SGD, param group 0"),
        ((ADAM, ADAM), {"betas": (0.9, 0.99)}, {}, "param group 0, betas (0.9, 0.99), rank 1 has"),
        ((SGD, SGD), {"maximize": True}, {}, "param group 0, maximize True, rank 1"),
        ((SGD, SGD), {"foreach": True}, {"foreach": False}, ""),
    ],
)
@on_ranks()
def test_another_optimizer_or_other_hyperparameters_are_refused_before_anything_is_exchanged(
    kinds, first, second, said
):
    make, settings = kinds[grace.rank()], (first, second)[grace.rank()]
    build = partial(distributed, net(), optimizer=lambda parameters: make(parameters, **settings))
    if said:
        assert said in refusal(build, kind=grace.RankError)
    else:
        build()


@pytest.mark.parametrize("fault", ["step", "learning rate"])
@on_ranks(3)
def test_with_staleness_it_is_noticed_when_the_mean_would_be_applied(fault):
    said, _, step = with_fault(fault, "topk(ratio=0.1)", communicator="reduce_broadcast(staleness=2)")
    assert step < STEPS
    assert FAULTS[fault].format(others="ranks 0 and 2 are") in said


@pytest.mark.parametrize("how", ["shutdown", "exit"])
def test_with_staleness_a_rank_that_leaves_early_is_an_error_on_the_others(how):
    (code, said), (_, other) = started_by_hand([sys.executable, str(PROGRAMS / "early_leaver.py"), how])
    assert "trained" in said, said
    assert "trained" in other, other
    assert code != 0
    assert f"{STALE} failed at step 5" in said


def test_with_staleness_a_rank_that_leaves_early_is_an_error_on_mpi():
    if not available("mpirun-mpi"):
        pytest.skip("mpi4py or mpirun is not installed")
    line = command("mpirun-mpi", 2, str(PROGRAMS / "early_leaver.py"), "exit")
    env = {**environment(), "GRACE_BACKEND": "mpi"}
    ran = subprocess.run(line, env=env, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=HANGS)
    assert ran.returncode != 0
    assert f"{STALE} failed at step 5" in ran.stdout
    assert "rank 1 has left" in ran.stdout


@on_ranks(3)
def test_ranks_of_a_group_are_named_by_their_numbers_in_the_run():
    """Ranks 1 and 2 train together; rank 0 does not."""
    group = torch.distributed.new_group([1, 2])
    if grace.rank() == 0:
        return

    shrinking = Shrinking()

    def steps(choice, left_out=-1):
        model = net()
        optimizer = distributed(model, choice, process_group=group)
        for step in range(4):
            shrinking.wrong = step == 2 and grace.rank() == 2
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize() if step == left_out else optimizer.step()

    said = refusal(steps, "topk(ratio=0.1)", 1 if grace.rank() == 2 else -1, kind=StepError)
    assert said.startswith(f"rank {grace.rank()}: rank 2 is at step 1, rank 1 is at step 2: rank 2 left out")
    said = refusal(steps, f"topk(ratio=0.{grace.rank()})", kind=grace.RankError)
    assert "rank 1 has" in said
    assert "rank 2 has" in said
    said = refusal(steps, shrinking, kind=PayloadError)
    assert said.startswith(f"rank {grace.rank()} of the ranks 1, 2: ")
    assert grace.rank() == 2 or "rank 2 has not sent its payload" in said
