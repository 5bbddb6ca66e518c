"""FSDP2's hook and reduce-scatters off the beaten path: overflows, tensor parallelism, other placements."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import grace
from tests.in_torch.test_fsdp import MESHES, Net, batch, built, loss_of, mesh_of, same_bits, trained, whole
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks


@pytest.fixture
def four():
    return ranks_of(4)


def remembered(*states):
    """Copies of what is kept."""
    kept = [state.runner.state()["memory"] for state in states if hasattr(state, "runner")]
    kept += [dict(state.memory.state.committed) for state in states if hasattr(state, "memory")]
    return [(name, value.clone()) for memory in kept for name, value in sorted(memory.items())]


def overflows(net, loss_of_step, states, scaler, where):
    """Whether all that is remembered stays through a step that overflows on one rank, and moves in the others."""
    opt, before, answers = torch.optim.SGD(net.parameters(), lr=0.1), None, []
    for step in range(4):
        opt.zero_grad()
        loss = loss_of_step(step)
        scaler.scale(loss * (torch.inf if step == 2 and dist.get_rank() == where else 1)).backward()
        scaler.step(opt)
        scaler.update()
        for state in states:
            state.close_step()
        after = remembered(*states)
        if before is not None:
            answers.append(all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)))
        before = after
    return answers, scaler.get_scale(), len(after)


def two_levels(compressor):
    mesh = mesh_of()
    net = built(mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    lower = grace.torch.compress_reduce_scatter(net, "block(bits=4)", grad_scaler=scaler)
    upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor, grad_scaler=scaler)
    found = overflows(net, lambda step: loss_of(net, step), (lower, upper), scaler, 3)
    same = same_bits(whole(net))
    upper.close()
    lower.close()
    return found, same


@pytest.mark.parametrize("compressor", ["topk(ratio=0.2)", "none"])
def test_a_step_that_overflowed_leaves_no_trace_in_reduce_scatters_of_other_replicas(four, compressor):
    for (answers, scale, kept), same in four.run(two_levels, compressor):
        assert answers == [False, True, False]
        assert (scale, same) == (2.0, True)
        assert kept > 0


def between():
    """Saving between backward and the optimizer's step."""
    mesh = mesh_of()
    net = built(mesh["shard"])
    lower = grace.torch.compress_reduce_scatter(net, "block")
    upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.2)")
    opt, said = torch.optim.SGD(net.parameters(), lr=0.1), []
    loss_of(net, 0).backward()
    for state in (lower, upper):
        with pytest.raises(grace.ExchangeError) as caught:
            state.state_dict()
        said.append(str(caught.value))
    opt.step()
    saved = [state.state_dict() for state in (lower, upper)]
    upper.close()
    lower.close()
    return said, all(saved)


def test_what_no_optimizer_has_used_is_not_saved(four):
    for (lower, upper), saved in four.run(between):
        assert "save after optimizer.step()" in lower
        assert "Save and load after optimizer.step()" in upper
        assert saved


def tensor_parallel_mesh():
    if "tp" not in MESHES:
        MESHES["tp"] = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    return MESHES["tp"]


def parallel(mesh):
    """One layer by columns, one by rows, and one that all ranks of a replica have whole."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6), torch.nn.Linear(6, 3))
    parallelize_module(net, tensor_parallel_mesh()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net[3], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def replicas_loss(net, step):
    """A replica's ranks have the same batch."""
    x, y = batch(step) if dist.get_rank() % 2 == 0 else (torch.empty(4, 8), torch.empty(4, 3))
    for tensor in (x, y):
        dist.broadcast(tensor, group=tensor_parallel_mesh()["tp"].get_group(), group_src=0)
    return (net(x) - y).square().mean()


def beside_tensor_parallelism(compressor):
    mesh = tensor_parallel_mesh()

    def body(net, step):
        replicas_loss(net, step).backward()

    wanted = trained(parallel(mesh["replicate", "shard"]), 4, body)
    net = parallel(mesh["shard"])
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor)
    got = trained(net, 4, body)
    saved, sent = sorted(state.state_dict()), state.traffic.bits_per_element
    state.close()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted), same_bits(got), saved, sent


def test_replicas_of_tensor_parallel_models_are_compressed(four):
    answers = four.run(beside_tensor_parallelism, "none")
    assert all(error < 1e-6 and same for error, same, *_ in answers)
    answers = four.run(beside_tensor_parallelism, "topk(ratio=0.1)")
    assert all(same and sent < 16 for _, same, _, sent in answers)
    assert [saved for _, _, saved, _ in answers] == [["shard_0_of_2"], ["shard_1_of_2"]] * 2


def parallel_overflow():
    mesh = tensor_parallel_mesh()
    net = parallel(mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.2)", grad_scaler=scaler)
    found = overflows(net, lambda step: replicas_loss(net, step), (state,), scaler, 1)
    state.close()
    return found


def test_an_overflow_of_one_part_leaves_no_trace_in_the_others(four):
    for answers, scale, kept in four.run(parallel_overflow):
        assert answers == [False, True, False]
        assert scale == 2.0
        assert kept > 0


def placed(compressor):
    """Weights are sharded along their second dimension."""
    mesh = mesh_of()

    def made(given):
        torch.manual_seed(7)
        net = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3))
        return fully_shard(net, mesh=given, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)

    wanted = trained(made(mesh), 4)
    net = made(mesh["shard"])
    lower = grace.torch.compress_reduce_scatter(net, "none", "none")
    upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor)
    got = trained(net, 4)
    upper.close()
    lower.close()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted), same_bits(got)


def test_parameters_may_be_sharded_along_another_dimension(four):
    assert all(error < 1e-6 and same for error, same in four.run(placed, "none"))
    assert all(same for _, same in four.run(placed, "powersgd(rank=2)"))


def refused(case):
    mesh = mesh_of()
    hooked = functools.partial(grace.torch.register_fsdp_hook, mesh=mesh["replicate"], compressor="topk")
    call = {
        "several groups": lambda: hooked(several_groups(mesh)),
        "several meshes": lambda: hooked(several_meshes(mesh)),
        "no parameters": lambda: hooked(fully_shard(torch.nn.Sequential(torch.nn.ReLU()), mesh=mesh["shard"])),
        "no values": lambda: hooked(fully_shard(Net().to("meta"), mesh=mesh["shard"])),
        "tensor parallelism": lambda: grace.torch.compress_reduce_scatter(parallel(tensor_parallel_mesh()["shard"])),
        "divided": lambda: divided(mesh),
    }[case]
    with pytest.raises(grace.ConfigError) as caught:
        call()
    return str(caught.value)


def divided(mesh):
    net = built(mesh["shard"])
    state = grace.torch.compress_reduce_scatter(net)
    net.last.set_gradient_divide_factor(3.0)
    try:
        loss_of(net, 0).backward()
    finally:
        state.close()


def several_meshes(mesh):
    net = Net()
    fully_shard(net.last, mesh=mesh["replicate"])
    return fully_shard(net, mesh=mesh["shard"])


def several_groups(mesh):
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    net, infos = Net(), [FSDPMeshInfo(mesh[axis], shard_mesh_dim=0) for axis in ("shard", "replicate")]
    placements = {p: ShardPlacementResult(Shard(0), infos["last" in name]) for name, p in net.named_parameters()}
    return fully_shard(net, mesh=mesh["shard"], shard_placement_fn=placements.__getitem__)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("several groups", "has parameters with 2 meshes, which register_fsdp_hook cannot tell apart"),
        ("several meshes", "are sharded over different ranks"),
        ("no parameters", "Sequential has no parameters"),
        ("no values", "call model.to_empty(...) first"),
        ("tensor parallelism", "register_fsdp_hook compresses what replicas of such models exchange"),
        ("divided", "set_gradient_divide_factor asks for"),
    ],
)
def test_what_cannot_work_is_refused_by_name(four, case, words):
    for message in four.run(refused, case):
        assert words in message


def compiled():
    """Weights of two-level training with and without torch.compile, and how many graphs were compiled and run."""
    mesh, weights, counter = mesh_of(), [], CompileCounter()
    for compile in (False, True):
        torch._dynamo.reset()
        net = built(mesh["shard"])
        lower = grace.torch.compress_reduce_scatter(net, "block(bits=4)")
        upper = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.1)")
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        called = torch.compile(net, backend=counter) if compile else net
        for step in range(3):
            opt.zero_grad()
            loss_of(called, step).backward()
            opt.step()
        weights.append(whole(net))
        upper.close()
        lower.close()
    torch._dynamo.reset()
    return all(torch.equal(a, b) for a, b in zip(*map(dict.values, weights), strict=True)), counter.frame_count


def test_a_compiled_model_trains_as_it_does_eagerly(four):
    for same, graphs in four.run(compiled):
        assert same
        assert graphs > 0


def held_back():
    mesh = mesh_of()
    net = built(mesh["shard"])
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk")
    net.set_requires_all_reduce(False)
    try:
        with pytest.raises(grace.ExchangeError) as caught:
            loss_of(net, 0).backward()
    finally:
        state.close()
    return str(caught.value)


def test_an_exchange_that_cannot_be_held_back_says_how_to(four):
    for message in four.run(held_back):
        assert "To accumulate, use set_requires_gradient_sync(False)" in message


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    for call in (grace.torch.register_fsdp_hook, grace.torch.compress_reduce_scatter):
        with pytest.raises(grace.ConfigError, match=r"needs torch 2\.13 or newer, and this is "):
            call(Net())
