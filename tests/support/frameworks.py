"""Helpers of the tests of frameworks around torch; they run in the rank processes."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import grace
from tests.support.training import digest

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "1",
}


@contextlib.contextmanager
def torchrun() -> Iterator[None]:
    """Set the environment that torchrun would give this rank."""
    before, rank, size = dict(os.environ), str(grace.rank()), str(grace.size())
    os.environ.update(OFFLINE, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="none", ACCELERATE_USE_CPU="true")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


OUTER = {"compressor": "topk(ratio=0.1)", "outer": "nesterov(lr=0.7, momentum=0.6)", "period": 3}
"""Choices by which ranks train alone for three steps."""


class Recorded:
    """Gradients of an optimizer's steps, as they were after clipping, and weights of the model in evaluations."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.gradients: list[list[torch.Tensor]] = []
        self.rates: list[float] = []
        self.evaluated: dict[int, str] = {}
        optimizer.register_step_post_hook(self.step)
        model.register_forward_pre_hook(self.forward)

    def step(self, optimizer: torch.optim.Optimizer, *ignored: Any) -> None:
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])
        self.rates.append(optimizer.param_groups[0]["lr"])

    def forward(self, *ignored: Any) -> None:
        if not self.model.training:
            self.evaluated[len(self.gradients)] = bits(self.model)

    def by_hand(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **choices: Any) -> str:
        """Make the same steps by hand on another model, whose anchors evaluations see; return the bits of its last
        weights."""
        run = grace.DistributedOptimizer(optimizer, model, **choices)
        assert self.evaluated
        for step, gradients in enumerate(self.gradients, 1):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient
            run.param_groups[0]["lr"] = self.rates[step - 1]
            run.step()
            if step in self.evaluated:
                with run.anchor():
                    assert bits(model) == self.evaluated[step]
        run.flush()
        return bits(model)


def bits(model: torch.nn.Module) -> str:
    """A hash of the parameters."""
    return digest([p.detach() for p in model.parameters()])


def kept(state: Any) -> dict[str, str]:
    """Digests of what the state of a hook, or a distributed optimizer, remembers, by kind and variable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is this rank's alone
        alone = hasattr(state, "_grace")
        saved = state._grace.runner.state() if alone else state.state_dict()["state"]
    return {f"{kind} {name}": digest(v) for kind, values in saved.items() for name, v in values.items()}


def check_refused(misuses: dict[Callable[[], None], list[str]]) -> None:
    """Each raises an error of Grace's that has these words."""
    for misuse, words in misuses.items():
        with pytest.raises(grace.GraceError) as caught:
            misuse()
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
