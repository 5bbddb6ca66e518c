"""Torch modules that several benchmarks train."""

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

    Args:
        vocabulary: number of words.
        width: of hidden states.
        blocks: number of blocks.
        heads: of attention, in a block.
        length: words of the longest text.
        spread: standard deviation of new embeddings; torch's if left out.
        tied: True if the output is the transposed embedding.

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
    """Return ResNet-18 for small images (He et al., CVPR 2016, arXiv 1512.03385).

    Groups of channels are normalized, not batches, so that ranks do not differ.

    Args:
        classes: number of logits.
        pool: True to halve images behind the first convolution.
    """
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    if pool:
        stem.append(nn.MaxPool2d(2))
    blocks = [Block(before, width) for before, width in zip((64, *widths), widths, strict=False)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Block(nn.Module):
    """Two convolutions beside the identity, or beside a 1 x 1 convolution where the width grows."""

    def __init__(self, before: int, width: int):
        super().__init__()
        stride = 1 if before == width else 2
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
        )
        self.shortcut = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(images) + self.shortcut(images))
