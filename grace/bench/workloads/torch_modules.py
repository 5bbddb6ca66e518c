"""Torch modules that several benchmarks train."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class LSTM(nn.Module):
    """Embedding, LSTM layers, and a linear layer over the vocabulary.

    >>> sum(p.numel() for p in LSTM(100, embedding=32, hidden=128).parameters())
    99044
    """

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int = 1):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word: (batch, length, vocabulary)."""
        return self.output(self.lstm(self.embedding(words))[0])


class GPT(nn.Module):
    """Embeddings of words and positions, blocks of causal attention, a norm, and a linear layer over the vocabulary.

    Texts have at most ``length`` words. ``spread`` is the standard deviation of new embeddings; torch's if left out.
    The output of a tied one is the transposed embedding.

    >>> sum(p.numel() for p in GPT(100, 48, blocks=2, heads=4, length=63).parameters())
    69364
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        blocks: int,
        heads: int,
        length: int,
        spread: float | None = None,
        tied: bool = False,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        if spread is not None:
            for table in (self.embedding, self.positions):
                nn.init.normal_(table.weight, std=spread)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.output = None if tied else nn.Linear(width, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits of the next word: (batch, length, vocabulary)."""
        length = words.shape[1]
        x = self.embedding(words) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        x = self.norm(x)
        return x @ self.embedding.weight.t() if self.output is None else self.output(x)


def resnet18(classes: int, pool: bool = False) -> nn.Sequential:
    """Return ResNet-18 for small images (He et al., CVPR 2016, arXiv 1512.03385); with ``pool`` they are halved behind
    the first convolution. Groups of channels are normalized, not batches, so that ranks do not differ."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    stem = [*normalized(3, 64, 3), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
    blocks = []
    for before, width in zip((64, *widths), widths, strict=False):
        stride = 1 if before == width else 2
        layers = [*normalized(before, width, 3, stride), nn.ReLU(), *normalized(width, width, 3)]
        shortcut = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)
        blocks.append(ResidualUnit(layers, shortcut))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def normalized(before: int, width: int, size: int, stride: int = 1, groups: int = 8) -> list[nn.Module]:
    """Return a convolution, and a norm of groups of channels."""
    convolution = nn.Conv2d(before, width, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.GroupNorm(groups, width)]


class ResidualUnit(nn.Module):
    """Layers, and the shortcut beside them."""

    def __init__(self, layers: Sequence[nn.Module], shortcut: nn.Module):
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), shortcut

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.shortcut(images) + self.layers(images))


def random_images(seed: int, count: int, size: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of images and their classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator), torch.randint(classes, (count,), generator=generator)


def random_texts(seed: int, count: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of texts, and the next word of each of their words."""
    text = torch.randint(vocabulary, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
