"""Models that pipelines meet: called by keywords alone, with sparse tables, with layers that are used several times."""

import pytest
import torch
from torch import nn

import grace
from tests.support.pools import ranks_of

pytestmark = pytest.mark.ranks


class Keywords(nn.Module):
    """Called by keywords alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, values=None, scale=None):
        return self.b(torch.tanh(self.a(values))) * scale


class Table(nn.Module):
    """A table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(self.table(x))))


class Mixed(nn.Module):
    """Layers weighted by the softmax of a parameter, and one that is used again and again."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(8, 8), nn.Parameter(torch.zeros(3)), nn.Linear(8, 4)
        self.layers, self.again = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        share, h = torch.softmax(self.mix, 0), torch.tanh(self.first(x))
        for i, layer in enumerate(self.layers):
            h = torch.tanh(layer(h * self.scale)) * share[i] + h * self.scale
            h = h + torch.tanh(self.again(h))
        return self.last(h)


def made(kind):
    torch.manual_seed(0)
    return {"keywords": Keywords, "table": Table, "mixed": Mixed}[kind]()


def batch_of(kind):
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(8, 4, generator=draw)
    if kind == "keywords":
        return (), {"values": torch.randn(8, 8, generator=draw), "scale": torch.rand(8, 1, generator=draw)}, target
    if kind == "table":
        return (torch.randint(30, (8, 3), generator=draw),), {}, target
    return (torch.randn(8, 8, generator=draw),), {}, target


def engine_of(kind, **settings):
    args, kwargs, _ = batch_of(kind)
    return grace.torch.Pipeline(
        made(kind),
        (args, kwargs),
        nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **{"microbatches": 4, "stages": 2, "profiles": False, **settings},
    )


def gradients(kind, settings):
    """Of one step in stages; and the outputs of an evaluation."""
    engine = engine_of(kind, **settings)
    args, kwargs, target = batch_of(kind)
    engine.eval()
    outputs = engine(*args, **kwargs)
    engine.train()
    engine.step(*args, target, **kwargs)
    return {name: engine.gradient(name) for name, _ in engine.model.named_parameters()}, outputs


@pytest.mark.every
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("keywords", {}),
        ("table", {"sparse_as_dense": True}),
        ("mixed", {"schedule": "gpipe"}),
        ("mixed", {"schedule": "1f1b"}),
    ],
)
def test_gradients_are_those_of_one_process(kind, settings):
    args, kwargs, target = batch_of(kind)
    model = made(kind)
    output = model(*args, **kwargs)
    nn.functional.mse_loss(output, target).backward()
    for found, outputs in ranks_of(2).run(gradients, kind, settings):
        torch.testing.assert_close(outputs, output.detach())
        for name, p in model.named_parameters():
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def refusals():
    """What is said of sparse gradients without the option, and of calls without a target."""
    with pytest.raises(grace.ConfigError) as sparse:
        engine_of("table")
    engine = engine_of("mixed")
    with pytest.raises(grace.ConfigError) as target:
        engine.step(batch_of("mixed")[0][0])
    return str(sparse.value), str(target.value)


def test_what_is_missing_is_said_in_a_pipelines_words():
    for sparse, target in ranks_of(2).run(refusals):
        assert "the layer 'table' has sparse gradients" in sparse
        assert "sparse_as_dense=True" in sparse
        assert "(x, target), or (target, **batch)" in target
