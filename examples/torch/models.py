"""Five small models, randomly initialised, with data to train them on: for trials, strategies and tests.

grace strategy build --model examples.torch.models:lstm --builder parallax -n 2 -o s.yaml      # from the repository

The embeddings of ``lstm`` and ``ncf`` have sparse gradients, that of ``transformer`` has dense ones; ``sparse=`` says
otherwise. Not every optimizer takes sparse gradients: SGD (with or without momentum) and Adagrad do, without weight
decay; SparseAdam takes nothing else, so it is for the embeddings alone; Adam, AdamW and RMSprop refuse them. Grace's
optimizer wants ``sparse_as_dense=True`` for them, except under Horovod.

No model has dropout or batch statistics, so that the mean of the ranks' losses is the loss of their batches together.
"""

import torch
from torch import nn
from torch.nn import functional

from examples.batches import arrays

Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""The model's arguments, and the targets."""


def batch(name: str, seed: int, size: int, **sizes: int) -> Batch:
    """Return a batch for the model of this name. The same seed gives the same batch.

    Args:
        name: ``mlp``, ``resnet``, ``lstm``, ``transformer`` or ``ncf``.
        seed: draws the samples; not negative.
        size: samples in the batch.
        sizes: as for the functions of ``examples.batches``, which say the shapes and dtypes.

    >>> (characters,), following = batch("lstm", seed=0, size=4, length=16)
    >>> characters.shape, following.dtype
    (torch.Size([4, 16]), torch.int64)
    """
    inputs, targets = arrays(name, seed, size, **sizes)
    return tuple(torch.tensor(x) for x in inputs), torch.tensor(targets)


def loss(name: str, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of the model of this name: a float32 scalar, in nats.

    That is the cross-entropy per sample (``mlp``, ``resnet``), character (``lstm``, ``transformer``), or rating.
    """
    inputs, targets = batch
    outputs = model(*inputs)
    if name == "ncf":
        return functional.binary_cross_entropy_with_logits(outputs, targets)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def mlp(*, inputs: int = 64, hidden: int = 128, classes: int = 10) -> nn.Sequential:
    """A multilayer perceptron with two hidden layers: float32 (batch, inputs) to logits (batch, classes).

    >>> sum(p.numel() for p in mlp().parameters())
    26122
    """
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def resnet(*, channels: int = 1, width: int = 16, stages: int = 2, classes: int = 10) -> nn.Sequential:
    """A residual network: float32 images (batch, channels, any height, any width) to logits (batch, classes).

    A convolution and a block of ``width`` channels; every further stage is a block with twice the channels and half
    the height and width. Groups of channels are normalized, not batches.

    >>> sum(p.numel() for p in resnet().parameters())
    19642
    >>> resnet(channels=3)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """
    widths = [width << stage for stage in range(stages)]
    blocks = [_Residual(a, b) for a, b in zip([width, *widths], widths, strict=False)]
    stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), _normalization(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def lstm(*, vocabulary: int = 64, width: int = 32, hidden: int = 128, sparse: bool = True) -> nn.Module:
    """A character model, of an embedding, an LSTM layer and a linear layer.

    It takes int64 characters (batch, length), and gives logits of the next ones: (batch, length, vocabulary).

    >>> sum(p.numel() for p in lstm().parameters())
    93248
    """
    return _LSTM(vocabulary, width, hidden, sparse)


def transformer(
    *,
    vocabulary: int = 64,
    length: int = 32,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    sparse: bool = False,
) -> nn.Module:
    """A character model, of causal self-attention. Its embedding is dense unless ``sparse``.

    It takes int64 characters (batch, up to length), and gives logits of the next ones: (batch, as many, vocabulary).

    >>> sum(p.numel() for p in transformer().parameters())
    110400
    """
    return _Transformer(vocabulary, length, width, heads, blocks, sparse)


def ncf(*, users: int = 20_000, items: int = 10_000, width: int = 16, sparse: bool = True) -> nn.Module:
    """Neural collaborative filtering (He et al., WWW 2017, arXiv 1708.05031): nearly all of it is embeddings.

    One tower multiplies the embeddings of a user and an item, the other has a perceptron of other embeddings of them;
    a linear layer joins the towers. It takes int64 users (batch,) and items (batch,), and gives logits (batch,).

    >>> sum(p.numel() for p in ncf().parameters())
    961617
    """
    return _NCF(users, items, width, sparse)


def _normalization(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(4 if width % 4 == 0 else 1, width)


class _Residual(nn.Module):
    """Two convolutions beside the identity, or beside a 1 x 1 convolution where the width grows."""

    def __init__(self, before: int, width: int):
        super().__init__()
        stride = 1 if before == width else 2
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
            _normalization(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            _normalization(width),
        )
        self.shortcut = nn.Identity() if before == width else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(images) + self.shortcut(images))


class _LSTM(nn.Module):
    def __init__(self, vocabulary: int, width: int, hidden: int, sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.output = nn.Linear(hidden, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.embedding(characters))[0])


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, blocks: int, sparse: bool):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, sparse=sparse)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        length = characters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, characters.device)
        hidden = self.embedding(characters) + self.positions[:length]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.output(self.norm(hidden))


class _NCF(nn.Module):
    def __init__(self, users: int, items: int, width: int, sparse: bool):
        super().__init__()
        self.user_factors, self.user_features = (nn.Embedding(users, width, sparse=sparse) for _ in range(2))
        self.item_factors, self.item_features = (nn.Embedding(items, width, sparse=sparse) for _ in range(2))
        self.perceptron = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.output = nn.Linear(2 * width, 1)
        for table in (self.user_factors, self.user_features, self.item_factors, self.item_features):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        factors = self.user_factors(users) * self.item_factors(items)
        features = torch.cat([self.user_features(users), self.item_features(items)], 1)
        return self.output(torch.cat([factors, self.perceptron(features)], 1)).squeeze(1)
