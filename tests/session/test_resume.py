"""Training that is stopped and resumed in new processes equals training that never stopped; what a checkpoint may
be loaded into, and what is refused."""

import pytest
import torch

import grace
from tests.support.pairwise import pairwise
from tests.support.pool import Ranks
from tests.support.pools import on_ranks, ranks_of
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

STOP, END = 2, 5


@pytest.fixture(scope="module")
def other_processes():
    """Pools of ranks other than those that all tests share."""
    pools = {size: Ranks(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.stop()


def begin(optimizer, kind, folder):
    """Train each method to the end, saving halfway; return hashes of the final weights."""
    ends = {}
    for method in METHODS:
        run = Run(method, optimizer, kind)
        run.train(range(STOP))
        torch.save(run.state_dict(), folder / f"{method}-{grace.rank()}.pt")
        run.train(range(STOP, END))
        ends[method] = digest(weights(run.model))
    return ends


def resume(optimizer, kind, folder):
    """Load what ``begin`` saved into models that started elsewhere, and train to the end."""
    ends = {}
    for method in METHODS:
        run = Run(method, optimizer, kind, seed=99)
        run.load_state_dict(torch.load(folder / f"{method}-{grace.rank()}.pt", weights_only=True))
        run.train(range(STOP, END))
        ends[method] = digest(weights(run.model))
    return ends


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


@pytest.mark.parametrize(("kind", "size", "optimizer"), pairwise(["optimizer", "hook"], [2, 3], OPTIMIZERS))
def test_resuming_in_new_processes_continues_bit_for_bit(other_processes, tmp_path, kind, size, optimizer):
    uninterrupted = ranks_of(size).run(begin, optimizer, kind, tmp_path)
    assert other_processes[size].run(resume, optimizer, kind, tmp_path) == uninterrupted


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


def test_a_plain_optimizers_checkpoint_drops_means_that_were_still_to_be_applied(local):
    w = torch.nn.Parameter(torch.zeros(4))
    inner = sgd([w], lr=1.0)
    plain = copied(inner.state_dict())
    optimizer = grace.DistributedOptimizer(inner, [("w", w)], communicator="reduce_broadcast(staleness=1)")
    for gradient in (1.0, 0.0):
        optimizer.zero_grad()
        (gradient * w).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(plain, memory="reset")
    assert not w.any()


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


@pytest.mark.parametrize("compressor", STATEFUL)
@on_ranks(2)
def test_what_state_dict_returned_does_not_change_as_training_goes_on(compressor):
    """A state dict in hand stays what it was, as long as nobody trains on it."""
    model = net()
    optimizer = distributed(model, compressor)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()["grace"]
    before = digest(saved)
    train(model, optimizer, range(3, 6))
    assert digest(saved) == before
