"""A rank of a pipeline leaves something out, or is given something else: all ranks are told; nothing has changed."""

import subprocess
import warnings

import pytest
import torch
from torch import nn

import grace
from tests.support.engine_pools import command, environment
from tests.support.limits import HANGS
from tests.support.pipelines import unmeasured
from tests.support.pools import on_ranks
from tests.support.training import refusal

pytestmark = pytest.mark.ranks


def engine_of(rate=0.1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return unmeasured(
        model,
        torch.zeros(8, 8),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        **{"microbatches": 2, "stages": 2, **settings},
    )


def batch_of(step, rows=8):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(rows, 8, generator=draw), torch.randn(rows, 4, generator=draw)


def steps(engine, numbers, run=None):
    """The steps that were made, and the error that ended them; the weights must be those after the last whole step."""
    done, before = [], None
    for step in numbers:
        before = {name: p.detach().clone() for name, p in engine.parameters.items()}
        try:
            (run or (lambda step: engine.step(*batch_of(step))))(step)
        except grace.GraceError as error:
            same = all(torch.equal(before[name], p) for name, p in engine.parameters.items())
            return done, type(error).__name__, str(error), same
        done.append(step)
    return done, "nothing", "", True


def leaves_out(rank, left_out, **settings):
    numbers = [step for step in range(6) if grace.rank() != rank or step != left_out]
    return steps(engine_of(**settings), numbers)


@pytest.mark.parametrize(("rank", "left_out"), [(1, 3), (0, 3), (1, 0)])
@on_ranks()
def test_a_step_that_one_stage_leaves_out_is_an_error_on_all_ranks(rank, left_out):
    done, kind, words, same = leaves_out(rank, left_out)
    assert (kind, same) == ("StepError", True)
    assert max(done, default=-1) < left_out
    assert "rank 1 was given another batch than rank 0: a rank left out a step" in words


def constant():
    """Batches that are one number all over, and rank 1 leaves out the first."""
    engine = engine_of()

    def one(step):
        return engine.step(torch.full((8, 8), float(step)), torch.full((8, 4), float(step)))

    return steps(engine, range(grace.rank(), 6), one)


def shuffled():
    """Each rank shuffles its data by itself: inputs meet the targets of others."""
    return steps(engine_of(), ([4, 1, 5, 0, 2, 3], [2, 5, 0, 3, 1, 4])[grace.rank()])


@pytest.mark.parametrize("run", [constant, shuffled])
@on_ranks()
def test_batches_that_differ_from_the_beginning_are_an_error_on_all_ranks(run):
    done, kind, words, same = run()
    assert (done, kind, same) == ([], "StepError", True)
    assert "by a sampler of the same seed" in words


@on_ranks(4)
def test_a_replica_that_leaves_out_a_step_alone_is_named_to_the_others():
    done, kind, words, same = leaves_out(3, 2, compressor="topk(ratio=0.3)", replicas=2)
    assert (done, kind, same) == ([0, 1], "StepError", True)
    assert "rank 3" in words


@on_ranks(2)
def test_a_shorter_batch_on_one_rank_is_named_on_all():
    """Rank 1's last batch is shorter; then it has rows that cannot be cut at all; and then all goes on."""
    engine, rank, told = engine_of(), grace.rank(), []
    for rows in (4, 7):
        one = lambda step, rows=rows: engine.step(*batch_of(step, rows if rank == 1 else 8))  # noqa: E731
        engine.step(*batch_of(0))
        told.append(steps(engine, [1], one)[1:])
    assert [same for *_, same in told] == [True, True]
    assert "rank 1 was given a batch of float32[4, 8], float32[4, 4], and rank 0 of float32[8, 8]" in told[0][1]
    assert "a batch of 7 rows cannot be cut" in told[1][1]
    assert steps(engine, [2, 3])[0] == [2, 3]


@pytest.mark.parametrize(("left_out", "call"), [("step", "optimizer.step()"), ("backward", "loss.backward()")])
@on_ranks(2)
def test_what_one_stage_leaves_out_of_its_own_loop_is_named_at_the_next_batch(left_out, call):
    """Rank 1 leaves out something of its own loop in step 2."""
    engine, rank = engine_of(), grace.rank()

    def one(step):
        skipped = left_out if rank == 1 and step == 2 else ""
        engine.zero_grad()
        loss = engine(*batch_of(step))
        if skipped != "backward":
            loss.backward()
        if skipped != "step":
            engine.optimizer.step()

    done, kind, words, same = steps(engine, range(5), one)
    assert (done, kind, same) == ([0, 1, 2], "StepError", True)
    assert f"rank 1 left out {call}" in words


@on_ranks(2)
def test_a_stage_that_evaluates_while_another_trains_is_named():
    engine, rank = engine_of(), grace.rank()
    engine.step(*batch_of(0))
    engine.train(rank == 0)
    _, kind, words, _ = steps(engine, [1], lambda step: engine(*batch_of(step)[: 1 + (rank == 0)]))
    assert kind == "StepError"
    assert "rank 0 trains; rank 1 evaluates" in words


@on_ranks(2)
def test_targets_that_stand_in_and_rates_of_layers_are_said_once_and_train():
    """Only the last stage has targets; the others' stand in. And stages learn at rates of their own."""
    engine, rank = engine_of(rate=(0.1, 0.9)[grace.rank()]), grace.rank()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            x, y = batch_of(step)
            engine.step(x, y if rank == 1 else torch.zeros_like(y))
    said = [str(one.message) for one in said if "pipeline" in str(one.message)]
    assert len(said) == 2
    assert "ranks 0 and 1 of a pipeline were given different tensors for some of their batch" in said[0]
    assert "rank 0 has lr 0.1; rank 1 has lr 0.9" in said[1]


@pytest.mark.parametrize("inputs", ["rank0", "replica"])
@on_ranks()
def test_a_batch_that_one_rank_refuses_is_refused_on_all_ranks(inputs):
    """Rank 1 gives no target."""
    engine, (x, y), second = engine_of(inputs=inputs), batch_of(0), grace.rank() == 1
    engine.step(x, y)
    said = refusal(engine.step, *((x, y)[: 2 - grace.rank()]), kind=grace.ConfigError if second else grace.RankError)
    words = "call it with the model's arguments and then the target"
    assert said.startswith(words if second else f"rank 1 refused its batch: {words}")
    return engine.step(x, y).item()


CATCHES = """
import torch, grace

class Loss:
    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        if self.calls == 4:
            raise ValueError("not with this batch")
        return torch.nn.functional.mse_loss(output, target)

grace.init()
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
x, y = torch.ones(8, 6), torch.ones(8, 4)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
engine = grace.torch.Pipeline(model, x, Loss(), optimizer=sgd, microbatches=2, stages=2, profiles=False)
for step in range(4):
    try:
        engine.step(x, y)
    except ValueError as error:  # of the last stage alone
        print("caught", error)
print("ended well")
"""


def test_a_stage_that_catches_its_error_cannot_go_on_and_keep_the_others_waiting(tmp_path):
    (tmp_path / "train.py").write_text(CATCHES)
    line = command("torchrun", 2, str(tmp_path / "train.py"))
    env = {**environment(), "GRACE_TIMEOUT": "30"}
    done = subprocess.run(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANGS)
    assert done.returncode
    assert "caught not with this batch" in done.stdout
    said = "a call of this pipeline has failed on this rank: ValueError: not with this batch. Other stages wait"
    assert said in done.stdout
    assert "ended well" not in done.stdout
    assert "no answer from the other ranks" not in done.stdout
