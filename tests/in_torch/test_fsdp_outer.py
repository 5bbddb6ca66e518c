"""Outer rounds between replicas of a model that FSDP2 shards, beside replicas that are not sharded, on 2 x 2 ranks."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import grace
from grace.core.outer import Outer
from tests.support.pools import on_ranks, ranks_of
from tests.support.sharded import mesh_of, whole
from tests.support.training import digest, refusal


def plain(seed=7, norm=False):
    """Layers of odd sizes; one rank of two has nothing of the last one."""
    torch.manual_seed(seed)
    first = [torch.nn.BatchNorm1d(8)] if norm else []
    return torch.nn.Sequential(*first, torch.nn.Linear(8, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))


def sharded(mesh, **options):
    net = plain(**options)
    fully_shard(net[-1], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def distributed(net, mesh, inner=sgd, **choices):
    return grace.DistributedOptimizer(
        inner(net.parameters()), net, process_group=mesh.get_group("replicate"), **choices
    )


def inputs(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(net, step, rank):
    x = inputs(step, rank)
    return (net(x) - x.square().mean(1, keepdim=True)).square().mean()


def own_loss(net, step):
    return loss_of(net, step, dist.get_rank())


def replicas_loss(mesh):
    """The mean loss of the ranks that share a copy."""
    ranks = mesh["shard"].mesh.tolist()
    return lambda net, step: sum(loss_of(net, step, rank) for rank in ranks) / len(ranks)


def train(net, optimizer, steps, loss=own_loss):
    for step in steps:
        optimizer.zero_grad()
        loss(net, step).backward()
        optimizer.step()


def anchors(optimizer):
    """Copies of this rank's parts of the anchors."""
    return {name: value.clone() for name, value in optimizer._grace.runner.outer_rounds.anchors.state.items()}


def strategy(method="none", **settings):
    sync = {"type": "allreduce" if method == "none" else "allgather"}
    return {"version": 1, "rules": [{"match": {}, "sync": sync, "compressor": method, **settings}]}


FRAGMENTS = Outer("nesterov(lr=0.7, momentum=0.6)", period=4, fragments=2, delay=1, merge=0.5).to_dict()
CHOICES = {
    "averaging": {"outer": "none", "period": 3},
    "nesterov": {"outer": "nesterov(momentum=0.6)", "period": 3},
    "fragments": {"strategy": strategy(outer=FRAGMENTS)},
}


# -- what is computed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", CHOICES)
@on_ranks(4)
def test_shard_groups_train_as_replicas_that_are_not_sharded(choices):
    mesh = mesh_of(2, 2)
    net, wanted = sharded(mesh["shard"]), plain()
    optimizer = distributed(net, mesh, **CHOICES[choices])
    other = distributed(wanted, mesh, **CHOICES[choices])
    for step in range(8):
        train(net, optimizer, range(step, step + 1))
        train(wanted, other, range(step, step + 1), replicas_loss(mesh))
        torch.testing.assert_close(whole(net), dict(wanted.named_parameters()), rtol=1e-4, atol=1e-5)
    with optimizer.anchor(), other.anchor():
        torch.testing.assert_close(whole(net), dict(wanted.named_parameters()), rtol=1e-4, atol=1e-5)
    optimizer.flush()
    return digest(whole(net))


@pytest.mark.parametrize("method", ["topk(ratio=0.2)", "block(bits=4)", "qsgd"])
@on_ranks(4)
def test_alone_in_its_shard_group_a_rank_trains_with_the_same_bits(method):
    mesh = mesh_of(4, 1)
    net, wanted = sharded(mesh["shard"]), plain()
    choices = {"inner": lambda p: torch.optim.AdamW(p, lr=0.01), "compressor": method, **CHOICES["nesterov"]}
    optimizer = distributed(net, mesh, **choices)
    other = distributed(wanted, mesh, **choices)
    train(net, optimizer, range(7))
    train(wanted, other, range(7))
    assert digest(whole(net)) == digest({name: p.detach() for name, p in wanted.named_parameters()})
    assert optimizer.traffic.sent_bytes == other.traffic.sent_bytes


@on_ranks(4)
def test_averages_after_every_step_of_plain_sgd_are_torchs_hsdp():
    mesh = mesh_of(2, 2)
    net, wanted = sharded(mesh["shard"]), sharded(mesh)
    inner = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    train(wanted, inner(wanted.parameters()), range(5))
    train(net, distributed(net, mesh, inner, outer="none", period=1), range(5))
    torch.testing.assert_close(whole(net), whole(wanted), rtol=1e-5, atol=1e-6)
    return digest(whole(net))


# -- anchors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["topk(ratio=0.2)", "block(bits=4)", "powersgd(rank=1)"])
@on_ranks(4)
def test_all_copies_have_the_same_anchors(method):
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"], seed=dist.get_rank())  # the first replica's parameters count
    optimizer = distributed(net, mesh, compressor=method, outer="nesterov(momentum=0.6)", period=2)
    train(net, optimizer, range(5))
    assert optimizer.metrics()["drift_norm"] > 0
    own = digest(whole(net))
    with optimizer.anchor():
        shared = digest(whole(net))
    assert digest(whole(net)) == own != shared
    return shared


@on_ranks(4)
def test_what_shard_groups_send_may_be_compressed_too():
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    lower = grace.torch.compress_reduce_scatter(net, "block(bits=4, block=32)")
    optimizer = distributed(net, mesh, compressor="block(bits=4)", outer="nesterov", period=2)
    train(net, optimizer, range(4))
    assert lower.runner.context.step == 4
    lower.close()
    return digest(whole(net))


@on_ranks(4)
def test_evaluations_see_the_anchors_and_change_nothing():
    """An evaluation leaves the parameters that it gathered in place."""
    mesh, ends = mesh_of(2, 2), []
    for evaluates in (False, True):
        net, copy, x = sharded(mesh["shard"]), plain(), inputs(0, 0)
        optimizer = distributed(net, mesh, outer="nesterov", period=2)
        for step in range(5):
            train(net, optimizer, range(step, step + 1))
            if evaluates:
                with torch.no_grad():
                    net(x)
                    with optimizer.anchor():
                        copy.load_state_dict(whole(net))
                        seen = net(x)
                    torch.testing.assert_close(seen, copy(x))
        net.eval()
        optimizer.flush()
        ends.append(digest(whole(net)))
    assert ends[0] == ends[1]


@on_ranks(4)
def test_buffers_are_averaged_over_all_ranks():
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"], norm=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = distributed(net, mesh, outer="sgd", period=2)
    train(net, optimizer, range(1))
    norm = net[0]
    first, momentum = norm.running_mean.clone(), norm.momentum
    wanted = grace.allreduce((1 - momentum) * first + momentum * inputs(1, dist.get_rank()).mean(0))
    train(net, optimizer, range(1, 2))
    torch.testing.assert_close(norm.running_mean, wanted)
    return digest(norm.running_mean)


# -- overflows ---------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_part_that_is_not_finite_on_one_rank_drops_the_round_everywhere():
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    optimizer = distributed(net, mesh, compressor="topk(ratio=0.2)", outer="nesterov", period=2)
    train(net, optimizer, range(3))
    memory = optimizer._grace.runner.state()["memory"]
    before, kept, part = digest(anchors(optimizer)), digest(memory), net[0].weight.data.to_local()
    optimizer.zero_grad()
    own_loss(net, 3).backward()
    if dist.get_rank() == 3:
        part[0, 0] = float("inf")
        with pytest.warns(UserWarning, match="'0.weight' was not finite on rank 3 after iteration 4"):
            optimizer.step()
        assert torch.equal(part, anchors(optimizer)["0.weight"])
    else:
        optimizer.step()
        assert not torch.equal(part, anchors(optimizer)["0.weight"])
    assert (digest(anchors(optimizer)), digest(optimizer._grace.runner.state()["memory"])) == (before, kept)
    train(net, optimizer, range(4, 6))
    assert digest(anchors(optimizer)) != before
    optimizer.flush()
    assert all(p.isfinite().all() for p in whole(net).values())
    return digest(whole(net))


@on_ranks(4)
def test_replicas_whose_scalers_skip_other_steps_stay_together():
    mesh = mesh_of(2, 2)
    net = sharded(mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = distributed(net, mesh, outer="nesterov", period=2, grad_scaler=scaler)
    skipped = 0
    for step in range(6):
        optimizer.zero_grad()
        loss = own_loss(net, step) * (float("inf") if step == 1 + dist.get_rank() else 1.0)
        scaler.scale(loss).backward()
        before = digest(whole(net))
        scaler.step(optimizer)
        skipped += before == digest(whole(net))
        scaler.update()
    assert skipped == 2
    with optimizer.anchor():
        return digest(whole(net))


# -- checkpoints -------------------------------------------------------------------------------------------


class Run:
    """A run that saves and loads itself."""

    def __init__(self, inner=lambda p: torch.optim.AdamW(p, lr=0.01), seed=7, replicas=2, **choices):
        self.net = sharded(mesh_of(replicas, 2)["shard"], seed=seed)
        self.optimizer = distributed(self.net, mesh_of(replicas, 2), inner, **choices)

    def train(self, steps):
        train(self.net, self.optimizer, steps)
        return self

    def ends(self):
        return digest([whole(self.net), anchors(self.optimizer), self.optimizer._grace.runner.state()])


def in_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file


RESUMED = {
    "topk": {"compressor": "topk(ratio=0.2)", "outer": "nesterov", "period": 4},
    "fragments": {"strategy": strategy("topk(ratio=0.2)", outer=FRAGMENTS)},
}


@pytest.mark.parametrize("choices", RESUMED)
@on_ranks(4)
def test_a_run_that_is_resumed_in_the_middle_of_a_period_goes_on_bit_for_bit(choices):
    run = Run(**RESUMED[choices]).train(range(5))
    files = {5: in_file(run.optimizer.state_dict())}
    files[7] = in_file(run.train(range(5, 7)).optimizer.full_state_dict())
    run.train(range(7, 10))
    for stop, file in files.items():
        resumed = Run(seed=9, **RESUMED[choices])
        file.seek(0)
        resumed.optimizer.load_state_dict(torch.load(file))
        assert resumed.train(range(stop, 10)).ends() == run.ends(), stop


@on_ranks(4)
def test_no_rank_is_told_to_save_for_all():
    """The file of one rank has the parts of one rank of each copy."""
    run = Run(**RESUMED["topk"]).train(range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.state_dict()


@pytest.mark.parametrize("memories", [False, True])
@on_ranks(4)
def test_torchs_checkpoints_hold_each_ranks_parts(tmp_path, memories):
    def parts(run):
        model, optimizer = get_state_dict(run.net, run.optimizer)
        return {"model": model, "optimizer": optimizer}

    run = Run(**RESUMED["topk"]).train(range(6))
    own = {"memories": grace.torch.Memories(run.optimizer)} if memories else {}
    dcp.save({**parts(run), **own}, checkpoint_id=tmp_path)
    run.train(range(6, 9))
    resumed = Run(seed=9, **RESUMED["topk"])
    own = {"memories": grace.torch.Memories(resumed.optimizer)} if memories else {}
    loaded = {**parts(resumed), **own}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        resumed.net, resumed.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    assert resumed.train(range(6, 9)).ends() == run.ends()


def parts_of(run):
    """Return the states that torch's checkpoints hold of a run."""
    memories = grace.torch.Memories(run.optimizer)
    model, optimizer = get_state_dict(run.net, run.optimizer)
    return {"model": model, "optimizer": optimizer, "memories": memories}


def saves(replicas, folder):
    run = Run(replicas=replicas, **RESUMED["topk"]).train(range(6))
    dcp.save(parts_of(run), checkpoint_id=folder)
    torch.save(run.optimizer.full_state_dict(), folder / f"{dist.get_rank()}.pt")
    return digest([anchors(run.optimizer), [*own_moments(run)]])


def loads(replicas, folder, way):
    run = Run(seed=9, replicas=replicas, **RESUMED["topk"])
    if way == "torch's":
        dcp.load(loaded := parts_of(run), checkpoint_id=folder)
        set_state_dict(run.net, run.optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    else:  # a file for each part of the parameters
        run.optimizer.load_state_dict(torch.load(folder / f"{dist.get_rank() % 2}.pt"))
    loaded = digest([anchors(run.optimizer), [*own_moments(run)]])
    run.train(range(6, 10)).optimizer.flush()
    return loaded, digest(whole(run.net))


def own_moments(run):
    for state in run.optimizer.state.values():
        yield state["exp_avg"].to_local()


@pytest.mark.parametrize("way", ["torch's", "full_state_dict"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_replicas_goes_on_with_the_moments_of_the_first(tmp_path, before, after, way):
    saved = ranks_of(2 * before).run(saves, before, tmp_path)
    loaded, ends = zip(*ranks_of(2 * after).run(loads, after, tmp_path, way), strict=True)
    assert list(loaded) == saved[:2] * after
    assert len(set(ends)) == 1


@on_ranks(4)
def test_the_parts_of_another_rank_are_refused_by_all():
    run = Run(**RESUMED["topk"]).train(range(6))
    files = [None] * 4
    dist.all_gather_object(files, in_file(run.optimizer.state_dict()).getvalue())
    before = run.ends()
    other = dist.get_rank() ^ (dist.get_rank() < 2)  # the ranks of the first copy swap theirs
    state = torch.load(io.BytesIO(files[other]))
    words = refusal(run.optimizer.load_state_dict, state, kind=(grace.ConfigError, grace.RankError))
    if dist.get_rank() == 0:
        assert "the checkpoint is of shard_1_of_2, and this rank has shard_0_of_2. Let every rank load its own" in words
    assert run.ends() == before


# -- refusals ----------------------------------------------------------------------------------------------


@on_ranks(4)
def test_what_cannot_work_is_refused_with_what_would():
    mesh = mesh_of(2, 2)
    rounds = {"outer": "none", "period": 2}

    def make(net, names=None, group="replicate", **choices):
        group = None if group is None else mesh.get_group(group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return grace.DistributedOptimizer(optimizer, net if names is None else names, process_group=group, **choices)

    net, part = sharded(mesh["shard"]), plain()
    fully_shard(part[0], mesh=mesh["shard"])
    each, over_nodes = strategy(), strategy(outer={"optimizer": "none", "period": 2, "over": "nodes"})
    refused = {
        "in every step; or grace.DistributedOptimizer(optimizer, model": lambda: make(net),
        "needs the model itself, not list": lambda: make(net, list(net.named_parameters()), **rounds),
        "by process_group= (all ranks if left out): it must": lambda: make(net, group=None, **rounds),
        "and not the one given to fully_shard": lambda: make(net, group="shard", **rounds),
        "in every step, and the parameters are sharded": lambda: make(net, strategy=each),
        "give outer, over ranks, to all variables": lambda: make(net, strategy=over_nodes),
        "parameter '2.weight' is whole beside sharded ones": lambda: make(part, **rounds),
        "with outer= process_group=mesh.get_group('replicate')": lambda: make(sharded(mesh), **rounds),
    }
    for words, call in refused.items():
        assert words in refusal(call)
    optimizer = make(net, **rounds)
    train(net, optimizer, range(3))
    assert "in every step" in refusal(optimizer.use_strategy, "uniform(compressor=topk)")
    optimizer.use_strategy("diloco(period=2)")
    train(net, optimizer, range(3, 6))
    optimizer.flush()
    return digest(whole(net))
