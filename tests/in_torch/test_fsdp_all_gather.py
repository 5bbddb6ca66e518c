"""Compressed all-gathers of FSDP2: which weights ranks compute with, what is sent, and what stays as torch has it."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import grace
from grace.torch.state_dict import unpack_state
from tests.support.pools import on_ranks
from tests.support.sharded import (
    POLICIES,
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

NODES = {**POLICIES, "nodes of two": {"reshard_after_forward": 2}}


@contextlib.contextmanager
def gathered(net, *choices, **options):
    """Compress in this context the gathers of a sharded model."""
    state = grace.torch.compress_all_gather(net, *choices, **options)
    try:
        yield state
    finally:
        state.close()


def seen_weights(net, step=0, backward=False):
    """The weights that this rank computes with, in the forward pass or in the backward pass."""
    found = {}

    def look(name, module):
        found.update({f"{name}.{key}": p.detach().clone() for key, p in module.named_parameters(recurse=False)})

    hooks = []
    for name in ("first", "last"):
        module = net.get_submodule(name)

        def computed(module, _, out, name=name):
            if backward:
                out.register_hook(lambda _: look(name, module))
            else:
                look(name, module)

        # before FSDP2's hook, which reshards; in backward behind it, as it gathers again by a hook on the same tensor
        hooks.append(module.register_forward_hook(computed, prepend=not backward))
    loss_of(net, step).backward()  # in any case: until then FSDP2 keeps the root's weights
    net.zero_grad()
    for hook in hooks:
        hook.remove()
    return {name: value.detach() for name, value in found.items()}


def decoded(net, method, shards):
    """The weights that all ranks must see: each parameter's shards, padded, encoded and decoded one by one."""
    found = {}
    for name, p in net.named_parameters():
        full = p.full_tensor().detach()
        rows = -(-full.shape[0] // shards)
        padded = torch.zeros(rows * shards, *full.shape[1:])
        padded[: full.shape[0]] = full
        parts = [method.decompress(*method.compress(part.flatten(), name)) for part in padded.chunk(shards)]
        found[name] = torch.cat(parts).view(padded.shape)[: full.shape[0]]
    return found


def settled_step(state):
    """Return the number of steps that a state saves."""
    state.settle(saves=True)
    return state.context.step


@pytest.mark.parametrize("policy", NODES)
@on_ranks(4)
def test_without_a_codec_it_is_fsdp2_bit_for_bit(policy):
    mesh = mesh_of(1, 4)["shard"]
    plain = trained(built(mesh, **NODES[policy]), 4)
    net = built(mesh, **NODES[policy])
    with gathered(net, "none") as state:
        assert largest_difference(trained(net, 4), plain) == 0
        assert state.sent_bytes > 0


@pytest.mark.parametrize("spec", ["block(bits=8)", "block(bits=4, block=32)", "block(bits=4, hadamard=32)"])
@on_ranks(4)
def test_all_ranks_compute_with_what_was_decoded_and_shards_stay(spec):
    mesh = mesh_of(1, 4)["shard"]
    net = built(mesh)
    before = whole(net)
    with gathered(net, spec):
        for backward in (False, True):
            seen = seen_weights(net, backward=backward)
            wanted = decoded(net, grace.make("compressor", spec), 4)
            assert sorted(seen) == ["first.bias", "first.weight", "last.bias", "last.weight"]
            assert all(torch.equal(value, wanted[name]) for name, value in seen.items())
            assert largest_difference(seen, {name: before[name] for name in seen}) > 1e-5
            assert same_bits(seen)
        assert largest_difference(whole(net), before) == 0
    assert largest_difference(seen_weights(net), before_of(before)) == 0  # closed: torch's own


def before_of(weights):
    return {name: value for name, value in weights.items() if not name.startswith("spare")}


def payload(numel, bits, block):
    return -(-numel * bits // 8) + 4 * -(-numel // block)


def wires(net, shards, bits, block=512):
    """Bytes that a rank sends to another one for each of the model's two modules, by formula."""
    parts = {"the model": [], "last": []}
    for name, p in net.named_parameters():
        numel = -(-p.shape[0] // shards) * p.shape[1:].numel()
        parts["last" if name.startswith("last") else "the model"].append(payload(numel, bits, block))
    return {name: -(-(sum(sizes) + len(sizes)) // 8) * 8 for name, sizes in parts.items()}  # and a status for each


@pytest.mark.parametrize(
    ("options", "gathers"),
    [({}, 2), ({"reshard_after_forward": False}, 1), ({"reshard_after_forward": 2}, 1)],
    ids=["all", "kept", "nodes of two"],
)
@on_ranks(4)
def test_bytes_are_those_of_the_formula(options, gathers):
    """The root is kept until backward in any case; the other module is gathered again, by nodes alone if asked."""
    net = built(mesh_of(1, 4)["shard"], **options)
    with gathered(net, "block(bits=8)") as state:
        loss_of(net, 0).backward()
        each = wires(net, 4, 8)
        assert state.sent_bytes == 3 * (each["the model"] + gathers * each["last"])


@on_ranks(4)
def test_evaluation_is_exact_unless_asked_for():
    net = built(mesh_of(1, 4)["shard"])
    exact = before_of(whole(net))
    for evaluation in (False, True):
        with gathered(net, "block(bits=4)", evaluation=evaluation) as state:
            net.eval()
            for backward in (False, True):
                difference = largest_difference(seen_weights(net, backward=backward), exact)
                assert (difference > 0, state.sent_bytes > 0) == (evaluation, evaluation)
            net.train()
            assert largest_difference(seen_weights(net), exact) > 0


@on_ranks(4)
def test_evaluation_is_exact_after_a_forward_pass_alone():
    """A batch whose backward pass is left out: until that pass FSDP2 keeps the root's weights."""
    net = built(mesh_of(1, 4)["shard"])
    exact = loss_of(net, 0).item()
    with gathered(net, "block(bits=4)"):
        in_training = loss_of(net, 0).item()
        net.eval()
        assert loss_of(net, 0).item() == exact != in_training
        net.train()
        assert loss_of(net, 0).item() == in_training


class Quantized(Net):
    """A module beside them has weights of one byte, and a module of its own."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Module()
        self.table.codes = torch.nn.Parameter(torch.arange(8 * 13).to(torch.uint8).view(13, 8), requires_grad=False)
        self.table.forward = lambda x: x @ self.table.codes.float().T

    def forward(self, x, spare=False):
        return super().forward(x) + self.table(x).sum() * 0


@on_ranks(4)
def test_weights_of_one_byte_are_left_alone():
    torch.manual_seed(7)
    net = Quantized()
    codes = net.table.codes.detach().clone()
    for module in (net.table, net.last, net):
        fully_shard(module, mesh=mesh_of(1, 4)["shard"])
    found = []
    net.table.register_forward_hook(lambda m, _, out: found.append(m.codes.detach().clone()), prepend=True)
    with gathered(net, "block(bits=4)") as state:
        loss_of(net, 0)
        assert torch.equal(found[0], codes)
        assert set(state.wires) == {"the model", "last"}


@on_ranks(4)
def test_a_shard_that_is_not_finite_arrives_as_nan():
    net = built(mesh_of(1, 4)["shard"])
    for delta in (False, True):
        with gathered(net, "block(bits=8)", delta=delta):
            seen_weights(net)
            bias = net.first.bias.detach().to_local()
            kept = float(bias[0])
            if dist.get_rank() == 1:
                bias[0] = torch.inf
            seen = seen_weights(net)
            rows = 4  # of 13 over 4 ranks
            assert seen["first.weight"][rows : 2 * rows].isnan().all()
            assert seen["first.weight"][:rows].isfinite().all()
            assert seen["last.weight"].isfinite().all()
            bias[0] = kept
            assert seen_weights(net)["first.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"block": "block(bits=8)"}, 0.01),
        ({"block": "block(bits=4)", "delta": True}, 0.01),
        ({"block": "block(bits=8, rounding=stochastic)"}, 0.015),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", ["float32", "bfloat16 to float32"])
@on_ranks(4)
def test_training_is_near_fsdp2_s(options, near, policy):
    mesh = mesh_of()["shard"]
    plain = trained(built(mesh, **POLICIES[policy]), 8, lr=0.02)
    net = built(mesh, **POLICIES[policy])
    with gathered(net, **options):
        got = trained(net, 8, lr=0.02)
        assert largest_difference(got, plain) < near
    both = built(mesh, **POLICIES[policy])
    with gathered(both, **options), compressed(both, shards="block(bits=8)"):
        assert largest_difference(trained(both, 8, lr=0.02), plain) < 2 * near


@on_ranks(4)
def test_differences_approach_weights_that_stay_and_cost_nothing_in_backward():
    net = built(mesh_of(1, 4)["shard"])
    exact = before_of(whole(net))
    with gathered(net, delta=True) as state:
        assert largest_difference(seen_weights(net), exact) == 0  # the first are whole
        first = state.sent_bytes
        assert first == 3 * sum(4 * -(-p.shape[0] // 4) * p.shape[1:].numel() for p in net.parameters())
        with torch.no_grad():
            for p in net.parameters():
                p.to_local().add_(torch.randn_like(p.to_local()))
        moved = before_of(whole(net))
        errors = []
        for _ in range(4):
            before = state.sent_bytes
            seen = seen_weights(net, backward=True)
            assert state.sent_bytes - before == 3 * sum(wires(net, 4, 4).values())
            assert same_bits(seen)
            errors.append(largest_difference(seen, moved))
    assert errors[0] > 0.01
    assert all(after < before / 5 for before, after in itertools.pairwise(errors))


def gradients(net):
    return {name: p.grad.full_tensor().clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@on_ranks(4)
def test_activation_checkpointing_computes_again_with_the_same_weights(outside, delta):
    found = []
    for again in (False, True):
        torch.manual_seed(7)
        net = Net()
        if again and not outside:
            net.last = checkpoint_wrapper(net.last)
        fully_shard(net.last, mesh=mesh_of(1, 4)["shard"])
        if again and outside:
            net.last = checkpoint_wrapper(net.last)
        fully_shard(net, mesh=mesh_of(1, 4)["shard"])
        with gathered(net, "block(bits=4)", delta=delta):
            trained(net, 3)
            loss_of(net, 3).backward()
            found.append({name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(net).items()})
    assert largest_difference(*found) == 0


def resumed(net, first, last, saved=None, **options):
    with gathered(net, "block(bits=4, block=32)", **options) as state:
        if saved is not None:
            loss_of(net, 0)  # FSDP2 keeps the root's weights, which are exact ones
            state.load_state_dict(saved)
        trained(net, last - first, first=first, lr=0.05, body=None)
        return state.state_dict()


@on_ranks(4)
def test_a_run_with_differences_goes_on_from_its_state():
    mesh = mesh_of()["shard"]
    straight, stopped, forgetful = (built(mesh) for _ in range(3))
    with gathered(straight, "block(bits=4, block=32)", delta=True):
        for first in (0, 3):  # the optimizer's momenta start anew in each
            trained(straight, 3, first=first, lr=0.05)
    saved = resumed(stopped, 0, 3, delta=True)
    resumed(forgetful, 0, 3, delta=True)
    resumed(stopped, 3, 6, saved, delta=True)
    resumed(forgetful, 3, 6, delta=True)
    assert largest_difference(whole(straight), whole(stopped)) == 0
    assert largest_difference(whole(straight), whole(forgetful)) > 0
    with gathered(stopped, "block(bits=8)", delta=True) as other:
        assert "saved with choice" in refusal(other.load_state_dict, saved)
        assert "and there is nothing: load nothing instead" in refusal(other.load_state_dict, None)
        other.load_state_dict({}, memory="reset")
        assert other.copies == {}
    (own,) = saved.values()  # this rank's half alone
    kept = sum(value.untyped_storage().nbytes() for value in unpack_state(own)["memory"].values())
    assert kept == sum(4 * -(-p.shape[0] // 2) * p.shape[1:].numel() for p in stopped.parameters())


@on_ranks(2)
def test_a_step_that_only_makes_the_optimizers_state_is_not_counted():
    """torch's functions for state dicts make it, before a checkpoint is read or, without momentum, whenever."""
    net = built(mesh_of(1, 2)["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gathered(net, "qsgd") as state:
        loss_of(net, 0).backward()
        optimizer.step()
        before = settled_step(state)
        optimizer.zero_grad()
        get_optimizer_state_dict(net, optimizer)
        assert settled_step(state) == before


@on_ranks(4)
def test_models_and_states_are_saved_by_torch_s_checkpoints(tmp_path):
    mesh = mesh_of(1, 4)["shard"]
    net = built(mesh)
    with gathered(net, delta=True) as state:
        trained(net, 3)
        before = net.state_dict()
        plain = {name: value.full_tensor() for name, value in before.items()}
        dcp.save({"model": before, "weights": state}, checkpoint_id=tmp_path)
        other = built(mesh)
        with gathered(other, delta=True) as again:
            loaded = {"model": other.state_dict(), "weights": {again.key: b""}}
            dcp.load(loaded, checkpoint_id=tmp_path)
            other.load_state_dict(loaded["model"])
            again.load_state_dict(loaded["weights"])
            assert largest_difference({n: v.full_tensor() for n, v in other.state_dict().items()}, plain) == 0
            assert len(again.copies) == 2
            assert all(torch.equal(state.copies[name], value) for name, value in again.copies.items())
            assert largest_difference(trained(other, 2), trained(net, 2)) == 0


@on_ranks(4)
def test_choices_that_cannot_work_are_refused():
    net = built(mesh_of(1, 4)["shard"])
    compress = grace.torch.compress_all_gather
    assert "cannot compress the parts of a tensor alike" in refusal(compress, net, "topk")
    assert "leave delta out" in refusal(compress, net, "none", delta=True)
    with pytest.warns(UserWarning, match=r"Use block\(bits=4\), or leave delta out"), gathered(net, "qsgd", delta=True):
        pass
    assert "whole copy of the model" in refusal(compress, built(mesh_of(4, 1)["shard"]))
    assert "needs a model that fully_shard" in refusal(compress, Net())
    with gathered(net):
        assert "compressed already" in refusal(compress, net)
    other = f"block(bits={8 if dist.get_rank() == 2 else 4})"
    assert "bits" in refusal(compress, net, other, kind=grace.RankError)
