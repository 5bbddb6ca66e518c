"""Parts of components are in the same run as the whole, are saved and rolled back with it, and serve one optimizer."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather, ReduceBroadcast, ScatterReduce
from grace.compressors.cast import Cast
from grace.compressors.topk import TopK
from grace.core.composition import Composed
from grace.core.compressor import Compressor, Traits
from grace.memories.residual import Residual
from grace.session import state_schema
from grace.torch.state_dict import load_memories
from tests.support.data import z_limit
from tests.support.training import Given, digest, refusal

pytestmark = pytest.mark.usefixtures("local")


def embedding(compressor, memory=None, rows=6, width=64, **options):
    """A sparse embedding and its optimizer, whose learning rate is 0."""
    model = torch.nn.Embedding(rows, width, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, grace.DistributedOptimizer(optimizer, model, compressor, memory, **options)


def exchanged(model, optimizer, factor=1.0):
    """Make a step with the gradient ``factor`` x (0, 1, ..., width - 1) / width in row 2, and return that row's
    mean."""
    width = model.weight.shape[1]
    optimizer.zero_grad()
    (model(torch.tensor([2])) * torch.arange(width) / width * factor).sum().backward()
    optimizer.step()
    return model.weight.grad.coalesce().values()[0].numpy()


@pytest.mark.slow
def test_the_random_numbers_of_sparse_rows_change_from_step_to_step():
    model, optimizer = embedding("qsgd(levels=1)")
    steps = np.array([exchanged(model, optimizer) for _ in range(400)])
    wanted, scale = np.arange(64) / 64, 63 / 64
    deviation = np.sqrt(wanted * (scale - wanted) / 400)  # of the mean of 400 draws of 0 or scale
    assert len(np.unique(steps, axis=0)) > 300
    assert (np.abs(steps.mean(0) - wanted) <= z_limit(64) * deviation + 1e-6).all()


def test_the_warm_up_of_sparse_rows_ends():
    model, optimizer = embedding("dgc(ratio=0.02, warmup_steps=3)", "residual", width=1000)
    counts = [np.count_nonzero(exchanged(model, optimizer)) for _ in range(5)]
    assert 175 <= counts[0] <= 325
    assert 14 <= min(counts[3:]) <= max(counts[3:]) <= 26


def test_sparse_rows_see_the_loss_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = embedding("threshold(value=0.5)", grad_scaler=scaler)
    scaler.scale(torch.tensor(1.0))
    mean = exchanged(model, optimizer, factor=1024.0)
    assert np.count_nonzero(mean) == 31  # 33/64 ... 63/64
    assert np.count_nonzero(optimizer.state_dict()["grace"]["state"]["memory"]["weight"]) == 32


@dataclasses.dataclass
class Turns(Compressor):
    """A user's sparsifier: sends one element, the next one at each step."""

    name = "turns"
    stateful = True
    sends_values = True
    traits = Traits(category="sparsification", contraction=True, memory="residual", fixed_size=False)

    def compress(self, tensor, name):
        turn = int(self.state.get(name, 0))
        self.state[name] = turn + 1
        place = turn % tensor.numel()
        return [tensor.reshape(-1)[place : place + 1].clone(), torch.tensor([place])], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        out = torch.zeros(ctx).reshape(-1)
        out[payload[1]] = payload[0]
        return out.reshape(ctx)


def turns(compressor):
    """A model of four weights, and its optimizer."""
    model = Given({"w": (4,)})
    return model, grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, communicator=Allgather(compressor, "residual")
    )


def step(model, optimizer, gradient=(1.0, 1.0, 1.0, 1.0)):
    """One step; the mean."""
    optimizer.zero_grad()
    model.backward({"w": list(gradient)})
    optimizer.step()
    return model.w.grad.tolist()


def test_what_a_sparsifier_in_a_composition_remembers_is_rolled_back_and_saved():
    model, optimizer = turns(Composed(Turns(), Cast()))
    assert step(model, optimizer) == [1, 0, 0, 0]
    step(model, optimizer, [float("nan")] * 4)  # an overflow: as if it had not been
    assert step(model, optimizer) == [0, 2, 0, 0]
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["grace"]["state"]["compressor.sparsifier"] == {"w": 2}
    ahead = [step(model, optimizer) for _ in range(3)]
    other, resumed = turns(Composed(Turns(), Cast()))
    resumed.load_state_dict(saved)
    assert [step(other, resumed) for _ in range(3)] == ahead


class InPlace(grace.Memory):
    """A memory that changes what it keeps in place."""

    name = "in_place"

    def compensate(self, tensor, name):
        if name not in self.state:
            self.state[name] = {"residual": torch.zeros_like(tensor)}
        self.state[name]["residual"] += tensor
        return self.state[name]["residual"].clone()

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name]["residual"].sub_(compressor.decompress(payload, ctx))


def test_what_a_memory_changes_in_place_is_rolled_back():
    model = Given({"w": (4,)})
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(sgd, model, communicator=Allgather("topk(ratio=0.25)", InPlace()))
    assert step(model, optimizer, [2.0, 1.0, 0.5, 0.0]) == [2, 0, 0, 0]
    step(model, optimizer, [float("nan")] * 4)  # an overflow: as if it had not been
    assert step(model, optimizer) == [0, 2, 0, 0]
    assert optimizer.state_dict()["grace"]["state"]["memory"]["w"]["residual"].tolist() == [1, 0, 1.5, 1]


class ChangesInput(Compressor):
    """A compressor that changes the tensor that it is given."""

    name = "changes_input"

    def compress(self, tensor, name):
        return [tensor.mul_(0.5)], tuple(tensor.shape)

    def decompress(self, payload, ctx):
        return payload[0].reshape(ctx)


class Compensating(grace.Memory):
    """A memory whose ``compensate`` is a function."""

    name = "compensating"

    def __init__(self, make):
        self.make = make

    def compensate(self, tensor, name):
        return self.make(tensor)


MISTAKES = {
    "changes_input: compress() changed its input for 'w'": lambda: Allgather(ChangesInput(), "residual"),
    "compensating: compensate() changed its input for 'w'": lambda: Allgather(
        "topk(ratio=0.25)", Compensating(lambda x: x.add_(1))
    ),
    "compensating: compensate() gave None, where a tensor of shape (4,) is wanted for 'w'": lambda: Allgather(
        "topk(ratio=0.25)", Compensating(lambda x: None)
    ),
    "compensating: compensate() gave a tensor of shape (2, 2), where": lambda: Allgather(
        "topk(ratio=0.25)", Compensating(lambda x: x.view(2, 2))
    ),
}


@pytest.mark.parametrize(("words", "make"), MISTAKES.items(), ids=MISTAKES)
def test_parts_that_spoil_a_gradient_are_refused_by_name(words, make):
    model = Given({"w": (4,)})
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(sgd, model, communicator=make())
    with pytest.raises(grace.ConfigError) as caught:
        step(model, optimizer)
    assert str(caught.value).startswith(words)


class Forgetting(Residual):
    """A residual that forgets what it kept."""

    name = "forgetting"

    def recall(self, name):
        return 0.0, self.state.get(name), 1.0


def test_a_residual_of_a_users_class_is_not_replaced_by_graces_for_sparse_rows():
    words = "is sparse, and the memory forgetting is one of whole variables (residual and none know rows)"
    assert words in refusal(embedding, "topk(ratio=0.25)", Forgetting())


class Keeping(grace.Memory):
    """A memory that keeps what a function makes of the tensor."""

    name = "keeping"

    def __init__(self, make):
        self.make = make

    def compensate(self, tensor, name):
        return tensor + 0

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = self.make(tensor)


def keeping(make, **options):
    """An optimizer that has made a step with such a memory."""
    model = Given({"w": (4,)})
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = grace.DistributedOptimizer(sgd, model, "topk(ratio=0.5)", Keeping(make), **options)
    step(model, optimizer, (1.0, 0.0, 2.0, 0.0))
    return optimizer


MASKS = {
    "truth values": lambda x: x > 0,
    "bytes": lambda x: (x > 0).to(torch.uint8),
    "whole numbers": lambda x: (x > 0).long(),
    "a dict": lambda x: {"mask": x > 0, "count": 1},
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_are_saved_loaded_and_not_scaled(make):
    saved = copy.deepcopy(keeping(make).state_dict())
    other = keeping(lambda x: x)
    other.load_state_dict(saved)
    (memory,) = [part for kind, part in other._grace.runner.components if kind == "memory"]
    memory.rescale(2.0)
    kept, wanted = memory.state["w"], make(torch.tensor([1.0, 0.0, 2.0, 0.0]))
    if isinstance(wanted, dict):
        kept, wanted = kept["mask"], wanted["mask"]
    assert kept.dtype == wanted.dtype
    assert torch.equal(kept, wanted)
    assert other.metrics()["residual_norm"] == 0  # a mask is no residual


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_masks_of_several_ranks_load_elsewhere_only_if_they_are_equal(make):
    saved = copy.deepcopy(keeping(make).full_state_dict())
    mine, other = saved["grace"]["ranks"][0], keeping(lambda x: make(1 - x)).full_state_dict()["grace"]["ranks"][0]
    for ranks in ([mine, mine], [mine, other], [mine, {}]):
        saved["grace"] = state_schema.seal({**saved["grace"], "size": 2, "ranks": ranks})
        resumed = keeping(lambda x: x)
        if ranks[1] is mine:
            resumed.load_state_dict(copy.deepcopy(saved))
            assert digest(resumed.full_state_dict()["grace"]["ranks"][0]) == digest(mine)
        else:
            with pytest.raises(grace.ConfigError, match="the memory of 'w' holds whole numbers or truth values that"):
                resumed.load_state_dict(copy.deepcopy(saved))


UNSAVEABLE = {
    "None": lambda x: None,
    "'text'": lambda x: "text",
    "True": lambda x: True,
    "a tuple": lambda x: (x, 1),
    "a dict": lambda x: {"nested": {"more": x}},
    "the key 3": lambda x: {3: x},
    "a number that is not finite": lambda x: x / 0,
    "a float32 (float32)": lambda x: np.float32(1),
    "a Tensor (torch.float32, torch.sparse_coo)": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize(("words", "make"), UNSAVEABLE.items(), ids=UNSAVEABLE)
def test_what_could_not_be_loaded_is_refused_when_it_is_saved(words, make):
    optimizer = keeping(make)
    for save in (optimizer.state_dict, optimizer.full_state_dict):
        assert refusal(save).startswith(f"the memory keeping keeps {words} for 'w', which no checkpoint can hold")


def test_memories_are_loaded_where_those_that_are_kept_could_not_be_saved():
    saved = keeping(lambda x: x).full_state_dict()["grace"]
    optimizer = keeping(UNSAVEABLE["a number that is not finite"])
    load_memories(optimizer, copy.deepcopy(saved), "strict")
    assert digest(optimizer.full_state_dict()["grace"]["state"]) == digest(saved["state"])


def test_ranks_gather_states_on_the_host():
    class OnGpu(torch.Tensor):
        def cpu(self):
            return self.as_subclass(torch.Tensor)

        def __deepcopy__(self, memo):
            return self.clone()

    saved = keeping(lambda x: {"a": x.as_subclass(OnGpu)}).full_state_dict()["grace"]
    assert type(saved["state"]["memory"]["w"]["a"]) is OnGpu
    assert type(saved["ranks"][0]["memory"]["w"]["a"]) is torch.Tensor


def test_a_seed_of_numpy_is_saved_and_loaded():
    optimizer = keeping(lambda x: x, seed=np.int64(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert type(optimizer.state_dict()["grace"]["seed"]) is int


def test_shards_and_answers_have_no_state_of_their_own():
    stateful = Turns()
    stateful.traits = dataclasses.replace(Turns.traits, shardable=True)
    with pytest.raises(grace.ConfigError, match="something of the whole variable"):
        ScatterReduce(stateful, "residual")
    with pytest.raises(grace.ConfigError, match=r"Define answering\(\)"):
        ReduceBroadcast(Turns(), "residual")


def test_a_component_serves_one_optimizer():
    memory = Residual()
    first = Given({"w": (8,)})
    kept = grace.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=1.0), first, "topk(ratio=0.2)", memory)
    first.backward({"w": range(8)})
    kept.step()
    for choice in ({"compressor": "topk", "memory": memory}, {"communicator": kept._grace.runner.communicators[0]}):
        second = Given({"w": (8,)})
        with pytest.raises(grace.ConfigError, match=r"(residual|allgather) is in use by .*the spec '\1'"):
            grace.DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=1.0), second, **choice)
    assert float(memory.state["w"].sum()) == sum(range(6))  # those that failed took and left nothing


def test_what_one_optimizer_left_in_a_memory_does_not_reach_the_next_one():
    memory = Residual()
    for _ in range(2):
        model = Given({"w": (8,)})
        optimizer = grace.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model, TopK(ratio=0.2), memory
        )
        model.backward({"w": range(8)})
        optimizer.step()
        assert float(memory.state["w"].sum()) == sum(range(6))
        optimizer._grace.runner.close()


def test_components_are_copied_and_pickled_without_the_run_they_are_in():
    communicator = ReduceBroadcast("topk(ratio=0.5)", "residual")
    model = Given({"w": (8,)})
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model, communicator=communicator, seed=5
    )
    model.backward({"w": range(8)})
    optimizer.step()
    for other in (copy.deepcopy(communicator), pickle.loads(pickle.dumps(communicator))):
        assert (other.context.seed, other.spec) == (0, "reduce_broadcast")
        assert float(other.memory.state["w"].sum()) == 6.0
        other.set_owner(optimizer)  # it is nobody's


@dataclasses.dataclass
class Beside(Residual):
    """A user's memory with a compressor of its own, in a list, which knows the memory."""

    name = "beside"

    def __post_init__(self):
        super().__post_init__()
        self.inner = [grace.make("compressor", "qsgd")]
        self.inner[0].outer = self

    def compensate(self, tensor, name):
        self.seen = self.inner[0].context
        return super().compensate(tensor, name)


def test_parts_of_a_users_component_are_in_the_run_too():
    memory, model = Beside(), Given({"w": (600,)})
    optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, "topk", memory, seed=3)
    model.backward({"w": range(600)})
    optimizer.step()
    assert (memory.seen.seed, memory.seen.step) == (3, 1)
    frozen = memory.with_context(dataclasses.replace(memory.context, step=9))
    assert (frozen.inner[0].context.step, frozen.inner[0].outer is frozen, memory.inner[0].context.step) == (9, True, 1)


@pytest.mark.parametrize("compress_after", [0, 3])
def test_an_optimizer_that_is_refused_leaves_the_communicator_of_another_as_it_was(compress_after):
    def trained(refuses):
        communicator = Allgather("topk(ratio=0.01, warmup_steps=3)", "residual")
        model = torch.nn.Linear(50, 50, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = grace.DistributedOptimizer(plain, model, communicator=communicator, compress_after=compress_after)
        kept = []
        for step in range(7):
            if step == 1 and refuses:
                other = torch.nn.Linear(4, 4)
                with pytest.raises(grace.ConfigError, match="in use by another distributed optimizer"):
                    grace.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), communicator=communicator)
            optimizer.zero_grad()
            model(torch.arange(50.0)[None]).sum().backward()
            optimizer.step()
            kept.append(int((model.weight.grad != 0).sum()))
        optimizer.close()
        return kept

    found = trained(refuses=True)
    assert found == trained(refuses=False)
    assert found[-1] < found[0]


def test_what_was_refused_for_its_compress_after_may_be_used_without():
    communicator, model = Allgather("topk(ratio=0.1)", "dgc"), torch.nn.Linear(10, 10)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(grace.ConfigError, match="Leave compress_after out"):
        grace.DistributedOptimizer(plain, model, communicator=communicator, compress_after=5)
    grace.DistributedOptimizer(plain, model, communicator=communicator).close()
