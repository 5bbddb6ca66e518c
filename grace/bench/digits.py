"""A small image task: scikit-learn's handwritten digits, and a network that is small but not tiny."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from grace.bench.task import Task

WIDTH, BATCH = 512, 64


class Digits(Task):
    """1,437 training and 360 test images of 8 x 8 pixels, scaled to [0, 1]; the same split in every run.

    One fifth of each digit's images is held out.
    """

    about = "scikit-learn's digits"
    metric, unit, scale = "accuracy", "%", 100.0
    lr, epochs = 0.1, 20

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        train_x, test_x, train_y, test_y = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
        self.train_x, self.test_x = (torch.tensor(part, dtype=torch.float32) for part in (train_x, test_x))
        self.train_y, self.test_y = torch.tensor(train_y), torch.tensor(test_y)

    def network(self, seed: int) -> nn.Module:
        return network(seed)

    def shares(self, ranks: int, rank: int, seed: int, epoch: int) -> list[torch.Tensor]:
        return shares(len(self.train_x), BATCH, ranks, rank, seed, epoch)

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(self.train_x[share]), self.train_y[share])

    def quality(self, model: nn.Module) -> float:
        """The part of the test images that the model names correctly."""
        with torch.no_grad():
            return float((model(self.test_x).argmax(1) == self.test_y).float().mean())


def network(seed: int) -> nn.Sequential:
    """A multilayer perceptron with two hidden layers of ``WIDTH`` units (301,066 parameters).

    >>> sum(p.numel() for p in network(seed=0).parameters())
    301066
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def shares(count: int, size: int, ranks: int, rank: int, seed: int, epoch: int) -> list[torch.Tensor]:
    """This rank's shares of an epoch's batches: the same order for every method, no example twice.

    A global batch holds ``size`` examples whatever the number of ranks; those that do not fill one are left out.

    >>> first, second = (shares(10, 4, 2, rank, seed=0, epoch=0) for rank in (0, 1))
    >>> len(first), len({int(i) for share in first + second for i in share})
    (2, 8)
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return [order[start : start + size][rank::ranks] for start in range(0, count - size + 1, size)]
