"""FSDP2 over 2 shards x 2 replicas: what crosses the replicate axis is compressed, and all else is torch's."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import grace
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
MESHES: dict = {}


@pytest.fixture
def four():
    return ranks_of(4)


class Net(torch.nn.Module):
    """Two layers of odd sizes, of which shards get unequal parts, and one that is used now and then."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 13)
        self.spare = torch.nn.Linear(8, 13)
        self.last = torch.nn.Linear(13, 3)

    def forward(self, x, spare=False):
        return self.last(torch.relu(self.spare(x) if spare else self.first(x)))


def mesh_of():
    """Replicas x shards; made once, since process groups cost threads."""
    if "hsdp" not in MESHES:
        MESHES["hsdp"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return MESHES["hsdp"]


def built(mesh, **options):
    torch.manual_seed(7)
    net = Net()
    fully_shard(net.last, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def batch(step, part=0):
    rng = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(4, 8, generator=rng), torch.randn(4, 3, generator=rng)


def loss_of(net, step, part=0, **how):
    x, y = batch(step, part)
    return (net(x, **how).float() - y).square().mean()


def trained(net, steps, body=None, lr=0.1):
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        opt.zero_grad()
        (body or (lambda net, step: loss_of(net, step).backward()))(net, step)
        opt.step()
    return whole(net)


def whole(net):
    return {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}


def same_bits(weights):
    """Whether all four ranks have the same."""
    flat = torch.cat([w.reshape(-1) for w in weights.values()])
    everybody = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(everybody, flat)
    return all(torch.equal(flat, other) for other in everybody)


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
POLICIES = {
    "float32": {},
    "bfloat16 to float32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "kept": {"reshard_after_forward": False},
}


def both(body, policy, compressor="none", memory=None):
    """Weights by torch's own HSDP and by the hook."""
    mesh, options = mesh_of(), POLICIES[policy]
    theirs = built(mesh, **options)
    theirs.set_reduce_scatter_unused_params(True)
    wanted = trained(theirs, 4, BODIES[body])
    net = built(mesh["shard"], **options)
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor, memory)
    got = trained(net, 4, BODIES[body])
    steps = state.runner.context.step
    state.close()
    return [(name, float((got[name] - wanted[name]).abs().max())) for name in wanted], same_bits(got), steps


@pytest.mark.parametrize("policy", POLICIES)
def test_uncompressed_it_is_torchs_own_hsdp(four, policy):
    for errors, same, steps in four.run(both, "plain", policy):
        assert max(error for _, error in errors) < (2e-2 if policy == "bfloat16" else 1e-6)
        assert (same, steps) == (True, 4)


@pytest.mark.parametrize("body", ["accumulated", "spared", "clipped"])
def test_whatever_people_do_in_a_step_is_torchs(four, body):
    for errors, same, steps in four.run(both, body, "float32"):
        assert max(error for _, error in errors) < 1e-6
        assert (same, steps) == (True, 4)


def many(compressor, strategy, steps):
    mesh = mesh_of()
    net = built(mesh["shard"])
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor, strategy=strategy)
    weights = trained(net, steps)
    sent, names = state.traffic.bits_per_element, sorted(state.runner.state()["memory"])
    state.close()
    return same_bits(weights), sent, names


def forgotten():
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
    return same_bits(weights), steps


def test_states_that_are_gone_are_no_longer_told_of_steps(four):
    assert four.run(forgotten) == [(True, [0, 3])] * 4


METHODS = ["topk(ratio=0.1)", "block(bits=4, hadamard=32)", "powersgd(rank=2)", "efsignsgd", "qsgd"]


@pytest.mark.parametrize("compressor", METHODS)
def test_replicas_have_the_same_bits_after_20_steps(four, compressor):
    memory = "residual" if compressor == "efsignsgd" else None  # its own follows the optimizer
    assert four.run(many_with, compressor, memory) == [True] * 4


def many_with(compressor, memory):
    mesh = mesh_of()
    net = built(mesh["shard"])
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], compressor, memory, seed=3)
    weights = trained(net, 20)
    state.close()
    return same_bits(weights)


def test_strategies_and_the_names_of_what_is_kept(four):
    for same, bits, names in four.run(many, None, "all_reduce(compressor=topk(ratio=0.1))", 20):
        assert same
        assert bits < 32
        assert set(names) <= {f"{layer}.{kind}" for layer in ("first", "spare", "last") for kind in ("weight", "bias")}
        assert "first.weight" in names


def identity(steps):
    """Sent + new residual = gradient + old residual, per variable, in sums over the replicas."""
    mesh = mesh_of()
    net, plain = built(mesh["shard"]), built(mesh)
    plain.set_reduce_scatter_unused_params(True)
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.2)")
    opt, worst = torch.optim.SGD(net.parameters(), lr=0.1), 0.0
    group = mesh["replicate"].get_group()

    def kept():
        found = {}
        for name, value in state.runner.state().get("memory", {}).items():
            found[name] = value.double().clone()
            dist.all_reduce(found[name], group=group)
        return found

    for step in range(steps):
        opt.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for p, other in zip(net.parameters(), plain.parameters(), strict=True):
                other.to_local().copy_(p.to_local())
        old = kept()
        loss_of(net, step).backward()
        loss_of(plain, step).backward()
        sent = {name: p.grad.to_local().double() for name, p in net.named_parameters() if p.grad is not None}
        gradients = {name: p.grad.to_local().double() for name, p in plain.named_parameters() if p.grad is not None}
        opt.step()
        new = kept()
        for name in new:
            left = 2 * sent[name] + new[name]
            right = 2 * gradients[name] + old.get(name, 0)
            worst = max([worst, *(left - right).abs().reshape(-1).tolist()])
    state.close()
    return worst, sorted(new)


def test_nothing_of_a_gradient_is_lost(four):
    for worst, names in four.run(identity, 5):
        assert worst < 1e-5
        assert "first.weight" in names


def overflowed():
    """One rank's gradient is Inf in step 2: all ranks leave the step out, and keep what they remembered."""
    mesh = mesh_of()
    net = built(mesh["shard"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    state = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.2)", grad_scaler=scaler)
    opt, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(4):
        opt.zero_grad()
        loss = loss_of(net, step)
        scaler.scale(loss * (torch.inf if step == 2 and dist.get_rank() == 1 else 1)).backward()
        scaler.step(opt)
        scaler.update()
        state.close_step()
        kept = state.runner.state()["memory"]
        finite = all(bool(value.isfinite().all()) for value in kept.values())
        found.append((finite, float(sum(value.abs().sum() for value in kept.values())), scaler.get_scale()))
    weights = whole(net)
    state.close()
    return found, same_bits(weights), all(bool(w.isfinite().all()) for w in weights.values())


def test_a_step_that_overflowed_leaves_everything_as_it_was(four):
    for found, same, finite in four.run(overflowed):
        assert same
        assert finite
        assert all(sound for sound, *_ in found)
        assert [scale for *_, scale in found] == [4.0, 4.0, 2.0, 2.0]
        assert found[2][1] == found[1][1]  # in the old scale's units until the next step
        assert found[3][1] != found[2][1]


def resumed(steps):
    """A run that stops in the middle, and one that does not."""
    mesh = mesh_of()

    def run(net, first, last, saved=None):
        state = grace.torch.register_fsdp_hook(net, mesh["replicate"], "topk(ratio=0.1)")
        if saved is not None:
            state.load_state_dict(saved)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(first, last):
            opt.zero_grad()
            loss_of(net, step).backward()
            opt.step()
        saved = copy.deepcopy(state.state_dict())
        state.close()
        return saved

    straight, stopped = built(mesh["shard"]), built(mesh["shard"])
    run(straight, 0, 2 * steps)
    run(stopped, steps, 2 * steps, run(stopped, 0, steps))
    return all(torch.equal(a, b) for a, b in zip(whole(straight).values(), whole(stopped).values(), strict=True))


def test_a_run_goes_on_from_its_state(four):
    assert four.run(resumed, 3) == [True] * 4


def refused(case):
    mesh = mesh_of()
    given = {
        "both axes": (lambda: built(mesh), mesh["replicate"]),
        "two axes": (lambda: built(mesh["shard"]), mesh),
        "shard axis": (lambda: built(mesh["shard"]), mesh["shard"]),
        "no mesh": (lambda: built(mesh["shard"]), None),
        "whole": (Net, None),
    }[case]
    with pytest.raises(grace.ConfigError) as caught:
        grace.torch.register_fsdp_hook(given[0](), given[1], "topk")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("both axes", "fully_shard(module, mesh=mesh['shard'])"),
        ("two axes", "must be the replicate axis alone: mesh['replicate']"),
        ("shard axis", "and not the one given to fully_shard"),
        ("no mesh", "what is the replicate axis?"),
        ("whole", "call fully_shard(model, mesh=mesh['shard']) first"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(four, case, words):
    for message in four.run(refused, case):
        assert words in message
