"""Checkpoints as torchtitan makes them: a dict of Stateful objects, saved and loaded by torch.distributed.checkpoint.

What is saved is what was there when the save began: the writers here wait until later steps have changed everything.
"""

import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import grace
from grace.torch.state_dict import INNER, _split_state, pack_state
from tests.support.pools import on_ranks, ranks_of
from tests.support.sharded import Net, built, loss_of, mesh_of, same_bits, whole
from tests.support.training import digest, refusal

pytestmark = pytest.mark.ranks
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
SAVING: list[dist.ProcessGroup] = []
"""The process group of saves beside training, made once."""


class Model:
    """torchtitan's ModelWrapper."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state):
        set_model_state_dict(self.model, state)


class Optimizer:
    """torchtitan's OptimizersContainer: flattened, so that it loads on other numbers of pipeline stages."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state, options=FLAT)


class Loader:
    """A dataloader whose place is each rank's own."""

    def __init__(self):
        self.taken, self.key = 0, f"dp_rank_{dist.get_rank()}"

    def state_dict(self):
        return {self.key: pickle.dumps(self.taken)}

    def load_state_dict(self, state):
        if self.key in state:
            self.taken = pickle.loads(state[self.key])


class Run:
    """A trainer with everything that is saved in ``states``; it is the "train_state" itself."""

    def __init__(self, model, optimizer, **memories):
        self.model, self.optimizer, self.memories, self.step = model, optimizer, memories, 0
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.loader = Loader()
        self.states = {
            "model": Model(model),
            "optimizer": Optimizer(model, optimizer),
            "lr_scheduler": self.schedule,
            "dataloader": self.loader,
            "train_state": self,
            **memories,
        }

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model, self.loader.taken, spare=self.step % 2 == 1).backward()
            self.optimizer.step()
            self.schedule.step()
            self.loader.taken += 1
            self.step += 1
        return self

    def weights(self):
        if "grace_replicas" in self.memories:
            return whole(self.model)
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Late(dcp.FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path):
        super().__init__(path)
        self.may = threading.Event()

    def write_data(self, *args, **kwargs):
        assert self.may.wait(60)
        return super().write_data(*args, **kwargs)


def sharded():
    mesh = mesh_of()
    net = built(mesh["shard"])
    lower = grace.torch.compress_reduce_scatter(net, "block(bits=4, block=32)")
    upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.1)")
    return Run(net, torch.optim.Adam(net.parameters(), lr=0.01), grace_replicas=upper, grace_shards=lower)


def by_optimizer():
    torch.manual_seed(7)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    opt = grace.DistributedOptimizer(opt, net.named_parameters(), compressor="topk(ratio=0.1)")
    return Run(net, opt, grace=grace.torch.Memories(opt))


def by_outer_rounds():
    """Ranks that train alone: in the middle of a period each has its own parameters and moments."""
    torch.manual_seed(7)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    opt = grace.DistributedOptimizer(opt, net, compressor="topk(ratio=0.1)", outer="nesterov", period=2)
    return Run(net, opt, grace=grace.torch.Memories(opt))


def by_ddp():
    torch.manual_seed(7)
    ddp = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    state = grace.torch.register_ddp_hook(ddp, "topk(ratio=0.1)")
    return Run(ddp, torch.optim.Adam(ddp.parameters(), lr=0.01), grace=grace.torch.Memories(state))


def close(run):
    for memory in reversed(run.memories.values()):
        getattr(memory, "owner", memory).close()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("make", "size"), [(sharded, 4), (by_optimizer, 2), (by_outer_rounds, 2), (by_ddp, 2)])
@on_ranks()
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, make, size, mode):
    """A run saves in the middle, and another one begins with that."""
    folder = tmp_path / "checkpoint"
    run = make().train(3)
    if mode == "async":
        late = Late(folder)
        if not SAVING:
            SAVING.append(dist.new_group())  # DDP exchanges over the run's own meanwhile
        saving = dcp.async_save(run.states, storage_writer=late, process_group=SAVING[0])
        run.train(3)
        late.may.set()
        saving.result()
    else:
        dcp.save(run.states, checkpoint_id=folder)
        run.train(3)
    wanted, owed = run.weights(), [memory.state_dict() for memory in run.memories.values()]
    close(run)
    run = make()
    dcp.load(run.states, checkpoint_id=folder)
    places = run.step, run.loader.taken, run.schedule.last_epoch
    run.train(3)
    got = run.weights()
    owes = [memory.state_dict() for memory in run.memories.values()]
    close(run)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert places == (3, 3, 3)
    assert len(owed) == len(owes) > 0


@on_ranks(4)
def test_torchs_state_dict_functions_go_with_them(tmp_path):
    """One dict has the states of get_state_dict, too."""
    folder = tmp_path / "checkpoint"

    def everything(run):
        weights, moments = get_state_dict(run.model, run.optimizer)
        return {**run.states, "model": weights, "optimizer": moments}

    run = sharded().train(3)
    dcp.save(everything(run), checkpoint_id=folder)
    wanted = run.train(3).weights()
    close(run)
    run = sharded()
    dcp.load(loaded := everything(run), checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    got = run.train(3).weights()
    close(run)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@on_ranks()
def test_memories_that_are_made_too_late_are_refused_and_those_of_former_checkpoints_are_loaded(tmp_path):
    """A run that saved without Memories goes on with it."""

    def of_topk():
        torch.manual_seed(7)
        net = Net()
        opt = torch.optim.Adam(net.parameters(), lr=0.01)
        return net, grace.DistributedOptimizer(opt, net.named_parameters(), compressor="topk(ratio=0.1)")

    net, opt = of_topk()
    Run(net, opt).train(3)
    weights, moments = get_state_dict(net, opt)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
    kept = {name: value.clone() for name, value in opt._grace.runner.state()["memory"].items()}
    memories = grace.torch.Memories(opt)
    assert "make Memories first" in refusal(memories.state_dict)
    get_state_dict(net, opt)
    memories.state_dict()
    opt.close()

    net, opt = of_topk()
    weights, moments = get_state_dict(net, opt)
    grace.torch.Memories(opt)
    dcp.load(loaded := {"model": weights, "optimizer": moments}, checkpoint_id=tmp_path)
    set_state_dict(net, opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    owed = opt._grace.runner.state()["memory"]
    plain = opt.param_groups[0].keys()
    opt.close()
    assert kept.keys() == owed.keys()
    assert all(torch.equal(owed[name], kept[name]) for name in kept)
    assert not any(key.startswith("grace") for key in plain)


def replicas_of(ranks):
    mesh = mesh_of(ranks // 2, 2)
    net = built(mesh["shard"])
    upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.1)")
    return Run(net, torch.optim.Adam(net.parameters(), lr=0.01), grace_replicas=upper)


def kept(run):
    """Return the memories of this rank."""
    owner = getattr(run.memories.get("grace"), "owner", run.memories.get("grace_replicas"))
    runner = owner.runner if hasattr(owner, "runner") else owner._grace.runner
    return {name: value.clone() for name, value in runner.state()["memory"].items()}


def saves(make, args, folder):
    run = make(*args).train(3)
    dcp.save(run.states, checkpoint_id=folder)
    owed = kept(run)
    close(run)
    return owed


def loads(make, args, folder):
    run = make(*args)
    del run.states["dataloader"]  # as torchtitan's exclude_from_loading: there is none of other ranks
    dcp.load(run.states, checkpoint_id=folder)
    owed, step = kept(run), run.step
    weights = run.train(2).weights()
    close(run)
    return owed, step, same_bits(weights)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [(replicas_of, 4, 2), (replicas_of, 2, 4), (by_optimizer, 2, 4), (by_optimizer, 4, 2), (by_ddp, 4, 2)],
)
def test_on_another_number_of_replicas_each_begins_with_the_mean_of_what_was_owed(tmp_path, make, before, after):
    folder = str(tmp_path / "checkpoint")
    sharded = make is replicas_of
    saved = ranks_of(before).run(saves, make, (before,) if sharded else (), folder)
    loaded = ranks_of(after).run(loads, make, (after,) if sharded else (), folder)
    for rank, (owed, step, same) in enumerate(loaded):
        theirs = saved[rank % 2 :: 2] if sharded else saved
        assert (step, same) == (3, True)
        assert owed.keys() == theirs[0].keys()
        for name, value in owed.items():
            mean = torch.stack([one[name] for one in theirs]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
    assert any(bool(value.any()) for value in loaded[0][0].values())


def moments(run):
    return digest({name: p["exp_avg_sq"] for name, p in zip(run.weights(), run.optimizer.state.values(), strict=True)})


def saves_moments(folder):
    run = by_outer_rounds().train(3)
    dcp.save(run.states, checkpoint_id=folder)
    found = moments(run)
    close(run)
    return found


def loads_moments(folder):
    run = by_outer_rounds()
    del run.states["dataloader"]
    dcp.load(run.states, checkpoint_id=folder)
    found = moments(run)
    close(run)
    return found


def test_on_another_number_of_ranks_that_train_alone_all_have_the_moments_of_one(tmp_path):
    """torch's own part has tensors of several ranks: a mean of one beside a variance of another."""
    folder = str(tmp_path / "checkpoint")
    saved = ranks_of(2).run(saves_moments, folder)
    assert saved[0] != saved[1]
    assert ranks_of(4).run(loads_moments, folder) == [saved[0]] * 4


@pytest.mark.parametrize(("rank", "owner"), [(0, 0), (1, 1), (2, 0)])
def test_of_torchs_own_state_a_rank_of_another_number_takes_moments_of_one_rank(rank, owner):
    """Each rank's entry there has its own moments alone."""
    runner = SimpleNamespace(backend=SimpleNamespace(rank=rank, size=3), outer_rounds=True, shard_label="")
    entries = {
        f"grace.rank{one}": pack_state({INNER: [pack_state({"state": one}) if r == one else None for r in range(2)]})
        for one in range(2)
    }
    plain, _ = _split_state({"state": "merged", "param_groups": [entries]}, runner)
    assert plain["state"] == owner


@on_ranks(4)
def test_what_has_no_memories_is_refused():
    run = by_optimizer()
    plain = refusal(grace.torch.Memories, torch.optim.SGD(Net().parameters(), lr=0.1))
    state = refusal(grace.torch.Memories, sharded().memories["grace_shards"])
    empty = refusal(run.memories["grace"].load_state_dict, {})
    assert "takes a grace.DistributedOptimizer or the state of register_ddp_hook, not SGD" in plain
    assert "put this state beside the model" in state
    assert "has no 'grace' entry" in empty
    for owner in (run.optimizer, by_ddp().memories["grace"].owner):
        message = refusal(dcp.save, {"state": owner}, storage_writer=Late("/nowhere"))
        assert "save grace.torch.Memories(...) of it" in message
