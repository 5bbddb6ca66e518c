"""Compressed reduce-scatters of FSDP2, alone and below compressed replicas; test_fsdp.py has what both have."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import grace
from grace.torch.state_dict import pack_state, unpack_state
from tests.support.pools import on_ranks, ranks_of
from tests.support.sharded import (
    Net,
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


@pytest.fixture
def four():
    """4 real gloo ranks."""
    return ranks_of(4)


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
    wanted = trained(built(mesh_of()), 20, lr=0.01)
    net = built(mesh_of()["shard"])
    with compressed(net, "block(bits=8)", (block, memory)) as (lower, _):
        got = trained(net, 20, lr=0.01)
        sent = lower.sent_bytes / 20
    assert same_bits(got)
    assert largest_difference(got, wanted) < 0.02
    elements = sum(w.numel() for w in got.values())
    assert sent < 4 * elements / 2 / 2  # half of what the other rank would get in float32


@on_ranks(4)
def test_nothing_of_a_gradient_is_lost():
    """Over the shard group: sent + new residuals = gradients + old residuals, module by module."""
    mesh = mesh_of()
    net, plain = built(mesh["shard"]), built(mesh["shard"])
    plain.set_reduce_scatter_unused_params(True)
    state = grace.torch.compress_reduce_scatter(net, "block(bits=4)")
    opt, group, worst = torch.optim.SGD(net.parameters(), lr=0.1), mesh["shard"].get_group(), 0.0
    other = 1 - dist.get_rank(group)

    def owed():
        """What the other rank still has for this one, by module."""
        found = {}
        for layout in state.layouts:
            mine = state.memory.state.committed.get(f"{layout.name}/to_{other}")
            size = sum(param.padded_sharded_param_size.numel() for param in layout.params)
            mine = torch.zeros(size) if mine is None else mine.clone()
            both = [torch.empty(size) for _ in range(2)]
            dist.all_gather(both, mine, group=group)
            found[layout.name] = both[other].double()
        return found

    def of(net, layout):
        grads = {name: p.grad.to_local() for name, p in net.named_parameters()}
        flat, start = torch.zeros_like(owed()[layout.name]), 0
        for name, param in zip(layout.names, layout.params, strict=True):
            flat[start : start + grads[name].numel()] = grads[name].reshape(-1)
            start += param.padded_sharded_param_size.numel()
        return flat

    for step in range(5):
        opt.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                q.to_local().copy_(p.to_local())
        old = owed()
        loss_of(net, step).backward()
        loss_of(plain, step).backward()
        sent = {layout.name: of(net, layout) for layout in state.layouts}
        wanted = {layout.name: of(plain, layout) for layout in state.layouts}
        opt.step()
        new = owed()
        for name in sent:
            difference = 2 * sent[name] + new[name] - 2 * wanted[name] - old[name]
            worst = max(worst, float(difference.abs().max()))
    left = max(float(value.abs().max()) for value in new.values())
    state.close()
    assert worst < 1e-5
    assert left > 1e-4


def overflowed():
    net = built(mesh_of()["shard"])
    with compressed(net, shards="block(bits=4)") as (state,):
        loss_of(net, 0).backward()
        state.close_step()
        before = {name: value.clone() for name, value in state.memory.state.committed.items()}
        net.zero_grad()
        (loss_of(net, 1) * (torch.inf if dist.get_rank() == 3 else 1)).backward()
        spoilt = [bool(p.grad.to_local().isnan().all()) for p in net.parameters() if p.grad is not None]
        state.close_step()
        kept = all(torch.equal(before[name], value) for name, value in state.memory.state.committed.items())
    changed = any(float(value.abs().max()) > 0 for value in before.values())
    return all(spoilt), any(spoilt), kept, changed


def test_a_shard_group_that_overflowed_keeps_what_it_remembered(four):
    answers = four.run(overflowed)
    assert [some for _, some, *_ in answers] == [False, False, True, True]  # ranks 2 and 3 are one group
    assert all(whole for whole, *_ in answers[2:])
    assert all(changed for *_, changed in answers)
    assert all(kept for *_, kept, _ in answers[2:])


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
    """By parameter, what all ranks of the run have left out of its gradients, as a mean of ranks has it."""
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
