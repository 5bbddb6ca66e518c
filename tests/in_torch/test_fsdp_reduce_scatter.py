"""Compressed reduce-scatters of FSDP2, alone and below compressed replicas; test_fsdp.py has what both have."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import grace
from grace.errors import StepError
from grace.torch.state_dict import pack_state, unpack_state
from tests.support.drawing import THOROUGH
from tests.support.pools import on_ranks, ranks_of
from tests.support.sharded import (
    Net,
    Turned,
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


@on_ranks(4)
def test_both_levels_begin_late():
    """Both levels uncompressed for three steps, and then compressed."""
    plain, net = built(mesh_of()), built(mesh_of()["shard"])
    plain.set_reduce_scatter_unused_params(True)
    with compressed(net, "topk(ratio=0.1)", "block(bits=4)", compress_after=3) as (lower, upper):
        memories = lower.memory, upper.runner.communicators[0].memory
        error = largest_difference(trained(net, 3), trained(plain, 3))
        before = [len(memory.state.committed) for memory in memories]
        trained(net, 2)
        after = [len(memory.state.committed) for memory in memories]
        assert error < 1e-6
        assert before == [0, 0]
        assert min(after) > 0
        assert lower.context.step == 5


@pytest.mark.parametrize(
    ("block", "memory"),
    [
        ("block(bits=8)", None),
        ("block(bits=4, hadamard=32, block=32)", None),
        ("block(format=fp8)", "none"),
        ("block(bits=4, rounding=stochastic, block=32)", "loco(beta=0.8)"),
    ],
)
@on_ranks(4)
def test_both_levels_keep_the_same_bits_and_are_near_what_torch_computes(block, memory):
    wanted = trained(built(mesh_of()), 8, lr=0.01)
    net = built(mesh_of()["shard"])
    with compressed(net, "block(bits=8)", (block, memory)) as (lower, _):
        got = trained(net, 8, lr=0.01)
        sent = lower.sent_bytes / 8
    assert same_bits(got)
    assert largest_difference(got, wanted) < 0.01
    elements = sum(w.numel() for w in got.values())
    assert sent < 4 * elements / 2 / 2  # half of what the other rank would get in float32


@on_ranks(4)
def test_nothing_of_a_gradient_is_lost():
    """Sent + new residuals = gradients + old residuals, per parameter, in means over the ranks."""
    mesh = mesh_of(1, 4)["shard"]
    net, plain = built(mesh), built(mesh)
    plain.set_reduce_scatter_unused_params(True)
    state = grace.torch.compress_reduce_scatter(net, "block(bits=4)")
    opt, new = torch.optim.SGD(net.parameters(), lr=0.1), left_out(net, state)
    for step in range(5):
        opt.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                q.to_local().copy_(p.to_local())
        loss_of(net, step).backward()
        loss_of(plain, step).backward()
        sent, wanted = ({name: p.grad.full_tensor() for name, p in one.named_parameters()} for one in (net, plain))
        opt.step()
        old, new = new, left_out(net, state)
        for name in sent:
            torch.testing.assert_close(sent[name] + new[name], wanted[name] + old[name], rtol=0, atol=1e-5, msg=name)
    state.close()
    assert max(float(value.abs().max()) for value in new.values()) > 1e-4


@on_ranks(4)
def test_a_run_goes_on_from_its_state():
    def run(net, first, last, saved=None):
        choices = "block(bits=4, block=32, rounding=stochastic)", "loco(reset=4)"
        with compressed(net, shards=choices) as (state,):
            if saved:
                state.load_state_dict(saved)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(first, last):
                opt.zero_grad()
                loss_of(net, step).backward()
                opt.step()
            return state.state_dict()

    straight, stopped = built(mesh_of()["shard"]), built(mesh_of()["shard"])
    run(straight, 0, 6)
    saved = run(stopped, 0, 3)
    run(stopped, 3, 6, saved)
    other = grace.torch.compress_reduce_scatter(stopped, "block(bits=8)")
    message = refusal(other.load_state_dict, saved)
    assert largest_difference(whole(straight), whole(stopped)) == 0
    assert "saved with choice" in message
    assert "here it is 'allgather, block, residual'" in message


METHOD = "block(bits=4, block=32)"


def of_size(shards, memory):
    """A model in shard groups of so many ranks, and its state."""
    net = built(mesh_of(dist.get_world_size() // shards, shards)["shard"])
    return net, grace.torch.compress_reduce_scatter(net, METHOD, memory)


def left_out(net, state):
    """Return what all ranks of the run have left out of the gradients, as a mean of ranks has it, by parameter."""
    found = {name: torch.zeros(p.shape) for name, p in net.named_parameters()}
    for layout in state.layouts:
        for to in range(state.backend.size):
            row = state.memory.state.get(f"{layout.name}/to_{to}")
            start, row = 0, row["error"] if isinstance(row, dict) else row
            for name, param in zip(layout.names, layout.params, strict=True):
                here = torch.chunk(found[name], state.backend.size)[to:][:1]  # none where there are too few rows
                if row is not None and here:
                    here[0].add_(row[start : start + here[0].numel()].view_as(here[0]))
                start += param.padded_sharded_param_size.numel()
    for total in found.values():
        dist.all_reduce(total)
    return {name: total / dist.get_world_size() for name, total in found.items()}


def saves(folder, shards, memory):
    net, state = of_size(shards, memory)
    trained(net, 3)
    dcp.save({"shards": state}, checkpoint_id=folder)
    owed = left_out(net, state)
    state.close()
    return owed


def loads(folder, shards, memory, before):
    net, state = of_size(shards, memory)
    saved = {f"rank_{rank}_of_{before}": b"" for rank in range(before)}
    dcp.load({"shards": saved}, checkpoint_id=folder)
    few = dict(list(saved.items())[1:]) if len(saved) != dist.get_world_size() else {}
    refused = refusal(state.load_state_dict, few)
    damaged = unpack_state(saved[f"rank_0_of_{before}"])
    damaged["memory"].popitem()
    with pytest.warns(UserWarning, match="this was dropped: .* should hold the memory of"):
        state.load_state_dict({**saved, f"rank_0_of_{before}": pack_state(damaged)}, memory="keep")
    state.load_state_dict(saved)
    owed, step = left_out(net, state), state.context.step
    trained(net, 2)
    state.close()
    return owed, step, refused


@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 4)), ((4, 2), (4, 4)), ((4, 4), (2, 2))])
@pytest.mark.parametrize("memory", ["residual", "loco"])
def test_what_was_left_out_is_dealt_out_to_other_ranks(tmp_path, before, after, memory):
    """Ranks, and how many of them are a shard group."""
    folder = str(tmp_path / "checkpoint")
    wanted = ranks_of(before[0]).run(saves, folder, before[1], memory)[0]
    assert sum(bool(value.any()) for value in wanted.values()) >= 3
    for owed, step, message in ranks_of(after[0]).run(loads, folder, after[1], memory, before[0]):
        assert step == 3
        assert "load all of rank_0_of_N to rank_{N-1}_of_N into one dict" in message
        for name, value in wanted.items():
            torch.testing.assert_close(owed[name], value, rtol=1e-5, atol=1e-7)


@on_ranks(4)
def test_a_shard_axis_of_one_rank_is_data_parallelism():
    """Every rank holds a copy: only the hook comes, and the world is the replicate axis."""
    net = Net()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p))
    fully_shard(net, mesh=mesh_of(4, 1)["shard"])
    state = grace.torch.register_fsdp_hook(net, compressor="topk(ratio=0.1)")
    weights = trained(net, 5)
    state.close()
    assert same_bits(weights)
    assert state.runner.context.size == 4


@pytest.mark.parametrize("compress", ["compress_reduce_scatter", "compress_all_gather"])
@on_ranks()
def test_ranks_that_run_other_modules_name_them(compress):
    """Modules of one size have wires of one size, which the engine cannot tell apart."""
    net = Turned()
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=mesh_of(1, 2)["shard"])
    getattr(grace.torch, compress)(net)
    words = refusal(lambda: net(torch.ones(3, 6)).sum().backward(), kind=StepError)
    here, there = ("first", "second") if (compress == "compress_all_gather") == (dist.get_rank() == 0) else (
        "second", "first")  # fmt: skip
    assert f"rank {dist.get_rank()} is at module {here!r}, and rank {1 - dist.get_rank()} sent its part of" in words
    assert f"sent its part of {there!r}" in words


@contextlib.contextmanager
def on_nodes(names):
    """Say in this context on which node each rank is: "aabb"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRACE_NODE", names[dist.get_rank()])
        yield


def reduced(net, step=0):
    """The gradients of a step, of which each rank has its part."""
    net.zero_grad()
    loss_of(net, step).backward()
    return {name: p.grad.to_local().clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("nodes", ["aabb", "abba", *(["abab"] if THOROUGH else [])])
@on_ranks(4)
def test_two_hops_make_the_mean_within_the_bound_of_the_method(nodes):
    """The node's own sum is exact; that of the other node comes in blocks of 4 bits."""
    mesh = mesh_of(1, 4)["shard"]
    plain, net = built(mesh), built(mesh)
    plain.set_reduce_scatter_unused_params(True)
    wanted = reduced(plain)
    with on_nodes(nodes):
        state = grace.torch.compress_reduce_scatter(net, "block(bits=4, block=32)", "none")
    columns = {"aabb": [[0, 2], [1, 3]], "abab": [[0, 1], [2, 3]], "abba": [[0, 1], [2, 3]]}[nodes]
    assert state.peer_ranks in columns
    sums = {}
    encode = state._encode

    def recorded(key, row, finite):
        sums[key] = row.clone()
        return encode(key, row, finite)

    state._encode = recorded
    got = reduced(net)
    state._encode = encode
    state.close()
    everybody = [None] * 4
    dist.all_gather_object(everybody, sums)
    (bounds,) = [
        {key.rpartition("/")[0]: row.abs().max() / 7 / 2 / 4 for key, row in other.items()
         if key.endswith(f"to_{dist.get_rank()}")}
        for other in everybody
        if any(key.endswith(f"to_{dist.get_rank()}") for key in other)
    ]  # fmt: skip
    for name, value in wanted.items():  # the last rank has no rows of the last layer
        module = "last" if name.startswith("last") else "the model"
        assert bool(((got[name] - value).abs() <= bounds[module] * 1.001 + 1e-7).all())
    lossy = any(bool(((got[name] - value).abs() > 1e-5).any()) for name, value in wanted.items())
    dist.all_gather_object(everybody, lossy)
    assert any(everybody)


@on_ranks(4)
def test_bytes_between_nodes_are_those_of_one_payload():
    for names, peers in (("aabb", 2), ("aaaa", 4), ("abcd", 4), ("aaab", 4)):
        net = built(mesh_of(1, 4)["shard"])
        with on_nodes(names), compressed(net, shards="block(bits=4, block=32)") as (state,):
            before = state.peers.sent_bytes
            loss_of(net, 0).backward()
            between = state.peers.sent_bytes - before
            parts = [sum(p.padded_sharded_param_size.numel() for p in layout.params) for layout in state.layouts]
            payloads = [-(-n // 2) + 4 * -(-n // 32) + 1 for n in parts]  # and a status
            assert between == (peers - 1) * sum(-(-nbytes // 8) * 8 for nbytes in payloads)
            inside = sum(4 * (2 * n + 1) for n in parts) if peers == 2 else 0  # the other's two parts, and a flag
            assert state.sent_bytes == between + inside


@pytest.mark.parametrize("nodes", ["aabb", "abab"])
@on_ranks(4)
def test_sums_inside_nodes_may_be_compressed_too(nodes):
    """One rank of each node sends 8 bits, within half a step of its largest gradient; the rest is exact."""
    mesh = mesh_of(1, 4)["shard"]
    plain, net = built(mesh), built(mesh)
    plain.set_reduce_scatter_unused_params(True)
    wanted = reduced(plain)
    torch.manual_seed(7)
    alone = Net()
    loss_of(alone, 0).backward()
    largest = torch.stack([p.grad.abs().max() for p in alone.parameters() if p.grad is not None]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    with on_nodes(nodes), compressed(net, shards=("none", "none"), inside="block(bits=8, block=32)") as (state,):
        before = state.peers.sent_bytes
        got = reduced(net)
        between = state.peers.sent_bytes - before
        parts = [sum(p.padded_sharded_param_size.numel() for p in layout.params) for layout in state.layouts]
        inside = [2 * n + 4 * -(-2 * n // 32) + 1 for n in parts]  # the other's two parts, and a status
        assert between == sum(-(-(4 * n + 1) // 8) * 8 for n in parts)
        assert state.sent_bytes == between + sum(-(-nbytes // 8) * 8 for nbytes in inside)
    errors = torch.stack([(got[name] - value).abs().amax() for name, value in wanted.items() if value.numel()])
    assert float(errors.max()) <= 2 * float(largest) / 127 / 2 / 4 * 1.001 + 1e-7
    lossy = errors.max()
    dist.all_reduce(lossy, dist.ReduceOp.MAX)
    assert float(lossy) > 1e-5


@pytest.mark.parametrize(
    ("nodes", "shards", "bad", "inside"),
    [("aaaa", 2, 3, None), ("aabb", 4, 0, None), ("aabb", 4, 3, "block(bits=8)")],
)
@on_ranks(4)
def test_a_shard_group_that_overflowed_drops_its_gradient_and_keeps_what_it_remembered(nodes, shards, bad, inside):
    """On all of its nodes; another shard group goes on."""
    net, overflowed = built(mesh_of(4 // shards, shards)["shard"]), dist.get_rank() // shards == bad // shards
    with on_nodes(nodes), compressed(net, shards="block(bits=4)", inside=inside) as (state,):
        loss_of(net, 0).backward()
        state.close_step()
        before = {name: value.clone() for name, value in state.memory.state.committed.items()}
        net.zero_grad()
        (loss_of(net, 1) * (torch.inf if dist.get_rank() == bad else 1)).backward()
        assert {bool(p.grad.to_local().isnan().all()) for p in net.parameters() if p.grad is not None} == {overflowed}
        state.close_step()
        assert any(bool(value.any()) for value in before.values())
        assert not overflowed or all(torch.equal(before[n], kept) for n, kept in state.memory.state.committed.items())


@on_ranks(4)
def test_two_hops_go_on_from_their_state_and_deal_out_that_of_one_hop():
    def run(net, first, last, nodes, saved=None):
        with on_nodes(nodes), compressed(net, shards="block(bits=4, block=32)") as (state,):
            if saved:
                state.load_state_dict(saved)
            trained(net, last - first, first=first)
            return state.state_dict(), left_out(net, state)

    straight, stopped = built(mesh_of(1, 4)["shard"]), built(mesh_of(1, 4)["shard"])
    with on_nodes("aabb"), compressed(straight, shards="block(bits=4, block=32)"):
        for first in (0, 3):  # the optimizer's momenta start anew in each
            trained(straight, 3, first=first)
    saved, _ = run(stopped, 0, 3, "aabb")
    run(stopped, 3, 6, "aabb", saved)
    assert largest_difference(whole(straight), whole(stopped)) == 0
    for before, after in (("aaaa", "aabb"), ("aabb", "aaaa"), ("aabb", "abab")):
        net = built(mesh_of(1, 4)["shard"])
        own, owed = run(net, 0, 3, before)
        everybody = [None] * 4
        dist.all_gather_object(everybody, own)
        with on_nodes(after), compressed(net, shards="block(bits=4, block=32)") as (state,):
            state.load_state_dict({key: value for one in everybody for key, value in one.items()})
            for name, value in left_out(net, state).items():
                torch.testing.assert_close(value, owed[name], rtol=1e-5, atol=1e-7)


def of_float64(mesh):
    torch.manual_seed(7)
    return fully_shard(torch.nn.Linear(5, 7, dtype=torch.float64), mesh=mesh)


def float64_loss(net):
    rng = torch.Generator().manual_seed(dist.get_rank())
    return net(torch.randn(4, 5, dtype=torch.float64, generator=rng)).square().mean()


@pytest.mark.parametrize("nodes", ["abcd", "aabb"])
@on_ranks(4)
def test_gradients_of_float64_are_added_up_as_such_where_nothing_is_lost(nodes):
    mesh = mesh_of(1, 4)["shard"]
    plain, net = of_float64(mesh), of_float64(mesh)
    float64_loss(plain).backward()
    with on_nodes(nodes), compressed(net, shards="none", inside="none"):
        float64_loss(net).backward()
    for wanted, got in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), wanted.grad.to_local(), rtol=1e-14, atol=0)


@on_ranks(4)
def test_a_gradient_of_float64_that_float32_cannot_hold_is_an_overflow():
    net = of_float64(mesh_of(1, 4)["shard"])
    with compressed(net, shards="block(bits=8)") as (state,):
        (float64_loss(net) * (1e50 if dist.get_rank() == 3 else 1)).backward()
        assert all(p.grad.to_local().isnan().all() for p in net.parameters())
        state.close_step()
        assert not state.memory.state.committed


@on_ranks(2)
def test_a_sum_that_overflows_in_float16_on_its_rank_alone_is_dropped_by_all_when_they_save():
    half = MixedPrecisionPolicy(torch.float16, torch.float16)
    net = torch.nn.Linear(4, 6, bias=False)
    fully_shard(net, mesh=mesh_of(1, 2)["shard"], mp_policy=half)
    net.set_gradient_divide_factor(1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    with compressed(net, shards="block(bits=4)", grad_scaler=scaler) as (state,):
        for largest in (1.0, 40000.0):
            before = dict(state.memory.state)
            opt.zero_grad()
            weights = torch.tensor([0.3, 1, 1, 0.7, 1, largest])
            scaler.scale((net(torch.ones(1, 4)) * weights).sum()).backward()
            scaler.step(opt)
            scaler.update()
        assert net.weight.grad.to_local().isfinite().all() == (dist.get_rank() == 0)
        state.state_dict()
        after = state.memory.state
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        assert any(value.any() for value in before.values())


@on_ranks(4)
def test_gradients_that_are_cleared_before_the_first_step_are_warned_of_without_an_argument_that_is_not_there():
    net = built(mesh_of(1, 4)["shard"])
    with compressed(net, shards="block") as (state,):
        loss_of(net, 0).backward()
        net.zero_grad()
        with pytest.warns(UserWarning, match="gradients were cleared") as found:
            state.close_step()
    assert "optimizer=" not in str(found[0].message)


@on_ranks(4)
def test_gradients_that_add_up_before_the_first_step_are_not_warned_of():
    """One layer of the module is not used: its zeros were not cleared."""
    net = built(mesh_of(1, 4)["shard"])
    with compressed(net, shards="block"), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(net, 0).backward()
        loss_of(net, 1).backward()


@on_ranks(4)
def test_gradients_that_are_cleared_are_not_warned_of_where_no_memory_keeps_anything():
    net = built(mesh_of()["shard"])
    with compressed(net, replicas="none", shards=("block", "none")) as states, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(net, 0).backward()
        net.zero_grad()
        loss_of(net, 1).backward()
        for state in states:
            state.close_step()
