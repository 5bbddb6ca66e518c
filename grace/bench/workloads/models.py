"""Models of ``grace bench step``: one of each kind that people compress gradients of, sized for a processor core.

Each function makes a :class:`Workload`; those in ``ON_GPUS`` are sized for a GPU. Weights come from torch's global
generator, which the benchmark seeds; data differ by rank, and stay the same from step to step, since only time is
measured.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from grace.bench.common.user_functions import load_function
from grace.bench.workloads.torch_modules import (
    GPT,
    LSTM,
    ResidualUnit,
    normalized,
    random_images,
    random_texts,
    resnet18,
)
from grace.errors import ConfigError


class Workload(NamedTuple):
    """Model, the function that returns the loss of a batch of it (or a wrapper of it), and the batch's samples."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    samples: int


def transformer(rank: int) -> Workload:
    """A causal language model: 4 encoder layers of width 512 and a vocabulary of 4,096, 16.9 M parameters.

    A batch has 4 sequences of 32 tokens.
    """
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(4096, 512), body, nn.Linear(512, 4096))
    return _classify(model, *random_texts(rank, 4, 32, 4096))


def lstm(rank: int) -> Workload:
    """A word model after Zaremba et al. (2014, arXiv 1409.2329): 2 LSTM layers of 400, a vocabulary of 10,000; 10.6 M.

    A batch has 8 sequences of 16 words. The embedding's gradient is dense.
    """
    return _classify(LSTM(10_000, 400, 400, layers=2), *random_texts(rank, 8, 16, 10_000))


def resnet(rank: int) -> Workload:
    """ResNet-18 for small images, 11.2 M parameters; a batch has 4 of 3 x 32 x 32."""
    return _classify(resnet18(10), *random_images(rank, 4, 32, 10))


def resnet50(rank: int, images: int = 2, size: int = 64) -> Workload:
    """ResNet-50 for ImageNet (He et al., CVPR 2016, arXiv 1512.03385): 25.6 M parameters in 161 variables.

    A batch has 2 images of 3 x 64 x 64, on a GPU 64 of 3 x 224 x 224. Groups of channels are normalized, not batches,
    so that ranks do not differ.
    """
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, before = list[nn.Module](), 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(count):
            stride, wide = 2 if i == 0 and width > 64 else 1, 4 * width
            layers = [*normalized(before, width, 1, groups=32), nn.ReLU(), *normalized(width, width, 3, stride, 32)]
            layers += [nn.ReLU(), *normalized(width, wide, 1, groups=32)]
            shortcut = normalized(before, wide, 1, stride, 32) if before != wide else []
            blocks.append(ResidualUnit(layers, nn.Sequential(*shortcut)))
            before = wide
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
    return _classify(model, *random_images(rank, images, size, 1000))


def gpt2(rank: int, sequences: int = 1, length: int = 32) -> Workload:
    """GPT-2 small (Radford et al., 2019): 12 layers of width 768, a vocabulary of 50,257; 124.4 M parameters, since the
    output is the embedding's transpose.

    A batch has a sequence of 32 tokens, on a GPU 8 of 1,024.
    """
    return _classify(GPT(50_257, 768, 12, 12, 1024, tied=True), *random_texts(rank, sequences, length, 50_257))


def ncf(rank: int) -> Workload:
    """Neural collaborative filtering (He et al., WWW 2017, arXiv 1708.05031): 9.7 M parameters, mostly embeddings.

    100,000 users and 50,000 items; a batch has 256 pairs. The embeddings' gradients are dense here.
    """
    users, items, size = 100_000, 50_000, 256
    generator = torch.Generator().manual_seed(rank)
    user = torch.randint(users, (size,), generator=generator)
    item = torch.randint(items, (size,), generator=generator)
    liked = torch.randint(2, (size,), generator=generator).float()
    return _workload(_Filtering(users, items), functional.binary_cross_entropy_with_logits, [user, item], liked)


def mlp(rank: int) -> Workload:
    """The network of ``grace bench train --task digits``, 301,066 parameters; a batch has 64 images of 8 x 8."""
    from grace.bench.workloads.torch_tasks import network

    generator = torch.Generator().manual_seed(rank)
    x, y = torch.rand(64, 64, generator=generator), torch.randint(10, (64,), generator=generator)
    return _classify(network(seed=0), x, y)


MODELS: dict[str, Callable[[int], Workload]] = {
    function.__name__: function for function in (transformer, resnet, resnet50, gpt2, lstm, ncf, mlp)
}

ON_GPUS: dict[str, Callable[[int], Workload]] = {
    "resnet50": lambda rank: resnet50(rank, images=64, size=224),
    "gpt2": lambda rank: gpt2(rank, sequences=8, length=1024),
}
"""Batches that keep a GPU busy."""


def workload(name: str, rank: int, device: str = "cpu") -> Workload:
    """Return a model of Grace's, or of a user's ``module:function`` without arguments, which returns ``(model, loss)``
    or ``(model, loss, samples)``.

    Data are the rank's; the user's function asks ``grace.rank()``. On "cuda" the batch is larger if the model is in
    ``ON_GPUS``.

    >>> small = workload("lstm", rank=0)
    >>> small.samples, sum(p.numel() for p in small.model.parameters())
    (8, 10576400)
    """
    if name in MODELS:
        found = (ON_GPUS if device != "cpu" else {}).get(name, MODELS[name])(rank)
        return found if device == "cpu" else found._replace(model=found.model.to(device))
    made = load_function(name, "model", MODELS)()
    if isinstance(made, nn.Module):
        raise ConfigError(
            f"{name}() returns a model alone, which is enough for grace strategy; to train it, grace bench needs its "
            "loss too: return (model, loss) or (model, loss, samples), where loss(model) is the loss of a batch"
        )
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(f"{name}() must return (model, loss) or (model, loss, samples), a torch module first")
    if not callable(made[1]):
        raise ConfigError(f"{name}() must return a loss that takes the model, not {type(made[1]).__name__}")
    return Workload(made[0].to(device) if device != "cpu" else made[0], made[1], made[2] if len(made) == 3 else 1)


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Workload:
    return _workload(model, lambda logits, y: functional.cross_entropy(logits.flatten(0, -2), y.flatten()), [x], y)


def _workload(
    model: nn.Module,
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    target: torch.Tensor,
) -> Workload:
    batch = [*inputs, target]

    def loss(model: nn.Module) -> torch.Tensor:
        device = next(model.parameters()).device
        if batch[0].device != device:  # the model was moved: so is its batch, once
            batch[:] = [tensor.to(device) for tensor in batch]
        return criterion(model(*batch[:-1]), batch[-1])

    return Workload(model, loss, len(target))


class _Filtering(nn.Module):
    def __init__(self, users: int, items: int, width: int = 32):
        super().__init__()
        self.user_factors, self.user_features = (nn.Embedding(users, width) for _ in range(2))
        self.item_factors, self.item_features = (nn.Embedding(items, width) for _ in range(2))
        self.perceptron = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.output = nn.Linear(2 * width, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        factors = self.user_factors(users) * self.item_factors(items)
        features = torch.cat([self.user_features(users), self.item_features(items)], 1)
        return self.output(torch.cat([factors, self.perceptron(features)], 1)).squeeze(1)
