"""Models, data and training loops that the tests of several ranks share; they run in the rank processes."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

import grace
from grace.communicators.choice import build_communicator
from grace.core.registry import make
from grace.session.hyperparameters import momentum_owners
from tests.support.methods import BUILTIN

METHODS = (
    "none",
    "fp16",
    "bf16",
    "qsgd",
    "qsgd(levels=7, norm=l2)",
    "topk(ratio=0.1)",
    "randomk(ratio=0.1)",
    "signsgd",
    "efsignsgd",
    "powersgd(rank=2)",
)
KINDS = ("none", "bf16", "qsgd", "topk(ratio=0.1)", "signsgd", "powersgd(rank=2)", "threshold(value=0.001)")
"""A method of each kind of exchange."""
SPECS = (
    *(*METHODS, "threshold(value=0.001)", "dgc(ratio=0.1)", "adaptive(ratio=0.1)"),
    *("topk(ratio=0.1) | qsgd(levels=7)", "topk(ratio=0.05, chunk=64)"),
)
SPECS += tuple(name for name in BUILTIN if name not in {make("compressor", spec).name for spec in SPECS})
"""One of every method."""


class Net(torch.nn.Module):
    """A convolution, two linear layers and a 0-d scale: tensors that are compressed, and some too small to be."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.hidden = torch.nn.Linear(4 * 6 * 6, 20)
        self.head = torch.nn.Linear(20, 10)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        return self.scale * self.head(torch.relu(self.hidden(x)))


class Branches(torch.nn.Module):
    """A layer that all ranks use, ``extra``, which one rank uses, and ``idle``, which nobody uses."""

    def __init__(self, user: int):
        super().__init__()
        self.shared, self.extra, self.idle = (torch.nn.Linear(8, 8) for _ in range(3))
        self.user = user

    def forward(self, x):
        x = self.shared(x)
        return self.extra(x) if grace.rank() == self.user else x


def net(seed: int = 0, make: Callable[[], torch.nn.Module] = Net) -> torch.nn.Module:
    """A model whose start values depend on the seed alone."""
    torch.manual_seed(seed)
    return make()


def batch(step: int, rank: int | None = None, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + (grace.rank() if rank is None else rank))
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)


def loss_of(model: torch.nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    """The loss on a rank's data of a step."""
    images, labels = batch(step, rank)
    return torch.nn.functional.cross_entropy(model(images), labels)


def momentum_for(spec: str) -> float:
    """An optimizer's, beside a method that may apply momentum itself."""
    return 0.0 if momentum_owners([build_communicator(spec, None, None)]) else 0.9


def sgd(parameters: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def adam(parameters: Any, lr: float = 0.01) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=lr)


OPTIMIZERS = {"sgd": sgd, "adam": adam}


def distributed(model: torch.nn.Module, compressor: Any = None, *, optimizer: Callable = sgd, **choices: Any) -> Any:
    """The model's optimizer, made distributed."""
    return grace.DistributedOptimizer(
        optimizer(model.parameters()), model.named_parameters(), compressor=compressor, **choices
    )


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    """Plain steps on this rank's data."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def with_closure(how: str) -> tuple[np.ndarray, str]:
    """Losses and a hash of the weights after steps whose closure is given by keyword or position, or called itself."""
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)")
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if how == "keyword":
            losses.append(optimizer.step(closure=closure).item())
        elif how == "position":
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
    return np.array(losses), digest(weights(model))


def ddp(model: torch.nn.Module, **options: Any) -> torch.nn.parallel.DistributedDataParallel:
    """The model under DDP, on CPU."""
    return torch.nn.parallel.DistributedDataParallel(model, **options)


def joined(communicator: Any) -> Any:
    """The same, bound as in a run, for calls by hand."""
    communicator.bind(grace.Context(rank=grace.rank(), size=grace.size()), grace.init())
    communicator.lr = 1.0
    return communicator


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def state_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Copies of what the compressor and the memory remember."""
    return copied(optimizer._grace.runner.state())


def used(model: torch.nn.Module, optimizer: Any) -> None:
    """Let a step use the means, as zeros, so that what they change in memories counts and no weight is spoilt."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    optimizer.step()


def copied(value: Any) -> Any:
    """A deep copy of nested dicts of tensors and numbers."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def digest(value: Any) -> str:
    """A hash of the exact bits of nested dicts, lists, tensors and numbers."""
    hashed = hashlib.sha256()
    _feed(hashed, value)
    return hashed.hexdigest()


def _feed(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            hashed.update(f"{key}:".encode())
            _feed(hashed, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(hashed, item)
    elif isinstance(value, torch.Tensor):
        hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
        if value.numel():
            hashed.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        hashed.update(repr(value).encode())


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if two dicts of tensors are equal bit for bit."""
    return digest(first) == digest(second)


class Given(torch.nn.Module):
    """Parameters whose gradients are what a test says."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        """Return a loss whose gradients are these."""
        parameters = dict(self.named_parameters())
        terms = [
            (parameters[name] * torch.as_tensor(g, dtype=parameters[name].dtype)).sum() for name, g in given.items()
        ]
        return sum(terms[1:], start=terms[0])

    def backward(self, given: dict[str, Any]) -> None:
        """Set the gradients of the parameters that are named, through autograd."""
        self(given).backward()


def means(model: Given, optimizer: Any, numbers: Iterable[int]) -> list[dict[str, torch.Tensor]]:
    """Return the means of steps on gradients that are made up."""
    shapes, found = {name: tuple(p.shape) for name, p in model.named_parameters()}, []
    for step in numbers:
        optimizer.zero_grad()
        model.backward(made_up(shapes, step, grace.rank()))
        optimizer.step()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def plain_sgd(parameters: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD without momentum, which methods that apply it themselves want."""
    return torch.optim.SGD(parameters, lr=lr)


def made_up(shapes: dict[str, tuple[int, ...]], step: int, rank: int) -> dict[str, np.ndarray]:
    """Gradients that any process can make up for any rank."""
    generator = np.random.default_rng((step, rank))
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def train_given(model: torch.nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """Plain steps of a model of :class:`Given` on gradients that are made up for this rank."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for step in steps:
        optimizer.zero_grad()
        model.backward(made_up(shapes, step, grace.rank()))
        optimizer.step()


def refusal(call: Callable[..., Any], *args: Any, kind: type[Exception] = grace.ConfigError, **options: Any) -> str:
    """Return the message of the error that a call must raise."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)
