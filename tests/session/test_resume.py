"""Training that is stopped and resumed in new processes equals training that never stopped; what a checkpoint may
be loaded into, and what is refused."""

import itertools

import pytest
import torch

import grace
from tests.support.checkpoints import sealed
from tests.support.pairwise import pairwise
from tests.support.pool import Ranks
from tests.support.training import (
    METHODS,
    OPTIMIZERS,
    copied,
    ddp,
    digest,
    distributed,
    loss_of,
    net,
    sgd,
    state_of,
    train,
    weights,
)

pytestmark = pytest.mark.ranks

STOP, END = 4, 9


@pytest.fixture(scope="module")
def other_processes():
    """Pools of ranks other than those of the fixture ``ranks``."""
    pools = {size: Ranks(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.stop()


def begin(compressor, optimizer, folder, kind):
    """Train to the end, saving halfway; a hash of the final weights."""
    run = Run(compressor, optimizer, kind)
    run.train(range(STOP))
    torch.save(run.state_dict(), f"{folder}/{grace.rank()}.pt")
    run.train(range(STOP, END))
    return digest(weights(run.model))


def resume(compressor, optimizer, folder, kind):
    """Load what ``begin`` saved into a model that started elsewhere, and train to the end."""
    run = Run(compressor, optimizer, kind, seed=99)
    run.load_state_dict(torch.load(f"{folder}/{grace.rank()}.pt", weights_only=True))
    run.train(range(STOP, END))
    return digest(weights(run.model))


class Run:
    """A training run through DistributedOptimizer or through the DDP hook."""

    def __init__(self, compressor, optimizer, kind, seed=0):
        self.model = net(seed)
        if kind == "optimizer":
            self.forward, self.hook = self.model, None
            self.optimizer = distributed(self.model, compressor, optimizer=OPTIMIZERS[optimizer])
        else:
            self.forward = ddp(self.model)
            self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
            self.hook = grace.torch.register_ddp_hook(self.forward, compressor, optimizer=self.optimizer)
        # a schedule, so that the memory that follows the learning rate has something to follow
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)

    def parts(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "hook": self.hook}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load_state_dict(self, saved):
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.forward, step).backward()
            self.optimizer.step()
            self.schedule.step()


@pytest.mark.parametrize(
    ("ranks", "compressor", "optimizer"), pairwise([2, 3], METHODS, OPTIMIZERS), indirect=["ranks"]
)
def test_resuming_in_new_processes_continues_bit_for_bit(ranks, other_processes, tmp_path, compressor, optimizer):
    uninterrupted = ranks.run(begin, compressor, optimizer, str(tmp_path), "optimizer")
    resumed = other_processes[ranks.size].run(resume, compressor, optimizer, str(tmp_path), "optimizer")
    assert resumed == uninterrupted


@pytest.mark.parametrize(("compressor", "optimizer"), list(zip(METHODS, itertools.cycle(OPTIMIZERS), strict=False)))
def test_resuming_the_ddp_hook_continues_bit_for_bit(two_ranks, other_processes, tmp_path, compressor, optimizer):
    uninterrupted = two_ranks.run(begin, compressor, optimizer, str(tmp_path), "hook")
    resumed = other_processes[2].run(resume, compressor, optimizer, str(tmp_path), "hook")
    assert resumed == uninterrupted


def saved_states(compressor, everyone):
    """Train a little; every rank's checkpoint, and what each really remembers."""
    model = net()
    optimizer = distributed(model, compressor)
    train(model, optimizer, range(3))
    checkpoint = optimizer.full_state_dict() if everyone else optimizer.state_dict()
    return copied({"optimizer": checkpoint, "model": weights(model), "state": state_of(optimizer)})


def load(compressor, checkpoints, memory="strict", own=True):
    """Load this rank's checkpoint (or the first one); what is remembered then, or the error."""
    saved = checkpoints[grace.rank() if own else 0]
    model = net()
    optimizer = distributed(model, compressor)
    model.load_state_dict(saved["model"])
    try:
        optimizer.load_state_dict(saved["optimizer"], memory=memory)
    except grace.ConfigError as error:
        return str(error)
    state, step = state_of(optimizer), optimizer._grace.context.step
    train(model, optimizer, range(3, 5))
    return {"state": state, "step": step, "weights": digest(weights(model))}


STATEFUL = [method for method in METHODS if grace.make("compressor", method).traits.memory != "none"]


@pytest.mark.parametrize("compressor", STATEFUL)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_full_checkpoint_on_another_number_of_ranks_gives_each_the_mean(other_processes, compressor, before, after):
    checkpoints = other_processes[before].run(saved_states, compressor, True)
    loaded = other_processes[after].run(load, compressor, checkpoints, "strict", False)
    memories = [checkpoint["state"]["memory"] for checkpoint in checkpoints]
    for answer in loaded:
        assert answer["step"] == 3
        assert digest(answer["state"]["compressor"]) == digest(checkpoints[0]["state"]["compressor"])
        assert set(answer["state"]["memory"]) == set(memories[0])
        for name, value in answer["state"]["memory"].items():
            expected = torch.stack([tensor_of(memory[name]) for memory in memories]).mean(dim=0)
            torch.testing.assert_close(tensor_of(value), expected)
            assert expected.any()
        assert answer["weights"] == loaded[0]["weights"]


def tensor_of(value):
    return value["residual"] if isinstance(value, dict) else value


@pytest.mark.parametrize("compressor", STATEFUL)
def test_a_full_checkpoint_on_as_many_ranks_gives_each_its_own(ranks, compressor):
    checkpoints = ranks.run(saved_states, compressor, True)
    loaded = ranks.run(load, compressor, checkpoints, "strict", False)
    assert [digest(answer["state"]) for answer in loaded] == [digest(saved["state"]) for saved in checkpoints]
    assert len({digest(answer["state"]["memory"]) for answer in loaded}) == ranks.size


@pytest.mark.parametrize("compressor", METHODS)
def test_loading_another_ranks_memories_is_refused_with_what_to_do(two_ranks, compressor):
    checkpoints = two_ranks.run(saved_states, compressor, False)
    if compressor not in STATEFUL:
        first, second = two_ranks.run(load, compressor, checkpoints, "strict", False)
        assert first["weights"] == second["weights"]
        return
    # rank 0 is not trained on, because rank 1 refuses: both load the other's
    first, second = two_ranks.run(load, compressor, checkpoints[::-1])
    for message, words in ((first, "rank 1 of 2, this is rank 0 of 2"), (second, "rank 0 of 2, this is rank 1 of 2")):
        assert words in message
        assert "full_state_dict()" in message
        assert "memory='reset'" in message


def resealed(saved, **changed):
    """As if it had been saved with other settings."""
    saved.update(sealed({**saved, "grace": {**saved["grace"], **changed}}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved.pop("grace"), "saved by a plain optimizer"),
        (lambda saved: saved["grace"].update(version=99), "version 99"),
        (lambda saved: resealed(saved, components="allgather, qsgd, none"), "saved with allgather, qsgd, none"),
        (lambda saved: resealed(saved, seed=5), "seed=5"),
        (lambda saved: saved["grace"].update(step=5), "its checksum differs"),
        (lambda saved: saved["grace"]["state"]["memory"].update(gone=torch.zeros(3)), "'gone'"),
    ],
    ids=["plain", "version", "components", "seed", "damaged", "unknown variable"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(two_ranks, change, words):
    checkpoints = two_ranks.run(saved_states, "topk", False)
    for saved in checkpoints:
        change(saved["optimizer"])
    for answer in two_ranks.run(load_and_look, checkpoints):
        message, unchanged = answer
        assert words in message
        assert unchanged


def load_and_look(checkpoints):
    model = net()
    optimizer = distributed(model, "topk")
    train(model, optimizer, range(2))
    before = digest(optimizer.state_dict())
    with pytest.raises(grace.ConfigError) as caught:
        optimizer.load_state_dict(checkpoints[grace.rank()]["optimizer"])
    return str(caught.value), digest(optimizer.state_dict()) == before


@pytest.mark.parametrize("compressor", STATEFUL)
def test_reset_starts_with_empty_memories_at_the_saved_step(two_ranks, compressor):
    checkpoints = two_ranks.run(saved_states, compressor, False)
    first, second = two_ranks.run(load, compressor, checkpoints, "reset", False)
    assert first["weights"] == second["weights"]
    assert first["state"] == {"compressor": {}, "memory": {}}
    assert first["step"] == 3


def test_reset_takes_a_plain_optimizers_checkpoint(two_ranks):
    checkpoints = two_ranks.run(saved_states, "topk", False)
    for saved in checkpoints:
        del saved["optimizer"]["grace"]
    first, second = two_ranks.run(load, "topk", checkpoints, "reset")
    assert first["weights"] == second["weights"]
    assert first["state"]["memory"] == {}


def test_a_plain_optimizer_loads_our_state_dict(two_ranks):
    saved = two_ranks.run(saved_states, "topk", False)[0]
    model = net()
    plain = sgd(model.parameters(), lr=0.3)
    plain.load_state_dict(saved["optimizer"])
    momenta = [state["momentum_buffer"] for state in plain.state_dict()["state"].values()]
    assert digest(momenta) == digest([state["momentum_buffer"] for state in saved["optimizer"]["state"].values()])
    assert plain.param_groups[0]["lr"] == 0.05
    loss_of(model, 0, rank=0).backward()
    plain.step()


def states_kept_while_training_goes_on(compressor):
    """Whether a state dict in hand stays what it was, as long as nobody trains on it."""
    model = net()
    optimizer = distributed(model, compressor)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()["grace"]
    before = digest(saved)
    train(model, optimizer, range(3, 6))
    return digest(saved) == before


@pytest.mark.parametrize("compressor", STATEFUL)
def test_what_state_dict_returned_does_not_change_as_training_goes_on(two_ranks, compressor):
    assert two_ranks.run(states_kept_while_training_goes_on, compressor) == [True, True]
