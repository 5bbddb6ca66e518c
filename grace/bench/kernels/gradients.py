"""Tensors that compressors are measured on: two synthetic gradients, and one that training has computed.

Each is a matrix, because low-rank methods see matrices, and each rank has its own.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from grace.errors import ConfigError, require

DEGREES = 3
"""Degrees of freedom of the heavy-tailed gradient: the fewest with a variance, so that its norm means something."""
STEPS, BATCH = 16, 64
"""Training steps before a gradient is captured, and samples of each step and of each rank's gradient."""


def matrix(elements: int) -> tuple[int, int]:
    """Return the most nearly square (rows, columns) with at most so many elements and as many rows as fit.

    >>> matrix(25_000_000), matrix(4096), matrix(1000)
    ((5000, 5000), (64, 64), (31, 32))
    """
    rows = math.isqrt(elements)
    return rows, elements // rows


def gaussian(shape: tuple[int, int], ranks: int = 1) -> list[torch.Tensor]:
    """Return independent draws of N(0, 1), float32, on the CPU: one matrix per rank, the same in every run."""
    return [
        torch.from_numpy(np.random.default_rng([0, rank]).standard_normal(shape, np.float32)) for rank in range(ranks)
    ]


def heavy_tailed(shape: tuple[int, int], ranks: int = 1) -> list[torch.Tensor]:
    """Return independent draws of Student's t with 3 degrees of freedom, like :func:`gaussian`.

    Gradients of deep networks have tails heavier than a Gaussian's (Simsekli et al., ICML 2019, arXiv 1901.06053, who
    model them with infinite variance; Zhang et al., NeurIPS 2020, arXiv 1912.03194). Densities fall as |x|^-4 here: the
    fourth moment is infinite but the second is not, so errors relative to ||x||^2 do not hang on a single element.
    """
    draws = (np.random.default_rng([1, rank]).standard_t(DEGREES, shape) for rank in range(ranks))
    return [torch.from_numpy(draw.astype(np.float32)) for draw in draws]


def captured(shape: tuple[int, int], ranks: int = 1) -> list[torch.Tensor]:
    """Return gradients of a weight matrix of this shape, computed in training: nothing is tiled, cut or scaled.

    A multilayer perceptron, 64 -> columns -> rows -> 10 with ReLU, learns scikit-learn's digits by 16 steps of plain
    SGD (batch 64, learning rate 0.1, seed 0). Then each rank computes the gradient of the hidden columns -> rows matrix
    from 64 samples of its own, unseen before, at the same weights. Such gradients have small and large columns, exact
    zeros where a unit is off for all samples, a rank of at most 64, and a part that all ranks share. They stand for one
    small task. A ConfigError says for how many ranks there are samples.
    """
    require("sklearn", "bench", "scikit-learn")
    from grace.bench.workloads.torch_tasks import Digits

    task = Digits()
    if BATCH * (STEPS + ranks) > task.count:
        raise ConfigError(f"gradients are captured for at most {task.count // BATCH - STEPS} ranks, not {ranks}")
    rows, columns = shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, columns), nn.ReLU(), nn.Linear(columns, rows), nn.ReLU(), nn.Linear(rows, 10)
        )
    batches = task.order(task.count, seed=0).split(BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for batch in batches[:STEPS]:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    hidden = model.get_parameter("2.weight")
    own = batches[STEPS : STEPS + ranks]
    return [torch.autograd.grad(task.loss(model, batch), hidden)[0] for batch in own]


KINDS: dict[str, Callable[[tuple[int, int], int], list[torch.Tensor]]]
KINDS = {"gaussian": gaussian, "heavy-tailed": heavy_tailed, "captured": captured}
"""Functions that make each kind of gradient."""
