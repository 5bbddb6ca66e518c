"""Models of :mod:`benchmarks.pipeline_cuts`: some with equal layers, some without, sized for a processor core.

Each function makes ``(model, inputs, target, loss)``, with ``loss(outputs, target)`` a mean over rows; all ranks make
the same.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from grace.bench.common.user_functions import load_function
from grace.bench.workloads import torch_modules
from grace.bench.workloads.torch_modules import random_images, random_texts
from grace.errors import ConfigError

Inputs = torch.Tensor | tuple[torch.Tensor, ...]


class Cuttable(NamedTuple):
    """Model that is trained in stages, a batch as :class:`grace.torch.Pipeline` takes ``example_inputs``, its target,
    and the loss of outputs and target; None of a model that returns its loss."""

    model: nn.Module
    inputs: Inputs
    target: torch.Tensor
    loss: Callable[..., torch.Tensor] | None

    @property
    def batch(self) -> list[torch.Tensor]:
        """Arguments of a training step."""
        inputs = list(self.inputs) if isinstance(self.inputs, tuple) else [self.inputs]
        return inputs if self.loss is None else [*inputs, self.target]


def _of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def vgg11() -> Cuttable:
    """VGG-11 (Simonyan and Zisserman, 2015) for 8 images of 64 x 64: late layers have the parameters."""
    layers, before = list[nn.Module](), 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(4 * 512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 100)]
    return Cuttable(nn.Sequential(*layers, *head), *random_images(0, 8, 64, 100), functional.cross_entropy)


def resnet18() -> Cuttable:
    """ResNet-18 (He et al., 2016) with group norm, for 8 images of 64 x 64."""
    return Cuttable(torch_modules.resnet18(100, pool=True), *random_images(0, 8, 64, 100), functional.cross_entropy)


def gpt() -> Cuttable:
    """A causal language model of 8 layers of width 256; its head, of 32,768 words, takes as long as several layers."""
    return Cuttable(torch_modules.GPT(32_768, 256, 8, 4, 32), *random_texts(0, 8, 32, 32_768), _of_tokens)


class _EncoderDecoder(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int):
        super().__init__()
        self.source, self.words = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        memory, y = self.source(source), self.words(words)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


def encoder_decoder() -> Cuttable:
    """A transformer with an encoder for long texts and a decoder for short ones, 4 layers of width 256 each: every
    decoder's layer reads what the encoder gave."""
    (source, _), (words, following) = random_texts(0, 8, 96, 4096), random_texts(0, 8, 24, 4096)
    return Cuttable(_EncoderDecoder(256, 4, 4096), (source, words), following, _of_tokens)


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)):
        super().__init__()
        before = (3, *widths)
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip(before, widths, strict=False))
        self.middle = _twice(widths[-1], 2 * widths[-1])
        self.narrow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths))
        self.up = nn.ModuleList(_twice(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for narrow, level in zip(self.narrow, self.up, strict=True):
            x = level(torch.cat([kept.pop(), narrow(x)], 1))
        return self.head(x)


def _twice(before: int, width: int) -> nn.Module:
    first, second = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(8, width), nn.ReLU(), second, nn.GroupNorm(8, width), nn.ReLU())


def unet() -> Cuttable:
    """A U-Net (Ronneberger et al., 2015) of 4 levels for 4 images of 64 x 64: what goes down is read on the way up."""
    x, _ = random_images(0, 4, 64, 100)
    target = torch.randint(4, (4, 64, 64), generator=torch.Generator().manual_seed(1))
    return Cuttable(_UNet(), x, target, functional.cross_entropy)


def mlp() -> Cuttable:
    """16 equal layers of width 1,024, for 64 rows."""
    layers = [one for _ in range(16) for one in (nn.Linear(1024, 1024), nn.ReLU())]
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return Cuttable(nn.Sequential(*layers), x, torch.zeros(64, 1024), functional.mse_loss)


MODELS: dict[str, Callable[[], Cuttable]] = {
    function.__name__: function for function in (vgg11, resnet18, gpt, encoder_decoder, unet, mlp)
}


def cuttable(name: str, copies: int = 1) -> Cuttable:
    """Return a model of Grace's, or of a user's ``module:function`` without arguments, which returns ``(model, inputs,
    target, loss)``, with so many copies of each row of its batch.

    >>> made = cuttable("mlp", copies=2)
    >>> made.inputs.shape, sum(p.numel() for p in made.model.parameters())
    (torch.Size([128, 1024]), 16793600)
    """
    made = MODELS[name]() if name in MODELS else load_function(name, "model", MODELS)()
    if not isinstance(made, tuple) or len(made) != 4 or not isinstance(made[0], nn.Module):
        raise ConfigError(f"{name}() must return (model, inputs, target, loss), a torch module first")
    model, inputs, target, loss = made
    if copies > 1:
        inputs, target = tree_map_only(torch.Tensor, lambda one: torch.cat([one] * copies), (inputs, target))
    return Cuttable(model, inputs, target, loss)
