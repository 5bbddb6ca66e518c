"""Tasks that show what training loses by ``auto``: a recommender with tables, a convolutional network, a language model
whose embedding is its output, and LoRA; each of about 1,000 steps, and with and without momentum.

    grace bench train --task benchmarks.planner_learning:Lora --optimizer sgd,adamw --methods none,auto

"gain lacking" is the part of the loss's fall without compression by which ``auto`` ends higher.
"""

import torch
from torch import nn
from torch.nn import functional

from grace.bench.workloads.torch_tasks import InTorch, Recommender

TEST = 800
"""Examples that are held out."""
CLASSES, WORDS, LENGTH = 10, 256, 16


class Tables(Recommender):
    """Made-up clicks: two embedding tables and an MLP."""

    epochs = 3


class _Made(InTorch):
    """Task of made-up examples, whose quality is the loss on those held out; 10 epochs are 1,000 steps."""

    metric, higher_is_better = "loss", False
    epochs, batch, count = 10, 32, 3200
    x: torch.Tensor
    y: torch.Tensor

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(self.x[share]).flatten(0, -2), self.y[share].flatten())

    def quality(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss(model, torch.arange(self.count, self.count + TEST)))


class Convolutions(_Made):
    """Images of 3 x 16 x 16: ten patterns under noise."""

    about, lr, adamw_lr = "made-up images, a convolutional network", 0.02, 2e-3

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.y = torch.randint(CLASSES, (self.count + TEST,), generator=draws)
        patterns = torch.randn(CLASSES, 3, 16, 16, generator=draws)
        self.x = patterns[self.y] + 3 * torch.randn(len(self.y), 3, 16, 16, generator=draws)

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Tied(_Made):
    """A language whose next word follows from the last one by one of three rules; the output is the embedding's."""

    about, lr, adamw_lr, warmup = "made-up words, a transformer with tied embeddings", 0.3, 5e-3, 0.1

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        following = torch.randint(WORDS, (WORDS, 3), generator=draws)
        words = [(torch.rand(self.count + TEST, generator=draws) ** 2 * WORDS).long()]
        for _ in range(LENGTH):
            words.append(following[words[-1], torch.randint(3, (len(words[0]),), generator=draws)])
        text = torch.stack(words, 1)
        self.x, self.y = text[:, :-1], text[:, 1:]

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TiedModel()


class TiedModel(nn.Module):
    """Two encoder layers of width 64; logits are products with the embedding of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64), nn.Embedding(LENGTH, 64)
        nn.init.normal_(self.words.weight, std=0.05)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the next words: (batch, length, words)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.body(self.words(x) + self.places(torch.arange(x.shape[1])), mask=mask, is_causal=True)
        return hidden @ self.words.weight.T


class Lora(_Made):
    """A frozen network whose answers another one, which differs by matrices of rank 4, gives."""

    about, lr, adamw_lr = "a frozen network, LoRA of rank 4", 0.05, 2e-3

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.x = torch.randn(self.count + TEST, 256, generator=draws)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.y = LoraModel(1.0)(self.x).argmax(1)

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LoraModel(0.0)


class LoraModel(nn.Module):
    """Four layers of width 256, frozen, equal in all models; each with two factors of rank 4, and a head.

    Args:
        spread: the standard deviation of the second factors, relative to the frozen weights.
    """

    def __init__(self, spread: float) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(2)
        self.frozen: torch.Tensor
        self.register_buffer("frozen", torch.randn(4, 256, 256, generator=draws) * (2 / 256) ** 0.5)
        self.down = nn.ParameterList([torch.randn(4, 256) / 16 for _ in range(4)])
        self.up = nn.ParameterList([spread * torch.randn(256, 4) / 2 for _ in range(4)])
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits: (batch, classes)."""
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.relu(x @ frozen.T + x @ down.T @ up.T)
        logits: torch.Tensor = self.head(x)
        return logits


class PlainTables(Tables):
    """:class:`Tables` without momentum."""

    momentum, lr = 0.0, 10.0


class PlainConvolutions(Convolutions):
    """:class:`Convolutions` without momentum."""

    momentum, lr = 0.0, 0.1


class PlainTied(Tied):
    """:class:`Tied` without momentum."""

    momentum, lr = 0.0, 1.0


class PlainLora(Lora):
    """:class:`Lora` without momentum."""

    momentum, lr = 0.0, 0.2
