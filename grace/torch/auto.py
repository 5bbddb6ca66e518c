"""``strategy="auto"`` for a torch optimizer: the driver of its session, and the facts that the planner needs."""

import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.auto_request import AutoRequest
    from grace.planner.driver import Driver

ADAPTIVE = ("betas", "alpha", "rho", "initial_accumulator_value")
"""Hyperparameters of adaptive optimizers."""


def requested(choices: Choices) -> "AutoRequest | None":
    """Return the request for ``strategy="auto"``; None if the user chose something else.

    Raises:
        ConfigError: it has a parameter that is none, or one of a wrong value.
    """
    if not choices.asks_for_auto:
        return None
    from grace.planner.auto_request import auto_request

    return auto_request(choices)


def driver_of(session: Any, request: "AutoRequest") -> "Driver":
    """Return what follows a session's steps.

    Args:
        session: the optimizer's.
        request: the user's.
    """
    from grace.planner.driver import Driver
    from grace.planner.planning import Planning

    me = weakref.proxy(session)  # which holds the driver
    backend = session.runner.backend

    def switch(strategy: Strategy) -> None:
        me.switch(StrategyPlan(strategy, me.sparse_known))

    def say(line: str) -> None:
        if backend.rank == 0:
            print(line, file=sys.stderr, flush=True)

    names, variables = session.runner.node_names, session.runner.variables
    threads, adaptive = torch.get_num_threads(), is_adaptive(session.optimizer)
    planning = Planning(request, backend, names, variables, "torch", threads, adaptive)
    driver = Driver(planning, backend, session.strategy, switch, say, request.options.replan)
    session.runner.planned = driver.document
    return driver


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
