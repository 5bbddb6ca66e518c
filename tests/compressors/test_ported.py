"""Compressors and memories as the original GRACE's users write them, and what is no such thing."""

import copy
import pickle
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather, Allreduce, ReduceBroadcast
from grace.core.transactional_dict import TransactionalDict
from grace.torch import Compressor, Memory, Traits
from tests.support.data import data
from tests.support.pools import launched, on_ranks
from tests.support.training import Given, digest, distributed


class TopK(Compressor):
    """GRACE's: payload a tuple, int64 positions."""

    def __init__(self, compress_ratio):
        super().__init__()
        self.compress_ratio = compress_ratio

    def compress(self, tensor, name):
        flat = tensor.flatten()
        _, indices = torch.topk(flat.abs(), max(1, int(flat.numel() * self.compress_ratio)))
        return (flat[indices], indices), (tensor.numel(), tensor.size())

    def decompress(self, tensors, ctx):
        (values, indices), (numel, shape) = tensors, ctx
        return torch.zeros(numel).scatter_(0, indices, values).view(shape)


class Signum(Compressor):
    """GRACE's: a vote, by ``aggregate(tensors)``, and a dict of momenta."""

    def __init__(self, momentum):
        super().__init__(average=False, tensors_size_are_same=True)
        self.momentum = momentum
        self.momentums = {}

    def compress(self, tensor, name):
        shape, tensor = tensor.size(), tensor.flatten()
        if name in self.momentums:
            tensor = (1.0 - self.momentum) * tensor + self.momentum * self.momentums[name]
        self.momentums[name] = tensor
        return (tensor >= 0).type(torch.uint8), shape

    def decompress(self, tensors, shape):
        (signs,) = tensors
        return (signs.float() * 2 - 1).view(shape)

    def aggregate(self, tensors):
        return (sum(tensors) >= 0) * 2.0 - 1.0


class Threshold(Compressor):
    """GRACE's: sizes by the data."""

    def __init__(self, threshold):
        super().__init__(tensors_size_are_same=False)
        self.threshold = threshold

    def compress(self, tensor, name):
        (indices,) = torch.where(tensor.flatten().abs() > self.threshold)
        return [tensor.flatten()[indices], indices], tensor.shape

    def decompress(self, tensors, shape):
        return torch.zeros(shape.numel()).scatter_(0, tensors[1], tensors[0]).view(shape)


class Residual(Memory):
    def __init__(self, beta=1.0):
        self.residuals = {}
        self.beta = beta

    def compensate(self, tensor, name):
        if name in self.residuals:
            tensor = self.beta * self.residuals[name] + tensor
        return tensor

    def update(self, tensor, name, compressor, tensor_compressed, ctx):
        self.residuals[name] = tensor - compressor.decompress(tensor_compressed, ctx)


class Accumulating(Memory):
    """GRACE's memory for deep gradient compression: two dicts, one of them changed in place."""

    def __init__(self, momentum):
        self.momentum = momentum
        self.gradients, self.residuals = {}, defaultdict(lambda: torch.zeros(()))

    def compensate(self, tensor, name):
        self.residuals[name] = self.momentum * self.residuals[name] + tensor
        if name in self.gradients:
            self.gradients[name] += self.residuals[name]
        else:
            self.gradients[name] = self.residuals[name]
        return self.gradients[name]

    def update(self, tensor, name, compressor, tensor_compressed, ctx):
        kept = compressor.decompress(tensor_compressed, ctx) == 0
        self.residuals[name] = self.residuals[name] * kept
        self.gradients[name] = self.gradients[name] * kept


SHAPES = {"w": (20, 30), "b": (50,)}


def steps(optimizer, model, numbers, spoilt=()):
    for number in numbers:
        optimizer.zero_grad()
        given = {name: data("gaussian", shape, 100 * number + grace.rank()) for name, shape in SHAPES.items()}
        if number in spoilt and grace.rank() == grace.size() - 1:
            given["w"][0, 0] = np.inf
        model.backward(given)
        optimizer.step()
    return [p.grad.clone() for p in model.parameters()]


@on_ranks()
def test_graces_compressors_and_memories_run_as_they_are():
    for theirs, ours in (
        ((TopK(0.1), Residual()), ("topk(ratio=0.1)", "residual")),
        ((Signum(0.0), "none"), ("signsgd", "none")),
        ((Threshold(0.5), Residual()), ("threshold(value=0.5)", "residual")),
    ):
        means = []
        for parts in (theirs, ours):
            model = Given(SHAPES)
            optimizer = distributed(model, communicator=Allgather(*parts), optimizer=lambda p: torch.optim.SGD(p, 0.0))
            means.append(steps(optimizer, model, range(3)))
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*means, strict=True))


@on_ranks()
def test_dicts_of_answers_are_kept_too():
    """Through a destination, a step late, and with gradients that only come now and then: means, and what is kept."""
    found = []
    for parts in ((TopK(0.1), Residual()), ("topk(ratio=0.1)", "residual")):
        model = Given(SHAPES)
        optimizer = distributed(model, communicator=ReduceBroadcast(*parts, staleness=1))
        for number in range(4):
            optimizer.zero_grad()
            given = {name: data("gaussian", shape, 100 * number + grace.rank()) for name, shape in SHAPES.items()}
            if number == 2:
                del given["b"]
            model.backward(given)
            optimizer.step()
        state = optimizer.full_state_dict()["grace"]["ranks"][0]
        kept = [
            values for kind in ("memory", "answer_memory") for name, values in state.items() if kind in name.split(".")
        ]
        found.append(
            [[p.detach().clone() for p in model.parameters()], [v for values in kept for v in values.values()]]
        )
        optimizer.close()
    (weights, kept), (wanted, kept_by_ours) = found
    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(weights + kept, wanted + kept_by_ours, strict=True)]
    assert same == [True] * 6


@pytest.mark.parametrize(
    ("memory", "kinds"),
    [
        ("residual", ["memory", "memory.residuals"]),
        ("two", ["memory", "memory.gradients", "memory.residuals"]),
        ("momenta", ["compressor", "compressor.momentums"]),
    ],
)
@on_ranks()
def test_their_dicts_are_saved_rolled_back_and_restored(memory, kinds):
    """Weights and memories of training, without a step that overflowed, and stopped and gone on."""
    made = {"residual": lambda: (TopK(0.1), Residual()), "two": lambda: (TopK(0.1), Accumulating(0.5))}
    made["momenta"] = lambda: (Signum(0.9), "none")

    def begun():
        model = Given(SHAPES)
        return model, distributed(model, communicator=Allgather(*made[memory]()))

    def ends(model, optimizer):
        return digest([dict(model.named_parameters()), optimizer.state_dict()["grace"]["state"]])

    model, optimizer = begun()
    steps(optimizer, model, (0, 1))
    before = digest(optimizer.state_dict()["grace"]["state"])
    weights = [p.detach().clone() for p in model.parameters()]
    steps(optimizer, model, (7,), spoilt=(7,))
    with torch.no_grad():  # as a scaler leaves the step out
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    assert digest(optimizer.state_dict()["grace"]["state"]) == before
    saved = pickle.loads(pickle.dumps(optimizer.full_state_dict()))
    steps(optimizer, model, (2, 3))
    other, again = begun()
    again.load_state_dict(saved)
    with torch.no_grad():
        for p, value in zip(other.parameters(), weights, strict=True):
            p.copy_(value)
    steps(again, other, (2, 3))
    assert ends(model, optimizer) == ends(other, again)
    assert set(kinds) <= set(saved["grace"]["state"])


def one(compressor, memory="none"):
    model = Given({"w": (20, 30)})
    return model, distributed(model, communicator=Allgather(compressor, memory))


def stepped(model, optimizer, gradient):
    model.backward({"w": gradient})
    optimizer.step()


@pytest.mark.usefixtures("local")
def test_loss_scales_reach_dicts_and_copies_have_their_own():
    memory = Residual()
    memory.residuals["w"] = torch.ones(2)
    other = copy.deepcopy(memory)
    memory.rescale(4.0)
    assert (memory.residuals["w"].tolist(), other.residuals["w"].tolist()) == ([4, 4], [1, 1])
    memory.residuals = {}
    assert len(memory.residuals) == 0
    assert isinstance(memory.residuals, TransactionalDict)


class Hidden(Memory):
    def __init__(self):
        self.velocity = torch.zeros(20, 30)
        self.table = torch.ones(3)  # which does not change
        self.seen = {}

    def compensate(self, tensor, name):
        self.velocity = 0.5 * self.velocity + tensor
        self.seen[name] = "words"
        return self.velocity.clone()


@pytest.mark.usefixtures("local")
def test_the_first_state_dict_says_what_is_not_saved():
    model, optimizer = one(TopK(0.1), Hidden())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()  # nothing was kept yet
    stepped(model, optimizer, data("gaussian", (20, 30)))
    with pytest.warns(
        UserWarning, match=r"the memory Hidden keeps something in its attribute seen, velocity that is not"
    ):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


# -- what is refused --------------------------------------------------------------------------------------------


class Wrong(Compressor):
    """Does one thing wrongly."""

    def __init__(self, how):
        self.how = how

    def compress(self, tensor, name):
        values = tensor.flatten()[:3]
        return {
            "empty": ([], None),
            "bare": [values],
            "complex": ([values.to(torch.complex64)], None),
            "numbers": ([1.5], None),
            "shape": ([values], None),
        }[self.how]

    def decompress(self, payload, ctx):
        return payload[0].sum().reshape(1)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("empty", "the payload of 'w' is empty"),
        ("bare", r"compress\(\) of 'w' must return two things, \(payload, ctx\), not a list"),
        ("complex", "the payload of 'w' holds a tensor of dtype complex64"),
        ("numbers", "the payload of 'w' holds a float, which is no tensor"),
        ("shape", r"decompress\(\) gave a tensor of shape \(1,\), where \(20, 30\) is wanted for 'w'"),
    ],
)
@on_ranks()
def test_what_is_no_payload_is_refused_by_name_before_it_is_sent(how, why):
    model, optimizer = one(Wrong(how))
    with pytest.raises(grace.ConfigError, match=why):
        stepped(model, optimizer, data("gaussian", (20, 30)))


class Positive(Compressor):
    """Sends as many as there are, and does not say so."""

    def compress(self, tensor, name):
        (indices,) = torch.where(tensor.flatten() > 0)
        return [tensor.flatten()[indices], indices], tensor.shape

    def decompress(self, payload, ctx):
        return torch.zeros(ctx.numel()).scatter_(0, payload[1], payload[0]).view(ctx)


class Summed(Positive):
    traits = Traits(category="sparsification", summable=True)

    def compress(self, tensor, name):
        return super().compress(tensor, name)[0][:1], tensor.shape

    def decompress(self, payload, ctx):
        return torch.full(ctx, float(payload[0].sum()))


def unequal(kind, goes_on=True):
    communicator = {"allgather": Allgather(Positive()), "rb": ReduceBroadcast(Positive()), "sum": Allreduce(Summed())}
    model = Given({"w": (20, 30)})
    optimizer = distributed(model, communicator=communicator[kind])
    with pytest.raises(grace.ExchangeError) as caught:
        stepped(model, optimizer, data("gaussian", (20, 30), grace.rank()))
    for _ in range(2 * goes_on):  # if they are alike
        optimizer.zero_grad()
        stepped(model, optimizer, data("gaussian", (20, 30), 5))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["allgather", "rb", "sum"])
def test_unequal_sizes_that_nobody_announced_are_found_at_the_first_step(two_ranks, kind):
    for said in two_ranks.run(unequal, kind):
        assert "the payload of 'w' has " in said
        assert "bytes on rank 0, and" in said
        assert "fixed_size='by data'" in said


@pytest.mark.ranks
def test_they_are_found_over_horovod_too():
    for said in launched("horovodrun-gloo", 2).run(unequal, "allgather", False):
        assert "fixed_size='by data'" in said


@pytest.mark.usefixtures("local")
def test_sizes_that_change_later_are_found_by_the_rank_that_has_them():
    model, optimizer = one(Positive())
    stepped(model, optimizer, np.ones((20, 30), np.float32))
    optimizer.zero_grad()
    model.backward({"w": -np.ones((20, 30), np.float32)})
    with pytest.raises(
        grace.errors.PayloadError, match=r"'w' has the shapes \[\(0,\), \(0,\)\] at step 1.*fixed_size='by data'"
    ):
        optimizer.step()


def test_aggregates_of_decoded_tensors():
    x = torch.tensor([1.0, -2.0])
    assert grace.make("compressor", "topk").aggregate([x, x]).tolist() == [2, -4]
    assert grace.make("compressor", "signsgd").aggregate([x, -2 * x]).tolist() == [-1, 1]
    assert Signum(0.9).aggregate([x, x]).tolist() == [1, -1]
    assert (Signum(0.9).average, Threshold(1).tensors_size_are_same, TopK(0.1).average) == (False, False, True)
