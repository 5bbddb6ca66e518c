"""Damaged states of sharded models, pipelines and steps by hand: refused on all ranks, and nothing is changed."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grace
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks
MESHES: dict = {}


def mesh_of(*shape):
    """Replicas x shards; made once."""
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return MESHES[shape]


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


def tried(load, bits):
    """What loading said, and whether it changed anything."""
    before, said = bits(), "loaded"
    try:
        load()
    except grace.GraceError as error:
        said = f"{type(error).__name__}: {error}"
    return said, bits() != before


def opened(packed):
    return torch.load(io.BytesIO(packed), weights_only=True)


def packed(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def kept(saved):
    return next(iter(saved["memory"].values()))


def flipped(saved, _):
    kept(saved).view(torch.int32)[0] ^= 1 << 20
    return saved


def not_a_number(saved, _):
    kept(saved)[0] = torch.nan
    return saved


def other_shape(saved, _):
    name = next(iter(saved["memory"]))
    return {**saved, "memory": {**saved["memory"], name: kept(saved)[:3]}}


def without(key):
    return lambda saved, _: {name: value for name, value in saved.items() if name != key}


DAMAGES = {
    "a flipped bit": flipped,
    "not a number": not_a_number,
    "another shape": other_shape,
    "a value is missing": lambda saved, _: {**saved, "memory": dict(list(saved["memory"].items())[1:])},
    "no choice": without("choice"),
    "no memory": without("memory"),
    "words for a step": lambda saved, _: {**saved, "step": "many"},
    "another step": lambda _, later: later,
    "a number": lambda *_: 3,
}


def reduce_scatters(replicas):
    """Each damage on the last rank alone: what all ranks say, and whether something changed."""
    mesh, rank = mesh_of(replicas, 2), dist.get_rank()
    model = sharded(mesh)
    state = grace.torch.compress_reduce_scatter(model, "block(bits=4)")
    hook = grace.torch.register_fsdp_hook(model, mesh["replicate"], "none") if replicas > 1 else None
    train(model, range(2))
    earlier = state.state_dict()
    train(model, range(2, 4))
    (key, good), later = next(iter(earlier.items())), state.state_dict()

    def bits():
        return state.context.step, [(name, value.tolist()) for name, value in state.memory.state.committed.items()]

    found = {}
    for name, damage in DAMAGES.items():
        given = earlier if rank < dist.get_world_size() - 1 else {key: packed(damage(opened(good), opened(later[key])))}
        found[name] = tried(lambda given=given: state.load_state_dict(given), bits)
    others = [None] * dist.get_world_size()
    dist.all_gather_object(others, good)
    found["another rank's"] = tried(lambda: state.load_state_dict({key: others[rank ^ 1]}), bits)
    found["none"] = tried(lambda: state.load_state_dict({} if rank else earlier), bits)
    right = tried(lambda: state.load_state_dict(earlier), bits)
    steps = state.context.step
    for one in (hook, state):
        if one is not None:
            one.close()
    return found, right, steps


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_reduce_scatters_state_that_is_damaged_on_one_rank_is_refused_on_all(replicas):
    answers = ranks_of(2 * replicas).run(reduce_scatters, replicas)
    for name in answers[0][0]:
        for rank, (found, *_) in enumerate(answers):
            said, changed = found[name]
            assert ("Error: " in said, changed) == (True, False), (name, rank, said)
    assert all(right == ("loaded", True) and steps == 2 for _, right, steps in answers)


def hooks():
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
    wrongs = {}, [], {key: saved[key][:-50]}, {key: b""}, None
    found = [tried(lambda wrong=wrong: state.load_state_dict(wrong if rank == 3 else saved), bits) for wrong in wrongs]
    right = tried(lambda: state.load_state_dict(saved), bits)
    state.close()
    return found, right


def test_a_replicas_state_that_is_missing_or_damaged_is_refused_by_replicas_and_shards():
    for rank, (found, right) in enumerate(ranks_of(4).run(hooks)):
        assert right == ("loaded", True)
        for said, changed in found:
            assert (said.startswith("ConfigError" if rank == 3 else "RankError"), changed) == (True, False), said


def pipeline_of(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return grace.torch.Pipeline(
        model,
        torch.zeros(8, 6),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        microbatches=2,
        profiles=False,
        **settings,
    )


def at(value, path, new):
    """A copy with something else at a place; without it, if that is Ellipsis."""
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


def bent(tensor):
    tensor = tensor.clone()
    tensor.view(-1).view(torch.int32)[0] ^= 1 << 22
    return tensor


def stages(settings):
    """States that are damaged on the last rank alone."""
    engine, last = pipeline_of(**settings), grace.rank() == grace.size() - 1
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
        "a flipped bit": at(model, ["0.bias"], bent(model["0.bias"])),
        "a list": [],
    }
    found = {
        name: tried(lambda one=one: engine.load_state_dict(one if last else model), bits)
        for name, one in models.items()
    }
    kind = next(iter(optimizer["grace"]["ranks"][0]["memory"].values())) if settings.get("compressor") else None
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
    if kind is not None:
        name = next(iter(optimizer["grace"]["ranks"][0]["memory"]))
        place = ["grace", "ranks", 0, "memory", name]
        optimizers["grace: a flipped bit"] = at(optimizer, place, bent(kind))
        optimizers["grace: not a number"] = at(optimizer, place, kind * torch.nan)
        optimizers["grace: another shape"] = at(optimizer, place, kind[:1])
        optimizers["grace: a value is missing"] = at(optimizer, place, ...)
    for name, one in optimizers.items():
        given = one if last else optimizer
        found[f"optimizer: {name}"] = tried(lambda given=given: engine.load_optimizer_state_dict(given), bits)
    right = tried(lambda: (engine.load_state_dict(early[0]), engine.load_optimizer_state_dict(early[1])), bits)
    return found, right


@pytest.mark.parametrize(
    ("ranks", "settings"), [(2, {"stages": 2}), (4, {"stages": 2, "compressor": "topk(ratio=0.3)"})]
)
def test_a_pipelines_state_that_is_damaged_on_one_rank_is_refused_on_all(ranks, settings):
    answers = ranks_of(ranks).run(stages, settings)
    for name in answers[0][0]:
        for rank, (found, _) in enumerate(answers):
            said, changed = found[name]
            assert ("Error: " in said, changed) == (True, False), (name, rank, said)
    assert all(right == ("loaded", True) for _, right in answers)


def by_hand():
    """A state whose tensors are not those that it remembers, on rank 1 alone; then steps of the same names."""

    def made():
        return grace.torch.Allgather(grace.make("compressor", "topk(ratio=0.3)"), grace.make("memory", "residual"))

    first = made()
    for _ in range(2):
        first.step(torch.arange(20.0), "a")
        first.step([torch.ones(4), torch.ones(3, 2)], ["b", "c"])
    good = first.state_dict()
    tensors, found = good["tensors"], []
    for wrong in ([[], tensors[1]], [[["a", [7], "float32"]], tensors[1]], [tensors[0]], [[["a", [20], "w"]]], None):
        other = made()
        given = {**good, "tensors": wrong} if grace.rank() else good
        try:
            other.load_state_dict(given)
            said = "loaded"
        except grace.GraceError as error:
            said = type(error).__name__
        other.step(torch.ones(9), "a")  # another tensor of this name: nothing has stayed
        found.append(said)
    other = made()
    other.step(torch.arange(20.0), "a")
    with pytest.raises(grace.ConfigError, match="saved with"):
        grace.torch.Allgather("randomk(ratio=0.5)", "residual").load_state_dict(good)
    other.load_state_dict(good)
    return found, other.state_dict()["grace"]["step"]


def test_a_state_of_steps_by_hand_that_says_other_tensors_is_refused_and_leaves_nothing():
    first, second = ranks_of(2).run(by_hand)
    assert first == (["RankError"] * 5, 4)
    assert second == (["ConfigError"] * 5, 4)
