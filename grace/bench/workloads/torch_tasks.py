"""Tasks of ``grace bench train``, and their trainer."""

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import grace
from grace.bench.workloads.task import Task, in_optimizer
from grace.bench.workloads.torch_modules import GPT, LSTM
from grace.exchange.bucket import Traffic

ADAMW_BETA2 = 0.99
"""The second moments' decay, for runs of about a thousand steps; AdamW's first beta is the task's ``momentum``."""
WORST = 700.0
"""The largest mean loss whose exponential is shown: of a model that diverged it is large, but a number."""


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


class _Labelled(InTorch):
    """Task of arrays: what a model is given, and what it shall answer; its loss is a cross-entropy."""

    def set_arrays(self, train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> None:
        """Keep the arrays as tensors."""
        arrays = (train_x, train_y, test_x, test_y)
        self.train_x, self.train_y, self.test_x, self.test_y = (torch.tensor(array) for array in arrays)

    @property
    def count(self) -> int:
        return len(self.train_x)

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


# -- images ----------------------------------------------------------------------------------------------------------


class Digits(_Labelled):
    """1,437 training and 360 test images of 8 x 8 pixels in [0, 1]; a fifth of each digit's images is held out."""

    about = "scikit-learn's digits"
    metric, unit, scale = "accuracy", "%", 100.0
    target = 0.95
    lr, epochs, batch = 0.1, 20, 64

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        parts = train_test_split((x / 16).astype("float32"), y, test_size=0.2, random_state=0, stratify=y)
        train_x, test_x, train_y, test_y = parts
        self.set_arrays(train_x, train_y, test_x, test_y)

    def network(self, seed: int) -> nn.Module:
        """Return a multilayer perceptron with two hidden layers."""
        return network(seed)


def network(seed: int) -> nn.Sequential:
    """Return a multilayer perceptron with two hidden layers.

    >>> sum(p.numel() for p in network(seed=0).parameters())
    301066
    """
    with _seeded(seed):
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class DigitsCNN(Digits):
    """Convolutional network on the digits.

    Its quality is the mean cross-entropy in nats on the test images: 2.3 is chance.

    >>> sum(p.numel() for p in DigitsCNN().network(0).parameters())
    38282
    """

    about = "scikit-learn's digits, convolutional network"
    metric, unit, scale, higher_is_better = "loss", "", 1.0, False
    target = 0.1
    optimizer, lr, adamw_lr, warmup, quick_epochs = "adamw", 0.05, 5e-3, 0.1, 8

    def network(self, seed: int) -> nn.Module:
        with _seeded(seed):
            first = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
            second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
            return nn.Sequential(*first, *second, nn.Linear(16 * 32, 64), nn.ReLU(), nn.Linear(64, 10))


# -- text ------------------------------------------------------------------------------------------------------------

TEST = 20_000
"""Characters of held-out text."""
WINDOW, BLOCKS, UNIT = 64, 2, 16
"""Sizes of a GPT: characters that it sees, blocks, and the unit that divides its width."""


class CharacterModel(_Labelled):
    """The text is that of Python's ``help()`` topics (which differs a little between Python versions).

    It is cut into windows of 32 characters, each predicted from an empty state; the quality is the perplexity
    exp(mean cross-entropy in nats) on text that follows the training text.
    """

    about = "characters of Python's manual, LSTM"
    metric = "perplexity"
    higher_is_better = False
    target = 5.5
    quick_epochs = 4
    lr, epochs, clip, batch = 1.0, 16, 1.0, 32
    window, training = 32, 200_000

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))[: self.training + TEST]
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        codes = np.array([number[character] for character in text])
        train, test = windows(codes[: self.training], self.window), windows(codes[self.training :], self.window)
        self.set_arrays(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])

    def network(self, seed: int) -> nn.Module:
        """Return an embedding, one LSTM layer and a linear layer over the characters."""
        with _seeded(seed):
            return LSTM(len(self.characters), embedding=32, hidden=128)


class CharacterGPT(CharacterModel):
    """A GPT (Radford et al., 2018) of two blocks and about ``size`` parameters, whose quality is its mean cross-entropy
    in nats on held-out text.

    AdamW's rate rises in the first tenth of all steps; it is 6e-3 for a width of 48, the default's, and falls with the
    width's inverse.
    """

    about = "characters of Python's manual, GPT"
    metric = "loss"
    target = 1.5
    quick_epochs = 1
    optimizer, lr, adamw_lr, warmup, epochs, clip = "adamw", 1.0, 6e-3, 0.1, 4, 1.0
    window, training = WINDOW, 440_000
    sized = True

    def __init__(self, size: int = 70_000) -> None:
        super().__init__()
        self.width = width_of(size, len(self.characters))

    def rate(self, optimizer: str) -> float:
        return super().rate(optimizer) * (48 / self.width if optimizer == "adamw" else 1)

    def network(self, seed: int) -> nn.Module:
        with _seeded(seed):
            return GPT(len(self.characters), self.width, BLOCKS, heads=4, length=WINDOW - 1, spread=0.02)


def width_of(size: int, characters: int) -> int:
    """Return the width of the GPT that has about so many parameters.

    >>> [width_of(size, 100) for size in (1, 70_000, 1_000_000)]
    [16, 48, 192]
    """
    # a block has 12 width^2 and 13 width; embeddings, positions, the last norm and the output the rest
    square, linear = 12 * BLOCKS, 13 * BLOCKS + 2 * characters + WINDOW + 2
    width = (math.sqrt(linear**2 + 4 * square * size) - linear) / (2 * square)
    return max(1, round(width / UNIT)) * UNIT


def windows(codes: np.ndarray, size: int) -> np.ndarray:
    """Return the characters in rows of ``size``; a last row that is not full is left out."""
    return codes[: len(codes) // size * size].reshape(-1, size)


# -- clicks ----------------------------------------------------------------------------------------------------------

USERS, ITEMS, SEEN = 1000, 500, 200_000
"""Users, items, and clicks, or their absence, that are trained on; 10,000 more are held out."""


class Recommender(_Labelled):
    """Clicks drawn with p = sigmoid(2.25 / sqrt(2) <u, v> + b), u of 1,000 users, v and b of 500 items, all Gaussian.

    Few items are seen often (Zipf's law with exponent 0.8). The MLP gets both embeddings and their product; gradients
    of tables are dense, since a batch touches about half of the rows. The quality is the mean log loss in nats on
    held-out pairs: .693 is chance, and .441 that of p itself.
    """

    about = "made-up clicks, two embeddings and an MLP"
    metric = "log loss"
    higher_is_better = False
    target = 0.5
    optimizer, lr, adamw_lr, warmup = "adamw", 3.0, 1e-2, 0.1
    epochs, quick_epochs, batch = 4, 2, 512

    def __init__(self) -> None:
        random, count = np.random.default_rng(0), SEEN + 10_000
        of_users, of_items = random.normal(size=(USERS, 2)), random.normal(size=(ITEMS, 2))
        bias = random.normal(size=ITEMS)
        seen = 1 / np.arange(1, ITEMS + 1) ** 0.8
        users, items = random.integers(USERS, size=count), random.choice(ITEMS, count, p=seen / seen.sum())
        logits = 2.25 / 2**0.5 * (of_users[users] * of_items[items]).sum(1) + bias[items]
        clicks = (random.random(count) < 1 / (1 + np.exp(-logits))).astype("float32")
        pairs = np.stack([users, items], 1)
        self.set_arrays(pairs[:SEEN], clicks[:SEEN], pairs[SEEN:], clicks[SEEN:])

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
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(3 * 16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return logits of clicks: (batch,)."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.mlp(torch.cat([user, item, user * item], 1)).squeeze(1)


# -- training --------------------------------------------------------------------------------------------------------


class Trainer:
    """Training run of a task with one method: the model, its distributed optimizer (SGD or AdamW), and a step.

    The seed is that of weights, order and method; the momentum is AdamW's first beta, too.
    """

    def __init__(self, task: Task, method: str, seed: int, lr: float, momentum: float, optimizer: str = "sgd"):
        self.task, self.model = task, task.network(seed)
        parameters = self.model.parameters()
        made: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=lr, momentum=momentum)
            if optimizer == "sgd"
            else torch.optim.AdamW(parameters, lr=lr, betas=(momentum, ADAMW_BETA2))
        )
        self.optimizer = grace.DistributedOptimizer(made, self.model, seed=seed, **in_optimizer(method))

    @property
    def traffic(self) -> Traffic:
        """Counts of all exchanges so far."""
        return self.optimizer.traffic

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of later steps."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, share: torch.Tensor) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        self.task.loss(self.model, share).backward()
        if self.task.clip is not None:
            self.optimizer.synchronize()  # the norm is that of the mean, as in training on one rank
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()

    def quality(self) -> float:
        """Return the task's quality of the parameters that all ranks share."""
        with self.optimizer.anchor():
            return float(self.task.quality(self.model))  # a 0-d tensor is no JSON
