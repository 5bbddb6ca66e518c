"""``strategy="auto"`` for a torch optimizer: the driver of its session, and the facts that the planner needs."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.driver import Driver

ADAPTIVE = ("betas", "alpha", "rho", "initial_accumulator_value")
"""Hyperparameters of adaptive optimizers."""


def driver_of(session: Any) -> "Driver":
    """Return the driver that plans for a session."""
    from grace.planner.driver import build_driver

    me = weakref.proxy(session)  # which holds the driver

    def switch(strategy: Strategy) -> None:
        me.switch(StrategyPlan(strategy, me.sparse_known))

    return build_driver(session.auto_request, session.runner, session.strategy, switch, is_adaptive(session.optimizer))


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer divides each element by its history: Adam, RMSprop, Adagrad, Adadelta and their like.

    >>> w = [torch.nn.Parameter(torch.zeros(1))]
    >>> is_adaptive(torch.optim.AdamW(w)), is_adaptive(torch.optim.SGD(w, lr=0.1, momentum=0.9))
    (True, False)
    """
    return any(key in group for group in optimizer.param_groups for key in ADAPTIVE)


def copies(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return copies of the dense gradients that there are."""
    given = {name: p.grad for name, p in parameters.items()}
    return {n: g.detach().clone() for n, g in given.items() if g is not None and g.layout is torch.strided}
