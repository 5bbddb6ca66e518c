"""Copies of objects that exchange gradients: a copy, or what is loaded from a pickle, exchanges nothing by itself."""

from collections import OrderedDict
from typing import NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from grace.errors import ConfigError


class InertState:
    """Stand-in for a hook's state in a copied model, which has no hook: torch does not copy hooks with a model.

    >>> InertState().traffic
    Traceback (most recent call last):
    AttributeError: the copy of a hook's state has no 'traffic': it exchanges nothing. Register a hook for the copy...
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the copy of a hook's state has no {name!r}: it exchanges nothing. Register a hook for the copy of "
            "the model, which then has a state of its own"
        )


class InertCopies:
    """Base of hooks' states, whose copies and pickles are inert: a copied model has no hook."""

    def __reduce__(self) -> tuple[type[InertState], tuple[()]]:
        return InertState, ()


def plain_copy(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return an optimizer without settings and state, which a copy of a distributed one is made of. It refuses to step
    until it is made distributed, because it would train this rank's model alone."""
    optimizer = kind.__new__(kind)
    hooks: OrderedDict[int, object] = OrderedDict()
    hooks[RemovableHandle(hooks).id] = raise_in_step
    vars(optimizer)["_optimizer_step_pre_hooks"] = hooks
    return optimizer


def raise_in_step(optimizer: torch.optim.Optimizer, *ignored: object) -> NoReturn:
    """Refuse a step of a copied optimizer. This is a hook of its steps."""
    raise ConfigError(
        f"this {type(optimizer).__name__} is a copy of a distributed optimizer, and exchanges nothing: make it "
        "distributed, grace.DistributedOptimizer(optimizer, ...), or load its state_dict() into a new one to train "
        "alone"
    )


def allow_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let a copied optimizer step again, since it becomes distributed."""
    hooks = optimizer._optimizer_step_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is raise_in_step]:
        del hooks[number]
