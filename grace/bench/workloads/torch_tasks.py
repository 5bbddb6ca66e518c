"""The tasks of the training benchmarks in torch, and how they are trained there."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import grace
from grace.bench.workloads import charlm, digits, recommender
from grace.bench.workloads.charlm import BLOCKS, EMBEDDING, GPT_WINDOW, HEADS, HIDDEN, WORST
from grace.bench.workloads.digits import WIDTH
from grace.bench.workloads.task import ADAMW_BETA2, Task, Trainer, in_optimizer
from grace.exchange.bucket import Traffic


class InTorch(Task):
    """A task in torch: what is left to say is ``count``, ``network``, ``loss`` and ``quality``, and the facts.

    >>> class Sine(InTorch):
    ...     about, metric, higher_is_better, lr, epochs, batch, count = "a sine", "error", False, 0.1, 5, 16, 256
    ...
    ...     def network(self, seed):
    ...         torch.manual_seed(seed)
    ...         return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    ...
    ...     def loss(self, model, share):
    ...         x = share[:, None] / 128 - 1
    ...         return (model(x) - torch.sin(4 * x)).square().mean()
    ...
    ...     def quality(self, model):
    ...         return float(self.loss(model, torch.arange(256)).detach())
    >>> 0 < Sine().quality(Sine().network(seed=0)) < 2
    True
    """

    def order(self, count: int, seed: int) -> torch.Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


class _Labelled(InTorch):
    """Inputs ``x`` and labels ``y`` as tensors."""

    def __init__(self) -> None:
        super().__init__()
        for key in ("train_x", "train_y", "test_x", "test_y"):
            setattr(self, key, torch.tensor(getattr(self, key)))


class Digits(_Labelled, digits.Digits):
    """The digits."""

    def network(self, seed: int) -> nn.Module:
        return network(seed)

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(self.train_x[share]), self.train_y[share])

    def quality(self, model: nn.Module) -> float:
        """The part of the test images that the model names correctly."""
        with torch.no_grad():
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


def network(seed: int) -> nn.Sequential:
    """A multilayer perceptron with two hidden layers.

    >>> sum(p.numel() for p in network(seed=0).parameters())
    301066
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


class CharacterModel(InTorch, charlm.CharacterModel):
    """The text, as tensors."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.train, self.test = torch.tensor(self.train), torch.tensor(self.test)

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return CharacterLSTM(len(self.characters))

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return _next_character(model, self.train[share])

    def quality(self, model: nn.Module) -> float:
        """The perplexity."""
        with torch.no_grad():
            return math.exp(min(float(_next_character(model, self.test)), WORST))


def _next_character(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class CharacterLSTM(nn.Module):
    """Embedding, one LSTM layer and a linear layer over the characters.

    >>> sum(p.numel() for p in CharacterLSTM(100).parameters())
    99044
    """

    def __init__(self, characters: int):
        super().__init__()
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Logits of the next character: (batch, length, characters)."""
        return self.output(self.lstm(self.embedding(codes))[0])


class CharacterGPT(CharacterModel, charlm.CharacterGPT):
    """The text, as tensors, and the GPT."""

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GPT(len(self.characters), self.width)

    def quality(self, model: nn.Module) -> float:
        """The mean cross-entropy."""
        with torch.no_grad():
            return float(_next_character(model, self.test))


class GPT(nn.Module):
    """Embeddings of characters and positions, two blocks, a norm and a linear layer over the characters.

    >>> sum(p.numel() for p in GPT(100, 48).parameters())
    69364
    """

    def __init__(self, characters: int, width: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(characters, width), nn.Embedding(GPT_WINDOW - 1, width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=charlm.SPREAD)
        looks: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, **looks) for _ in range(BLOCKS)]
        self.blocks, self.norm, self.output = nn.ModuleList(blocks), nn.LayerNorm(width), nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(GPT_WINDOW - 1), persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Logits of the next character: (batch, length, characters)."""
        x = self.embedding(codes) + self.positions.weight
        for block in self.blocks:
            x = block(x, self.mask, is_causal=True)
        return self.output(self.norm(x))


class Recommender(_Labelled, recommender.Recommender):
    """The clicks."""

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Scores()

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(model(self.train_x[share]), self.train_y[share])

    def quality(self, model: nn.Module) -> float:
        """The log loss."""
        with torch.no_grad():
            return float(binary_cross_entropy_with_logits(model(self.test_x), self.test_y))


class Scores(nn.Module):
    """Two embedding tables, and an MLP of both embeddings and their product.

    >>> sum(p.numel() for p in Scores().parameters())
    27201
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = (recommender.USERS, recommender.EMBEDDING), (recommender.ITEMS, recommender.EMBEDDING)
        self.users, self.items = (nn.Embedding(*size) for size in sizes)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=recommender.SPREAD)
        hidden = nn.Linear(3 * recommender.EMBEDDING, recommender.HIDDEN)
        self.mlp = nn.Sequential(hidden, nn.ReLU(), nn.Linear(recommender.HIDDEN, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Logits of clicks: (batch,)."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.mlp(torch.cat([user, item, user * item], 1)).squeeze(1)


class FrameworkTrainer(Trainer):
    """SGD or AdamW, over torch.distributed."""

    def __init__(self, task: Any, method: str, seed: int, lr: float, momentum: float, optimizer: str = "sgd"):
        self.task, self.model = task, task.network(seed)
        parameters = self.model.parameters()
        made: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=lr, momentum=momentum)
            if optimizer == "sgd"
            else torch.optim.AdamW(parameters, lr=lr, betas=(momentum, ADAMW_BETA2))
        )
        self.optimizer = grace.DistributedOptimizer(
            made, self.model.named_parameters(), seed=seed, **in_optimizer(method)
        )

    @staticmethod
    def join(threads: int) -> None:
        torch.set_num_threads(threads)
        grace.init("torch")

    @property
    def traffic(self) -> Traffic:
        return self.optimizer.traffic

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, share: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.model, share).backward()
        if self.task.clip is not None:
            self.optimizer.synchronize()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()

    def quality(self) -> float:
        return self.task.quality(self.model)
