"""Tasks of the training benchmarks in torch, and their trainer."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import grace
from grace.bench.workloads import charlm, digits, recommender
from grace.bench.workloads.digits import CHANNELS, HIDDEN, WIDTH
from grace.bench.workloads.task import ADAMW_BETA2, ARRAYS, WORST, LabelledTask, Task, Trainer, in_optimizer
from grace.bench.workloads.torch_modules import GPT, LSTM
from grace.exchange.bucket import Traffic


class InTorch(Task):
    """Task in torch; a subclass adds ``count``, ``network``, ``loss`` and ``quality``, and the facts.

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


class _LabelledInTorch(InTorch, LabelledTask):
    """Task of arrays in torch."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        for key in ARRAYS:
            setattr(self, key, torch.tensor(getattr(self, key)))

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return _entropy(model(self.train_x[share]), self.train_y[share])

    def quality(self, model: nn.Module) -> float:
        """Return the task's metric on the test data."""
        with torch.no_grad():
            outputs = model(self.test_x)
            if self.metric == "accuracy":
                return float((outputs.argmax(1) == self.test_y).float().mean())
            loss = float(_entropy(outputs, self.test_y))
        return math.exp(min(loss, WORST)) if self.metric == "perplexity" else loss


def _entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits of classes, or of one logit where labels are 0.0 or 1.0."""
    if labels.is_floating_point():
        return binary_cross_entropy_with_logits(outputs, labels)
    return cross_entropy(outputs.flatten(0, -2), labels.flatten())


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Return a context in which the global generator begins with the seed; afterwards it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Digits(_LabelledInTorch, digits.Digits):
    """The digits, and a multilayer perceptron."""

    def network(self, seed: int) -> nn.Module:
        return network(seed)


def network(seed: int) -> nn.Sequential:
    """Return a multilayer perceptron with two hidden layers.

    >>> sum(p.numel() for p in network(seed=0).parameters())
    301066
    """
    with _seeded(seed):
        return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


class DigitsCNN(_LabelledInTorch, digits.DigitsCNN):
    """The digits, and a convolutional network.

    >>> sum(p.numel() for p in DigitsCNN().network(0).parameters())
    38282
    """

    def network(self, seed: int) -> nn.Module:
        first, second = CHANNELS
        with _seeded(seed):
            convolutions = (
                nn.Conv2d(1, first, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(first, second, 3, padding=1),
                nn.ReLU(),
            )
            hidden = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * second, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10)
            return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolutions, *hidden)


class CharacterModel(_LabelledInTorch, charlm.CharacterModel):
    """The text, and the LSTM."""

    def network(self, seed: int) -> nn.Module:
        with _seeded(seed):
            return LSTM(len(self.characters), charlm.EMBEDDING, charlm.HIDDEN)


class CharacterGPT(_LabelledInTorch, charlm.CharacterGPT):
    """The text, and the GPT."""

    def network(self, seed: int) -> nn.Module:
        with _seeded(seed):
            length = charlm.GPT_WINDOW - 1
            return GPT(len(self.characters), self.width, charlm.BLOCKS, charlm.HEADS, length, charlm.SPREAD)


class Recommender(_LabelledInTorch, recommender.Recommender):
    """The clicks, and the scores of pairs."""

    def network(self, seed: int) -> nn.Module:
        with _seeded(seed):
            return Scores()


class Scores(nn.Module):
    """Two embedding tables, and an MLP of both embeddings and their product.

    >>> sum(p.numel() for p in Scores().parameters())
    27201
    """

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(recommender.USERS, recommender.EMBEDDING)
        self.items = nn.Embedding(recommender.ITEMS, recommender.EMBEDDING)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=recommender.SPREAD)
        hidden = nn.Linear(3 * recommender.EMBEDDING, recommender.HIDDEN)
        self.mlp = nn.Sequential(hidden, nn.ReLU(), nn.Linear(recommender.HIDDEN, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return logits of clicks: (batch,)."""
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

    def flush(self) -> None:
        self.optimizer.flush()

    def quality(self) -> float:
        with self.optimizer.anchor():
            return self.task.quality(self.model)
