"""Helpers of the tests of executed strategies; they run in the rank processes."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import grace
from grace.core.registry import make
from grace.core.variable import Variable
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.strategy.builder import OneNode
from grace.strategy.predicted_bytes import bytes_by_rank
from grace.torch.parameters import find_sparse_parameters, make_variables
from tests.support.training import weights

BUILDERS = (
    "ps",
    "ps(destination=-1)",
    "ps_load_balancing(sorted=true)",
    "partitioned_ps(min_shard_bytes=0)",
    "uneven_partitioned_ps(min_shard_bytes=0)",
    "all_reduce(chunk_size=2)",
    "partitioned_all_reduce(min_shard_bytes=0, chunk_size=2)",
    "random_axis_partition_all_reduce(min_shard_bytes=0, seed=3)",
    "parallax",
    "uniform",
    "size_threshold(bytes=64, large=none)",
    "by_type(matrices=none)",
)
"""Every builder, uncompressed, with options that cut small variables; destination -1 is the last rank."""


def spec_for(builder: str, size: int) -> str:
    """A builder of the list above on so many ranks."""
    return builder.replace("destination=-1", f"destination={size - 1}")


class Mixed(torch.nn.Module):
    """A dense layer, a matrix with a prime number of rows, a scalar, an empty parameter and a sparse embedding."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(10, 6, sparse=True)
        self.prime = torch.nn.Parameter(torch.randn(13, 6) / 3)
        self.dense = torch.nn.Linear(13, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.words(words).sum(1) @ self.prime.t())
        return self.scale * self.dense(hidden) + self.empty.sum()


def mixed(seed: int = 0) -> Mixed:
    """The model with start values that depend on the seed alone."""
    torch.manual_seed(seed)
    return Mixed()


def variables_of(model: torch.nn.Module) -> list[Variable]:
    """The model's variables."""
    return make_variables(dict(model.named_parameters()), find_sparse_parameters(model))


def built_for(builder: Any, size: int, model: torch.nn.Module | None = None) -> Strategy:
    """The strategy of a builder for a model, the mixed one by default, on so many ranks."""
    return make("builder", builder).build(variables_of(mixed() if model is None else model), OneNode(size))


def mixed_loss(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """The loss on a rank's words of a step: some come twice, and ranks have different ones."""
    generator = torch.Generator().manual_seed(1000 * step + (grace.rank() if rank is None else rank))
    words = torch.randint(10, (3, 2), generator=generator)
    labels = torch.randint(4, (3,), generator=generator)
    return torch.nn.functional.cross_entropy(model(words), labels)


@contextlib.contextmanager
def uneven() -> Iterator[None]:
    """Say that the last rank is alone on its node: 2 + 1 of three."""
    before = dict(os.environ)
    os.environ["GRACE_NODE"] = "b" if 0 < grace.rank() == grace.size() - 1 else "a"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD without momentum."""
    return torch.optim.SGD(parameters, lr=lr)


def executed(
    model: torch.nn.Module, strategy: Any, optimizer: Callable[..., torch.optim.Optimizer] = sgd, **options: Any
) -> Any:
    """The model's optimizer with a strategy."""
    with uneven():
        return grace.DistributedOptimizer(optimizer(model.parameters()), model, strategy=strategy, **options)


def train(model: torch.nn.Module, optimizer: Any, steps: range, loss: Callable = mixed_loss) -> None:
    """Plain steps on this rank's data."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def on_the_mean(
    model: torch.nn.Module,
    size: int,
    steps: range,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    loss: Callable = mixed_loss,
) -> dict[str, torch.Tensor]:
    """Weights after one process trained on the mean of so many ranks' gradients, made dense, and added in float64."""
    made = optimizer(model.parameters())
    for step in steps:
        sums: dict[str, torch.Tensor] = {}
        for rank in range(size):
            model.zero_grad()
            loss(model, step, rank).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    dense = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    sums[name] = sums.get(name, 0) + dense.double()
        for name, p in model.named_parameters():
            p.grad = (sums[name] / size).to(p.dtype) if name in sums else None
        made.step()
    return weights(model)


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Both hold the same, but for rounding."""
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(np.asarray(got[name]), np.asarray(value), tolerance, tolerance, err_msg=name)


# -- models whose gradients are what a test says -----------------------------------------------------------


class Tables(torch.nn.Module):
    """Dense parameters and sparse embeddings, all zero, whose gradients are what a test says."""

    def __init__(self, dense: dict[str, tuple[int, ...]], sparse: dict[str, tuple[int, int]] | None = None):
        super().__init__()
        for name, shape in dense.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        for name, (n, width) in (sparse or {}).items():
            table = torch.nn.Embedding(n, width, sparse=True)
            torch.nn.init.zeros_(table.weight)
            self.add_module(name, table)

    def backward(self, given: dict[str, Any]) -> None:
        """Set gradients through autograd: an array for a parameter, (rows, values) for an embedding."""
        terms = []
        for name, value in given.items():
            if isinstance(value, tuple):
                rows, values = (torch.as_tensor(item) for item in value)
                terms.append((getattr(self, name)(rows) * values).sum())
            else:
                terms.append((getattr(self, name) * torch.as_tensor(value)).sum())
        if terms:
            sum(terms[1:], start=terms[0]).backward()


def whole(name: str, shape: Sequence[int], part: ShardPlan, sparse: bool = False) -> VariablePlan:
    """A variable that is not cut."""
    return VariablePlan(Variable(name, tuple(shape), sparse=sparse), (part,))


def cut(
    name: str, shape: Sequence[int], parts: Sequence[ShardPlan], axis: int, sizes: Sequence[int], sparse: bool = False
) -> VariablePlan:
    """A variable that is cut."""
    return VariablePlan(Variable(name, tuple(shape), sparse=sparse), tuple(parts), axis, tuple(sizes))


def reduced(destination: int, compressor: Any = "none", memory: Any = None, **more: Any) -> ShardPlan:
    """A part that a rank reduces."""
    return ShardPlan(Sync("reduce_broadcast", destination=destination, **more), compressor, memory)


def strategy_of(*plans: VariablePlan, size: int | None = None) -> Strategy:
    """Plans as a strategy for the ranks that there are."""
    return Strategy(plans, grace.size() if size is None else size)


def sent_by_rank(strategy: Strategy) -> list[float]:
    """Return the bytes that each rank is predicted to send in a step."""
    roots, other = bytes_by_rank(strategy)
    return [roots.get(rank, other) for rank in range(strategy.world_size)]
