"""Models as people write them, cut into pipelines unmodified."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import grace
from tests.support.pipelines import unmeasured
from tests.support.pools import on_ranks
from tests.support.training import refusal

WIDTH, HEADS, LENGTH = 16, 2, 6


class Rotary(nn.Module):
    """Positions as Llama's models have them: computed once, in full precision, without gradients, and read by all
    layers (https://github.com/pytorch/pytorch/issues/184361: such a model could not be pipelined)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 10.0 ** -torch.linspace(0, 2, WIDTH // HEADS // 2), persistent=False)

    @torch.no_grad()
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(x.shape[1]).float()[:, None] * self.frequencies
            angles = torch.cat([angles, angles], dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Llama(nn.Module):
    """Layers under activation checkpoints, as transformers' ``gradient_checkpointing_enable()`` calls them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(20, WIDTH), Rotary()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, 20)

    def forward(self, tokens):
        x = self.embedding(tokens)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=True)
        return self.head(x)


class Reversed(torch.autograd.Function):
    """A domain classifier's gradient reversal."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.label, self.domain = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.features(x))
        return self.label(h) + self.domain(Reversed.apply(h, 0.5))


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


class Weighted(nn.Module):
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


class Windows(nn.Module):
    """Overlapping windows by strides, as Longformer's models take them, of a value that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(12, 4)

    def forward(self, x):
        turned = torch.tanh(self.a(x).t())  # of shape (8, rows), and strides (1, 8)
        windows = turned.as_strided((x.shape[0], 3, 4), (turned.stride(1), 2 * turned.stride(0), turned.stride(0)))
        return self.b(windows.flatten(1))


class Spectrum(nn.Module):
    """Complex values between layers, whose gradients are lazy conjugates."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.fft.irfft((torch.fft.rfft(self.a(x)) * (1 + 0.5j)).conj(), n=8))


class Recurrent(nn.Module):
    """Returns states, whose second dimension is that of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.cells = nn.Linear(8, 8), nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cells(self.a(x).unflatten(1, (2, 4)))[1][0]


def by_token(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def of_squares(output, target):
    return output.square().mean()


def tokens(draw):
    given = torch.randint(20, (8, LENGTH), generator=draw)
    return (given,), {}, given


def values(draw):
    return (torch.randn(8, 8, generator=draw),), {}, torch.randn(8, 4, generator=draw)


def by_keywords(draw):
    kwargs = {"values": torch.randn(8, 8, generator=draw), "scale": torch.rand(8, 1, generator=draw)}
    return (), kwargs, torch.randn(8, 4, generator=draw)


def rows_of_a_table(draw):
    return (torch.randint(30, (8, 3), generator=draw),), {}, torch.randn(8, 4, generator=draw)


MODELS = {
    "llama": (Llama, tokens, by_token, {}),
    "adversarial": (Adversarial, values, of_squares, {"microbatches": 2}),  # whose norms change with each
    "keywords": (Keywords, by_keywords, F.mse_loss, {}),
    "table": (Table, rows_of_a_table, F.mse_loss, {"sparse_as_dense": True}),
    "weighted": (Weighted, values, F.mse_loss, {"schedule": "1f1b"}),
    "recurrent": (Recurrent, values, of_squares, {}),
    "windows": (Windows, values, F.mse_loss, {"cuts": ["tanh"]}),
    "spectrum": (Spectrum, values, F.mse_loss, {"cuts": ["mul"]}),
}


def made(name, **settings):
    """A model in one process, one in stages, and a batch."""
    make, inputs, loss, own = MODELS[name]
    args, kwargs, target = inputs(torch.Generator().manual_seed(1))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    settings = {"microbatches": 4, "stages": 2, **own, **settings}
    optimizer = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    engine = unmeasured(models[1], (args, kwargs), loss, optimizer=optimizer, **settings)
    return models[0], engine, (args, kwargs, target)


@pytest.mark.every
@pytest.mark.parametrize("name", MODELS)
@on_ranks()
def test_models_as_they_are_written_have_their_own_gradients_and_outputs_in_a_pipeline(name):
    model, engine, (args, kwargs, target) = made(name)
    engine.eval()
    torch.testing.assert_close(engine(*args, **kwargs), model.eval()(*args, **kwargs).detach())
    engine.train()
    model.train()
    for half in (slice(4), slice(4, 8)):
        output = model(*(arg[half] for arg in args), **{key: value[half] for key, value in kwargs.items()})
        (MODELS[name][2](output, target[half]) / 2).backward()
    engine.step(*args, target, **kwargs)
    for key, p in model.named_parameters():
        gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
        torch.testing.assert_close(engine.gradient(key), gradient, rtol=1e-4, atol=1e-6, msg=key)


@on_ranks()
def test_what_is_missing_is_said_in_a_pipelines_words():
    sparse = refusal(made, "table", sparse_as_dense=False)
    assert "the layer 'table' has sparse gradients" in sparse
    assert "sparse_as_dense=True" in sparse
    _, engine, (args, *_) = made("weighted")
    assert "(x, target), or (target, **batch)" in refusal(engine.step, *args)


def test_memory_of_a_device_is_that_of_what_a_model_needs(local):
    """A table that does not fit is refused; a frozen backbone that fits is not."""

    def plan(model, x, memory):
        made = grace.torch.Pipeline(
            model, x, F.mse_loss, optimizer=torch.optim.Adam, microbatches=4, memory=memory, memory_margin=0.0
        )
        return max(made.plan.memory)

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(50_000, 20))  # 4 MB
            self.head = nn.Linear(20, 4)

        def forward(self, rows):
            return self.head(self.table[rows])

    with pytest.raises(grace.ConfigError, match="memory does not suffice"):
        plan(Features(), torch.zeros(8, dtype=torch.int64), 2e6)
    backbone = nn.Sequential(*(nn.Linear(500, 500) for _ in range(4))).requires_grad_(False)  # 4 MB
    assert 4e6 < plan(nn.Sequential(backbone, nn.Linear(500, 4)), torch.ones(8, 500), 6e6) < 4.5e6


class Twice(nn.Module):
    """A frozen layer that two stages have."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x):
        return self.shared(torch.tanh(self.own(self.shared(x))))


@on_ranks()
def test_a_frozen_layer_on_two_stages_does_not_decay():
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 8)
    before = model.shared.weight.clone()
    decays = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), "cuts": ["linear"]}
    engine = unmeasured(model, x, F.mse_loss, microbatches=2, **decays)
    engine.step(x, x)
    assert torch.equal(engine.parameter("shared.weight"), before)
    assert engine.stage == grace.rank()
