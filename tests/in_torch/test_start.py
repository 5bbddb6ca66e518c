"""Ranks start equal, frozen parameters and buffers too; layers may be frozen later, and not the other way."""

import pytest
import torch

import grace
from tests.support.pools import launched, on_ranks
from tests.support.training import digest, gradients, refusal, train, weights

pytestmark = pytest.mark.ranks


class Model(torch.nn.Module):
    """A frozen layer, tied weights, BatchNorm, and buffers of all kinds; what is in them depends on the seed."""

    def __init__(self, seed: int, odd: str = ""):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.conv = torch.nn.Conv2d(1, 2, 3)
        self.norm = torch.nn.BatchNorm2d(2)
        self.hidden, self.tied = torch.nn.Linear(72, 72), torch.nn.Linear(72, 72, bias=False)
        self.tied.weight = self.hidden.weight
        self.head = torch.nn.Linear(72, 10)
        self.norm.num_batches_tracked.fill_(seed)
        self.norm.running_mean.fill_(seed)
        self.register_buffer("unsaved", torch.randn(3, generator=generator), persistent=False)
        self.register_buffer("mask", torch.rand(5, generator=generator) > 0.5)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("expanded", torch.randn(3, 1, generator=generator).expand(3, 4))
        self.register_buffer("crossed", torch.randn(3, 4, generator=generator, dtype=torch.float64).t())
        if odd == "sparse":
            self.register_buffer("edges", torch.eye(3).to_sparse())
        elif odd:
            self.register_buffer("odd", torch.zeros(grace.rank() + 1))
        self.conv.requires_grad_(False)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(torch.relu(self.tied(torch.relu(self.hidden(x)))))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def held(model):
    return {**weights(model), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def started(what, broadcast=True, own_frozen=False):
    """Names of the tensors that the ranks start with as rank 0's."""
    model = Model(grace.rank())
    before, first = held(model), held(Model(0))
    names = {"model": model, "pairs": model.named_parameters(), "none": None}[what]
    parameters = model.parameters() if own_frozen else [p for p in model.parameters() if p.requires_grad]
    optimizer = grace.DistributedOptimizer(sgd(parameters), names, broadcast=broadcast)
    after = held(model)
    for name, value in after.items():
        assert digest(value) in (digest(before[name]), digest(first[name]))
    train(model, optimizer, range(2))
    return {name for name in after if digest(after[name]) == digest(first[name])}


@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo", "mpirun-mpi"])
def test_what_starts_equal(engine):
    ranks, everything = launched(engine, 2), set(held(Model(0)))
    assert ranks.run(started, "model") == [everything] * 2
    if engine == "gloo":
        named = set(weights(Model(0)))
        own, always = named - {"conv.weight", "conv.bias"}, {"empty", "norm.weight", "norm.bias", "norm.running_var"}
        assert ranks.run(started, "pairs")[1] == named | always
        assert ranks.run(started, "none")[1] == own | always
        assert ranks.run(started, "none", True, True)[1] == named | always
        assert ranks.run(started, "model", False)[1] == always


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("shape", "rank 0 has buffer 'odd' float32[1], rank 1 has buffer 'odd' float32[2]"),
        ("frozen", "rank 0 has variable 'head.weight' float32[10, 72], rank 1 has frozen parameter 'head.weight'"),
        ("sparse", "'edges' is sparse (torch.sparse_coo) and cannot start from rank 0's"),
    ],
)
@on_ranks(2)
def test_start_values_that_differ_or_cannot_be_sent_are_named(odd, message):
    """Start values differ in shape, are sparse, or a layer is frozen on one rank only."""
    model = Model(0, odd)
    if odd == "frozen":
        model = Model(0)
        model.head.requires_grad_(grace.rank() == 0)
    answer = refusal(grace.DistributedOptimizer, sgd(model.parameters()), model, kind=grace.GraceError)
    assert message in answer


ENGINES = pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo"])


@ENGINES
@on_ranks()
def test_layers_may_be_frozen_later(engine):
    """Training, three steps of which the head is frozen: it stays as it is, without gradients."""
    model = Model(grace.rank())
    optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model, compressor="topk(ratio=0.1)")
    train(model, optimizer, range(2))
    model.head.requires_grad_(False)
    before = digest(weights(model.head))
    train(model, optimizer, range(2, 5))
    assert digest(weights(model.head)) == before
    assert not any(value is not None for value in gradients(model.head).values())
    model.head.requires_grad_(True)
    train(model, optimizer, range(5, 7))
    assert digest(weights(model.head)) != before
    return digest(weights(model))


@ENGINES
@on_ranks()
def test_a_layer_that_was_frozen_is_not_trained_silently(engine):
    model = Model(0)
    optimizer = grace.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    train(model, optimizer, range(2))
    model.conv.requires_grad_(True)
    before = digest(weights(model)), grace.init().sent_bytes
    for misuse in (lambda: train(model, optimizer, range(1)), optimizer.synchronize, optimizer.step):
        message = refusal(misuse)
        assert message.startswith("the parameter 'conv.weight' requires gradients now, and did not when")
        assert "optimizer.close()" in message
    assert (digest(weights(model)), grace.init().sent_bytes) == before
    model.conv.requires_grad_(False)
    train(model, optimizer, range(2, 4))
    return digest(weights(model))
