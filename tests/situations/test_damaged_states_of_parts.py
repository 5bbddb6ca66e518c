"""Damaged states of sharded models, pipelines and steps by hand: refused on all ranks, and nothing is changed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import grace
from grace.torch.state_dict import pack_state, unpack_state
from tests.support.damaged_states import bent, changed
from tests.support.drawing import THOROUGH
from tests.support.pipelines import unmeasured
from tests.support.pools import on_ranks
from tests.support.sharded import mesh_of
from tests.support.training import refusal


def sharded(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    fully_shard(model, mesh=mesh["shard"])
    return model


def train(model, numbers):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in numbers:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8, generator=draw)).square().mean().backward()
        optimizer.step()


def check_refused(load, bits, kind=grace.GraceError):
    """Loading raises, and changes nothing."""
    before = bits()
    refusal(load, kind=kind)
    assert bits() == before


def at(value, path, new):
    """A copy with something else at a place; without it, if that is Ellipsis."""

    def change(box, key):
        if new is ...:
            del box[key]
        else:
            box[key] = new

    return changed(value, path, change)


def with_kept(change):
    """Replace the first value that a state keeps."""

    def damage(saved, _):
        name, value = next(iter(saved["memory"].items()))
        return at(saved, ("memory", name), change(value))

    return damage


DAMAGES = {
    "a flipped bit": with_kept(lambda value: bent(value, "bits")),
    "not a number": with_kept(lambda value: bent(value, "nan")),
    "another shape": with_kept(lambda value: value[:3]),
    "a value is missing": with_kept(lambda value: ...),
    "no choice": lambda saved, _: at(saved, ("choice",), ...),
    "no memory": lambda saved, _: at(saved, ("memory",), ...),
    "words for a step": lambda saved, _: at(saved, ("step",), "many"),
    "another step": lambda _, later: later,
    "a number": lambda *_: 3,
}


@pytest.mark.parametrize("size", [2, 4] if THOROUGH else [4])
@on_ranks()
def test_a_reduce_scatters_state_that_is_damaged_on_one_rank_is_refused_on_all(size):
    """Each damage on the last rank alone."""
    mesh, rank = mesh_of(size // 2, 2), dist.get_rank()
    model = sharded(mesh)
    state = grace.torch.compress_reduce_scatter(model, "block(bits=4)")
    hook = grace.torch.register_fsdp_hook(model, mesh["replicate"], "none") if size > 2 else None
    train(model, range(2))
    earlier = state.state_dict()
    train(model, range(2, 4))
    (key, good), later = next(iter(earlier.items())), state.state_dict()
    others = [None] * size
    dist.all_gather_object(others, good)

    def bits():
        return state.context.step, [(name, value.tolist()) for name, value in state.memory.state.committed.items()]

    for damage in DAMAGES.values():
        wrong = {key: pack_state(damage(unpack_state(good), unpack_state(later[key])))}
        given = wrong if rank == size - 1 else earlier
        check_refused(lambda given=given: state.load_state_dict(given), bits)
    for given in ({key: others[rank ^ 1]}, {} if rank else earlier):
        check_refused(lambda given=given: state.load_state_dict(given), bits)
    state.load_state_dict(earlier)
    assert state.context.step == 2
    for one in (hook, state):
        if one is not None:
            one.close()


@on_ranks(4)
def test_a_replicas_state_that_is_missing_or_damaged_is_refused_by_replicas_and_shards():
    """One rank's state lacks its key, or is damaged, of 2 replicas x 2 shards."""
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    model = sharded(mesh)
    state = grace.torch.register_fsdp_hook(model, mesh["replicate"], "topk(ratio=0.1)")
    train(model, range(3))
    saved = state.state_dict()
    train(model, range(3, 4))

    def bits():
        kept = state.runner.state()["memory"]
        return state.runner.context.step, [(name, value.tolist()) for name, value in kept.items()]

    key = next(iter(saved))
    for wrong in ({}, [], {key: saved[key][:-50]}, {key: b""}, None):
        given = wrong if rank == 3 else saved
        kind = grace.ConfigError if rank == 3 else grace.RankError
        check_refused(lambda given=given: state.load_state_dict(given), bits, kind)
    before = bits()
    state.load_state_dict(saved)
    assert bits() != before
    state.close()


def pipeline_of(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return unmeasured(
        model,
        torch.zeros(8, 6),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        microbatches=2,
        **settings,
    )


PIPELINES = [(4, {"stages": 2, "compressor": "topk(ratio=0.3)"}), (2, {"stages": 2})]


@pytest.mark.parametrize(("size", "settings"), PIPELINES if THOROUGH else PIPELINES[:1])
@on_ranks()
def test_a_pipelines_state_that_is_damaged_on_one_rank_is_refused_on_all(size, settings):
    """States that are damaged on the last rank alone."""
    engine, last = pipeline_of(**settings), grace.rank() == size - 1
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        engine.step(torch.randn(8, 6, generator=draw), torch.randn(8, 2, generator=draw))
        if step == 1:
            early = engine.state_dict(), engine.optimizer_state_dict()
    model, optimizer = engine.state_dict(), engine.optimizer_state_dict()

    def bits():
        inner = engine.optimizer
        own = [(name, p.tolist()) for name, p in engine.parameters.items()]
        momenta = [value.tolist() for one in inner.state.values() for value in one.values()]
        return own, momenta, [(g["lr"], g["momentum"]) for g in inner.param_groups], str(inner._grace.runner.state())

    models = {
        "a dict": at(model, ["0.weight"], {}),
        "complex": at(model, ["2.bias"], model["2.bias"].to(torch.complex64)),
        "on meta": at(model, ["2.bias"], torch.zeros(2, device="meta")),
        "another step": early[0],
        "a flipped bit": at(model, ["0.bias"], bent(model["0.bias"], "bits")),
        "a list": [],
    }
    for one in models.values():
        check_refused(lambda one=one: engine.load_state_dict(one if last else model), bits)
    optimizers = {
        "3": 3,
        "no names": at(optimizer, ["names"], ...),
        "no groups": at(optimizer, ["param_groups"], ...),
        "a group of none": at(optimizer, ["param_groups", 0, "params"], []),
        "a list of states": at(optimizer, ["state"], []),
        "states of numbers": at(optimizer, ["state"], {i: 3 for i in range(4)}),
        "grace is 3": at(optimizer, ["grace"], 3),
        "grace.state is a list": at(optimizer, ["grace", "state"], ["w"]),
        "grace.ranks is missing": at(optimizer, ["grace", "ranks"], ...),
        "another step": early[1],
        "another step said": at(optimizer, ["grace", "step"], 7),
        "a name for a list": at(optimizer, ["names"], [["w"]]),
    }
    if settings.get("compressor"):
        name, kept = next(iter(optimizer["grace"]["ranks"][0]["memory"].items()))
        place = ["grace", "ranks", 0, "memory", name]
        for how in ("bits", "nan", "one"):
            optimizers[f"grace: {how}"] = at(optimizer, place, bent(kept, how))
        optimizers["grace: a value is missing"] = at(optimizer, place, ...)
    for one in optimizers.values():
        given = one if last else optimizer
        check_refused(lambda given=given: engine.load_optimizer_state_dict(given), bits)
    before = bits()
    engine.load_state_dict(early[0])
    engine.load_optimizer_state_dict(early[1])
    assert bits() != before


def made_by_hand(compressor="topk(ratio=0.3)"):
    return grace.torch.Allgather(grace.make("compressor", compressor), grace.make("memory", "residual"))


@on_ranks()
def test_a_state_of_steps_by_hand_that_says_other_tensors_is_refused_and_leaves_nothing():
    """A state whose tensors are not those that it remembers, on rank 1 alone; then steps of the same names."""
    first = made_by_hand()
    for _ in range(2):
        first.step(torch.arange(20.0), "a")
        first.step([torch.ones(4), torch.ones(3, 2)], ["b", "c"])
    good = first.state_dict()
    tensors, kind = good["tensors"], grace.ConfigError if grace.rank() else grace.RankError
    for wrong in ([[], tensors[1]], [[["a", [7], "float32"]], tensors[1]], [tensors[0]], [[["a", [20], "w"]]], None):
        other = made_by_hand()
        refusal(other.load_state_dict, {**good, "tensors": wrong} if grace.rank() else good, kind=kind)
        other.step(torch.ones(9), "a")  # another tensor of this name: nothing has stayed
    other = made_by_hand()
    other.step(torch.arange(20.0), "a")
    assert "saved with" in refusal(made_by_hand("randomk(ratio=0.5)").load_state_dict, good)
    other.load_state_dict(good)
    assert other.state_dict()["grace"]["step"] == 4
