"""The demo's task: scikit-learn's handwritten digits, and a network that is small but not tiny."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

WIDTH = 512


class Digits(NamedTuple):
    """1,437 training and 360 test images of 8 x 8 pixels, the same split in every run."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def load() -> Digits:
    """The images, scaled to [0, 1]; one fifth of each digit's images is held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    return Digits(
        torch.tensor(train_x, dtype=torch.float32),
        torch.tensor(train_y),
        torch.tensor(test_x, dtype=torch.float32),
        torch.tensor(test_y),
    )


def network(seed: int) -> nn.Sequential:
    """A multilayer perceptron with two hidden layers of ``WIDTH`` units (301,066 parameters).

    >>> sum(p.numel() for p in network(seed=0).parameters())
    301066
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def batches(count: int, size: int, ranks: int, rank: int, seed: int, epoch: int) -> list[torch.Tensor]:
    """This rank's shares of an epoch's batches: the same order for every method, no image twice.

    A global batch holds ``size`` images whatever the number of ranks; images that do not fill one are left out.

    >>> first, second = (batches(10, 4, 2, rank, seed=0, epoch=0) for rank in (0, 1))
    >>> len(first), len({int(i) for share in first + second for i in share})
    (2, 8)
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return [order[start : start + size][rank::ranks] for start in range(0, count - size + 1, size)]


def accuracy(model: nn.Module, digits: Digits) -> float:
    """The part of the test images that the model names correctly."""
    with torch.no_grad():
        return float((model(digits.test_x).argmax(1) == digits.test_y).float().mean())
