"""FSDP2 over 2 shards x 2 replicas: what crosses the replicate axis is compressed, and all else is torch's."""

import functools
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import grace
from grace.errors import StepError
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.sharded import (
    POLICIES,
    Net,
    Turned,
    batch,
    built,
    compressed,
    largest_difference,
    loss_of,
    mesh_of,
    same_bits,
    trained,
    whole,
)
from tests.support.training import refusal

pytestmark = pytest.mark.ranks

TOPK, BLOCK = "topk(ratio=0.2)", "block(bits=4)"


# -- what torch computes ---------------------------------------------------------------------------------------------


def accumulated(net, step):
    for part in range(3):
        for module in (net, net.last):
            module.set_requires_gradient_sync(part == 2)
        loss_of(net, step, part).backward()


def spared(net, step):
    loss_of(net, step, spare=step % 2 == 1).backward()


def clipped(net, step):
    loss_of(net, step).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


BODIES = {"plain": None, "accumulated": accumulated, "spared": spared, "clipped": clipped}
LEVELS = {"replicas": {"replicas": "none"}, "both levels": {"replicas": "none", "shards": ("none", "none")}}


def torch_takes(policy, levels, body):
    """torch accumulates in float32 there, and refuses to reduce that beside bfloat16."""
    return (policy, body) != ("bfloat16 to float32", "accumulated")


@pytest.mark.parametrize(("policy", "levels", "body"), pairwise(POLICIES, LEVELS, BODIES, allowed=torch_takes))
@on_ranks(4)
def test_uncompressed_it_is_torchs_own_hsdp_whatever_people_do_in_a_step(policy, levels, body):
    """Methods that leave nothing out train as torch's own HSDP does."""
    mesh, options = mesh_of(), POLICIES[policy]
    theirs = built(mesh, **options)
    theirs.set_reduce_scatter_unused_params(True)
    wanted = trained(theirs, 4, BODIES[body])
    net = built(mesh["shard"], **options)
    with compressed(net, **LEVELS[levels]) as states:
        got = trained(net, 4, BODIES[body])
        steps = [getattr(state, "runner", state).context.step for state in states]
    assert largest_difference(got, wanted) < (3e-2 if policy == "bfloat16" else 1e-6)
    assert same_bits(got)
    assert set(steps) == {4}


def tensor_parallel(mesh):
    """One layer by columns, one by rows, and one that all ranks of a replica have whole."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6), torch.nn.Linear(6, 3))
    parallelize_module(net, mesh_of(2, 1, 2)["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net[3], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def replicas_loss(net, step):
    """A replica's ranks have the same batch."""
    x, y = batch(step) if dist.get_rank() % 2 == 0 else (torch.empty(4, 8), torch.empty(4, 3))
    for tensor in (x, y):
        dist.broadcast(tensor, group=mesh_of(2, 1, 2)["tp"].get_group(), group_src=0)
    return (net(x) - y).square().mean()


@pytest.mark.every
@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
@on_ranks(4)
def test_replicas_of_tensor_parallel_models_are_compressed(compressor):
    mesh = mesh_of(2, 1, 2)

    def body(net, step):
        replicas_loss(net, step).backward()

    net = tensor_parallel(mesh["shard"])
    with compressed(net, compressor, mesh=mesh) as (state,):
        got = trained(net, 4, body)
        assert list(state.state_dict()) == [f"shard_{dist.get_rank() % 2}_of_2"]
        sent = state.traffic.bits_per_element
    assert same_bits(got)
    if compressor == "none":
        assert largest_difference(got, trained(tensor_parallel(mesh["replicate", "shard"]), 4, body)) < 1e-6
    else:
        assert sent < 16


@on_ranks(4)
def test_what_cannot_compress_inside_tensor_parallel_models_names_itself():
    net = tensor_parallel(mesh_of(2, 1, 2)["shard"])
    for call in (grace.torch.compress_reduce_scatter, grace.torch.compress_all_gather):
        assert f"which {call.__name__} cannot; register_fsdp_hook compresses" in refusal(call, net)


@pytest.mark.every
@pytest.mark.parametrize("compressor", ["none", "powersgd(rank=2)"])
@on_ranks(4)
def test_parameters_may_be_sharded_along_another_dimension(compressor):
    def made(given):
        torch.manual_seed(7)
        net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
        return fully_shard(net, mesh=given, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)

    net = made(mesh_of()["shard"])
    with compressed(net, compressor, ("none", "none")):
        got = trained(net, 4)
    assert same_bits(got)
    assert compressor != "none" or largest_difference(got, trained(made(mesh_of()), 4)) < 1e-6


@on_ranks(4)
def test_modules_that_are_sharded_as_one_group_are_saved_once():
    def made():
        torch.manual_seed(7)
        net = Net()
        fully_shard([net.spare, net.last], mesh=mesh_of()["shard"])
        return fully_shard(net, mesh=mesh_of()["shard"])

    net = made()
    with compressed(net, TOPK, BLOCK) as states:
        trained(net, 2)
        saved = [state.state_dict() for state in states]
    with compressed(made(), TOPK, BLOCK) as states:
        for state, one in zip(states, saved, strict=True):
            state.load_state_dict(one)
            assert state.context.step == 2
        assert len(states[1].runner.variables) == len(dict(net.named_parameters()))


@on_ranks(4)
def test_a_compiled_model_trains_as_it_does_eagerly():
    weights, counter = [], CompileCounter()
    for compile in (False, True):
        torch._dynamo.reset()
        net = built(mesh_of()["shard"])
        called = torch.compile(net, backend=counter) if compile else net
        with compressed(net, "topk(ratio=0.1)", BLOCK):
            weights.append(trained(net, 3, lambda _, step, called=called: loss_of(called, step).backward()))
    torch._dynamo.reset()
    assert largest_difference(*weights) == 0
    assert counter.frame_count > 0


@on_ranks(4)
def test_a_model_may_have_been_evaluated_before():
    """An evaluation leaves the root's gathered parameters in place."""
    net = built(mesh_of()["shard"])
    with torch.no_grad():
        loss_of(net, 0)
    with compressed(net, "topk(ratio=0.1)", BLOCK):
        assert same_bits(trained(net, 2))


# -- compressed ------------------------------------------------------------------------------------------------------


def many(compressor=None, memory=None, **choices):
    net = built(mesh_of()["shard"])
    with compressed(net, (compressor, memory), **choices) as (state,):
        weights = trained(net, 4)
        return same_bits(weights), state.traffic.bits_per_element, sorted(state.runner.state()["memory"])


METHODS = ["topk(ratio=0.1)", "block(bits=4, hadamard=32)", "powersgd(rank=2)", "efsignsgd", "qsgd"]


@on_ranks(4)
def test_replicas_have_the_same_bits_after_many_steps():
    """efsignsgd's own memory follows the optimizer."""
    for method in METHODS:
        same, *_ = many(method, "residual" if method == "efsignsgd" else None, seed=3)
        assert same, method


@on_ranks(4)
def test_strategies_and_the_names_of_what_is_kept():
    same, bits, names = many(strategy="all_reduce(compressor=topk(ratio=0.1))")
    assert same
    assert bits < 32
    assert set(names) <= {f"{layer}.{kind}" for layer in ("first", "spare", "last") for kind in ("weight", "bias")}
    assert "first.weight" in names


@on_ranks(4)
def test_states_that_are_gone_are_no_longer_told_of_steps():
    """Two hooks' states are gone without close(), while two others are told of steps."""
    mesh, states = mesh_of(), []
    for _ in range(4):
        net = built(mesh["shard"])
        states.append(grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.1)"))
    del states[:2]
    gc.collect()
    weights = trained(net, 3)
    steps = [state.runner.context.step for state in states]
    for state in states:
        state.close()
    assert (same_bits(weights), steps) == (True, [0, 3])


@on_ranks(4)
def test_means_that_an_earlier_run_left_are_applied():
    """Means that are still to be applied are added once, by every replica, to the next gradients that are used."""
    net = built(mesh_of()["shard"])
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    with compressed(net, "none", optimizer=opt) as (state,):
        runner = state.runner
        runner.carry_over({name: torch.ones(shard.variable.shape) for name, shard in runner.shards.items()})
        found = []
        for used in (False, True, True):
            opt.zero_grad()
            before = whole(net)
            (0.0 * loss_of(net, 0)).backward()
            if used:
                opt.step()
            found.append({float((before[name] - after).mean().round(decimals=4)) for name, after in whole(net).items()})
        state.close_step()
        assert (found, runner.has_carried_over) == ([{0.0}, {1.0}, {0.0}], False)


# -- overflows -------------------------------------------------------------------------------------------------------


def remembered(*states):
    """Copies of what is kept."""
    kept = [state.runner.state()["memory"] for state in states if hasattr(state, "runner")]
    kept += [dict(state.memory.state.committed) for state in states if hasattr(state, "memory")]
    return [(name, value.clone()) for memory in kept for name, value in sorted(memory.items())]


@pytest.mark.parametrize(
    ("parallel", "where", "replicas", "shards"),
    [(False, 1, TOPK, None), (False, 3, TOPK, BLOCK), (False, 3, "none", BLOCK), (True, 1, TOPK, None)],
    ids=["replicas", "both levels", "reduce-scatters of other replicas", "tensor parallelism"],
)
@on_ranks(4)
def test_a_step_that_overflowed_on_one_rank_leaves_no_trace_on_any(parallel, where, replicas, shards):
    """All that is remembered stays through a step that overflows on one rank, and moves in the others."""
    mesh = mesh_of(2, 1, 2) if parallel else mesh_of()
    net = (tensor_parallel if parallel else built)(mesh["shard"])
    loss_of_step = replicas_loss if parallel else loss_of
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    opt, before, stayed = torch.optim.SGD(net.parameters(), lr=0.1), None, []
    with compressed(net, replicas, shards, mesh, grad_scaler=scaler) as states:
        for step in range(4):
            opt.zero_grad()
            loss = loss_of_step(net, step)
            scaler.scale(loss * (torch.inf if step == 2 and dist.get_rank() == where else 1)).backward()
            scaler.step(opt)
            scaler.update()
            for state in states:
                state.close_step()
            after = remembered(*states)
            if before is not None:
                stayed.append(all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)))
            before = after
    weights = whole(net)
    finite = all(bool(value.isfinite().all()) for value in [*weights.values(), *(value for _, value in after)])
    answer = stayed, scaler.get_scale(), len(after) > 0, same_bits(weights), finite
    assert answer == ([False, True, False], 2.0, True, True, True)


@on_ranks(4)
def test_ranks_whose_parts_are_too_small_for_the_method_compare_overflows_too():
    """Rank 0 has two rows of the only layer, a matrix for PowerSGD. Rank 1 has one row, which is sent as it is."""
    net = fully_shard(torch.nn.Linear(5, 3), mesh=mesh_of()["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = []
    with compressed(net, "powersgd(rank=1)", grad_scaler=scaler) as (state,):
        assert state.runner.stateful == (dist.get_rank() % 2 == 0)
        for step in range(3):
            opt.zero_grad()
            x = torch.full((2, 5), torch.inf if (step, dist.get_rank()) == (1, 1) else 1.0 + step)
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            state.close_step()
            kept.append(remembered(state))
        assert state.state_dict()
    same = [[torch.equal(a, b) for (_, a), (_, b) in zip(*pair, strict=True)] for pair in itertools.pairwise(kept)]
    assert same == ([[True], [False]] if dist.get_rank() % 2 == 0 else [[], []])
    assert same_bits(whole(net))


class Twice(torch.nn.Module):
    """A layer that runs twice; of the first run the gradient may overflow, which comes after the second run's."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.outer = torch.nn.Linear(8, 3)

    def forward(self, x, overflows=False):
        x = self.inner(x)
        if overflows:
            x.register_hook(lambda gradient: torch.inf * gradient)
        return self.outer(self.inner(x))


def twice(mesh):
    torch.manual_seed(7)
    net = Twice()
    fully_shard(net.inner, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@pytest.mark.parametrize("shards", [BLOCK, None], ids=["both levels", "replicas"])
@on_ranks(4)
def test_a_module_that_runs_twice_is_exchanged_twice_in_one_step(shards):
    """If its second gradient overflows, memories keep nothing of the first one either."""
    net = twice(mesh_of()["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    opt, stayed = torch.optim.SGD(net.parameters(), lr=0.1), []
    with compressed(net, TOPK, shards, grad_scaler=scaler) as states:
        for step in range(3):
            opt.zero_grad()
            before = remembered(*states)
            overflows = step == 1 and dist.get_rank() == 3
            scaler.scale(loss_of(net, step, overflows=overflows)).backward()
            scaler.step(opt)
            scaler.update()
            for state in states:
                state.close_step()
            after = remembered(*states)
            stayed.append(len(before) > 0 and all(map(torch.equal, dict(before).values(), dict(after).values())))
        steps = {getattr(state, "runner", state).context.step for state in states}
    assert stayed == [False, True, False]
    assert steps == {3}


def trained_in_backward(net, steps):
    """Train as ``trained`` does, each parameter by an optimizer of its own, as soon as it has its gradient."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    for number in range(steps):
        loss_of(net, number).backward()
    return whole(net)


@on_ranks(4)
def test_optimizers_may_step_in_backward():
    """A step is a whole backward pass, and other modules compute backward with the weights of forward."""
    found = []
    for train in (trained, trained_in_backward):
        net = built(mesh_of()["shard"])
        weights = grace.torch.compress_all_gather(net, "qsgd")
        with compressed(net, TOPK, BLOCK, compress_after=2):
            found.append(train(net, 4))
        weights.close()
    assert largest_difference(*found) == 0


@on_ranks(4)
def test_nothing_of_a_gradient_is_lost_also_where_it_comes_twice():
    """Sent + residuals = gradients, per variable, in sums over the replicas and the steps."""
    mesh = mesh_of()

    def gradients(net, steps):
        total = {name: torch.zeros_like(p.to_local()) for name, p in net.named_parameters()}
        for _ in range(steps):
            net.zero_grad()
            loss_of(net, 0).backward()
            for name, p in net.named_parameters():
                total[name] += p.grad.to_local()
            torch.optim.SGD(net.parameters(), lr=0.0).step()
        return total

    wanted = gradients(twice(mesh), 3)
    net = twice(mesh["shard"])
    with compressed(net, TOPK) as (state,):
        got = gradients(net, 3)
        kept = state.runner.state()["memory"]
    for name, residual in kept.items():
        dist.all_reduce(residual := residual.clone(), group=mesh["replicate"].get_group())
        torch.testing.assert_close(got[name] + residual / 2, wanted[name])
    assert any(bool(residual.any()) for residual in kept.values())


@pytest.mark.parametrize("shards", [BLOCK, None], ids=["both levels", "replicas"])
@on_ranks(4)
def test_training_goes_on_after_an_overflow_as_if_that_step_had_not_been(shards):
    found = []
    for overflows in (False, True):
        mesh = mesh_of()
        net = built(mesh["shard"])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with compressed(net, TOPK, shards, mesh, grad_scaler=scaler):
            for step in range(4):
                for factor in (torch.inf, 1) if overflows and step == 2 else (1,):
                    opt.zero_grad()
                    scaler.scale(loss_of(net, step) * (factor if dist.get_rank() == 3 else 1)).backward()
                    scaler.step(opt)
                    scaler.update()
        found.append(whole(net))
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


# -- what is refused -------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_what_no_optimizer_has_used_is_not_saved():
    """Saving between backward and the optimizer's step."""
    net = built(mesh_of()["shard"])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with compressed(net, TOPK, "block") as states:
        loss_of(net, 0).backward()
        lower, upper = (refusal(state.state_dict, kind=grace.ExchangeError) for state in states)
        assert "save after optimizer.step()" in lower
        assert "Save and load after optimizer.step()" in upper
        opt.step()
        assert all(state.state_dict() for state in states)
        loss_of(net, 1).backward()
        opt.zero_grad()  # nothing will use them any more
        assert all(state.state_dict() for state in states)


@on_ranks(4)
def test_an_exchange_that_cannot_be_held_back_says_how_to():
    net = built(mesh_of()["shard"])
    with compressed(net, "topk"):
        net.set_requires_all_reduce(False)
        message = refusal(lambda: loss_of(net, 0).backward(), kind=grace.ExchangeError)
        assert "To accumulate, use set_requires_gradient_sync(False)" in message


@pytest.mark.parametrize("trained_first", [True, False], ids=["frozen", "thawed"])
@on_ranks(4)
def test_parameters_that_are_frozen_or_thawed_too_late_are_named(trained_first):
    for choices in ({"replicas": "topk"}, {"shards": "block"}):
        net = built(mesh_of()["shard"])
        net.last.bias.requires_grad_(trained_first)
        with compressed(net, **choices):
            loss_of(net, 0).backward()
            net.last.bias.requires_grad_(not trained_first)
            if trained_first and "replicas" in choices:  # which has the other parameters one by one
                loss_of(net, 1).backward()
            else:
                message = refusal(lambda net=net: loss_of(net, 1).backward(), kind=grace.ExchangeError)
                assert "last" in message
                assert "Parameters must be frozen, and thawed (requires_grad), before" in message


@on_ranks(4)
def test_parameters_that_are_replaced_too_late_are_named():
    """An optimizer's step is known by its parameters."""
    for choices in ({"replicas": "topk"}, {"shards": "block"}, {}):
        net = built(mesh_of()["shard"])
        weights = None if choices else grace.torch.compress_all_gather(net)
        with compressed(net, **choices):
            net.load_state_dict({name: p.detach().clone() for name, p in net.state_dict().items()}, assign=True)
            message = refusal(lambda net=net: loss_of(net, 0).backward(), kind=grace.ExchangeError)
            assert (
                "was replaced after Grace compressed its exchange, as by load_state_dict(..., assign=True)" in message
            )
        if weights is not None:
            weights.close()


@on_ranks(4)
def test_complex_parameters_are_refused_by_name_where_gradients_are_compressed():
    net = torch.nn.Module()
    net.w = torch.nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))
    net.forward = lambda x: (x.to(torch.complex64) @ net.w).abs().sum()
    fully_shard(net, mesh=mesh_of()["shard"])
    for call, given in (
        (grace.torch.register_fsdp_hook, [mesh_of()["replicate"]]),
        (grace.torch.compress_reduce_scatter, []),
    ):
        assert "parameter 'w' is torch.complex64" in refusal(call, net, *given)
    weights = grace.torch.compress_all_gather(net)  # leaves them to torch's
    net(torch.ones(2, 6)).backward()
    weights.close()
    assert weights.sent_bytes == 0


def divided(mesh):
    net = built(mesh["shard"])
    with compressed(net, shards="block"):
        net.last.set_gradient_divide_factor(3.0)
        loss_of(net, 0).backward()


def several_meshes(mesh):
    net = Net()
    fully_shard(net.last, mesh=mesh["replicate"])
    return fully_shard(net, mesh=mesh["shard"])


def several_groups(mesh):
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    net, infos = Net(), [FSDPMeshInfo(mesh[axis], shard_mesh_dim=0) for axis in ("shard", "replicate")]
    placements = {p: ShardPlacementResult(Shard(0), infos["last" in name]) for name, p in net.named_parameters()}
    return fully_shard(net, mesh=mesh["shard"], shard_placement_fn=placements.__getitem__)


def optimizer_without_one(mesh):
    net = built(mesh["shard"])
    optimizer = torch.optim.SGD(list(net.parameters())[1:], 0.1)
    grace.torch.register_fsdp_hook(net, mesh["replicate"], "efsignsgd", optimizer=optimizer)


@on_ranks(4)
def test_what_cannot_work_is_refused_with_what_would():
    mesh = mesh_of()
    hook = functools.partial(grace.torch.register_fsdp_hook, compressor="topk")
    scatter, replicate = grace.torch.compress_reduce_scatter, mesh["replicate"]
    no_layer = torch.nn.Sequential(torch.nn.ReLU())
    refused = {
        "fully_shard(module, mesh=mesh['shard'])": lambda: hook(built(mesh), replicate),
        "must be the replicate axis alone: mesh['replicate']": lambda: hook(built(mesh["shard"]), mesh),
        "and not the one given to fully_shard": lambda: hook(built(mesh["shard"]), mesh["shard"]),
        "mesh=, the replicate axis, was not given": lambda: hook(built(mesh["shard"])),
        "call fully_shard(model, mesh=mesh['shard']) first": lambda: hook(Net()),
        "has parameters with 2 meshes, which register_fsdp_hook cannot tell apart": lambda: hook(
            several_groups(mesh), replicate
        ),
        "are sharded over different ranks": lambda: hook(several_meshes(mesh), replicate),
        "Sequential has no parameters": lambda: hook(fully_shard(no_layer, mesh=mesh["shard"]), replicate),
        "call model.to_empty(...) first": lambda: hook(fully_shard(Net().to("meta"), mesh=mesh["shard"]), replicate),
        "register_fsdp_hook compresses what replicas of such models exchange": lambda: scatter(
            tensor_parallel(mesh_of(2, 1, 2)["shard"])
        ),
        "set_gradient_divide_factor asks for": lambda: divided(mesh),
        "the optimizer does not hold the parameter": lambda: optimizer_without_one(mesh),
        "use block": lambda: scatter(built(mesh["shard"]), "topk"),
        "compress_reduce_scatter(inside=...): topk": lambda: scatter(built(mesh["shard"]), "block", inside="topk"),
        "use residual or loco": lambda: scatter(built(mesh["shard"]), "block", "efsignsgd"),
        "register_fsdp_hook": lambda: scatter(fully_shard(Net(), mesh=mesh_of(4, 1)["shard"]), "block"),
    }
    for words, call in refused.items():
        assert words in refusal(call), words


@on_ranks(4)
def test_a_second_compression_of_one_model_is_refused_until_the_first_is_closed():
    mesh = mesh_of()
    net = built(mesh["shard"])
    for compress in (
        functools.partial(grace.torch.register_fsdp_hook, net, mesh["replicate"], "topk"),
        functools.partial(grace.torch.compress_reduce_scatter, net),
        functools.partial(grace.torch.compress_all_gather, net),
    ):
        first = compress()
        assert "are compressed already: close() their state first" in refusal(compress)
        first.close()
        second = compress()
        first.close()  # once more, which must not end the second
        assert "are compressed already: close() their state first" in refusal(compress)
        second.close()


@pytest.mark.parametrize("known", [True, False])
@on_ranks()
def test_replicas_that_run_modules_in_another_order_name_it_in_the_next_step(known):
    """No wire says whose gradients it has, and these have one size."""
    mesh, net = mesh_of(2, 1), Turned()
    for module in (net.first, net.second):
        fully_shard(module, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    grace.torch.register_fsdp_hook(net, mesh["replicate"], TOPK, optimizer=opt if known else None)

    def train():
        for _ in range(2):
            net(torch.ones(3, 6)).sum().backward()
            opt.step()

    words = refusal(train, kind=StepError)
    orders = "rank 0 has modules in the order second, first, rank 1 has modules in the order first, second"
    assert orders in words


@on_ranks(4)
def test_parts_of_tensors_are_refused_where_ranks_need_whole_ones():
    """On rank 0 alone; the others hear that it refused."""
    mesh = mesh_of()
    net = built(mesh["shard"])
    given = (net, net.last.weight.detach()) if dist.get_rank() == 0 else (Net(), torch.zeros(3, 13))
    communicator = grace.communicators.Allgather("topk(ratio=0.5)", "residual", 4)
    calls = {
        "'first.weight' is a DTensor": lambda: grace.broadcast_parameters(given[0]),
        "takes a whole tensor, and this one is a DTensor": lambda: grace.allreduce(given[1]),
        "it is a DTensor": lambda: communicator.step(given[1], "w"),
    }
    kind = grace.ConfigError if dist.get_rank() == 0 else grace.RankError
    words = [refusal(call, kind=kind) for call in calls.values()]
    if dist.get_rank() == 0:
        assert all(message in one for message, one in zip(calls, words, strict=True)), words


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    for call in (grace.torch.register_fsdp_hook, grace.torch.compress_reduce_scatter):
        assert "needs torch 2.13 or newer, and this is " in refusal(call, Net())
