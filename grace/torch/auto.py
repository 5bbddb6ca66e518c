"""``strategy="auto"`` for a torch optimizer: what its planner is told of training, and how it changes the exchange."""

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from grace.planner.asked import Asked
from grace.planner.driver import Driver
from grace.planner.planning import Planning
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy


def driver_of(session: Any, asked: Asked) -> Driver:
    """What follows a session's steps.

    Args:
        session: the optimizer's.
        asked: what the user said of planning.
    """
    me = weakref.proxy(session)  # which holds the driver
    backend = session.runner.backend

    def switch(strategy: Strategy) -> None:
        me.switch(StrategyPlan(strategy, me.sparse_known))

    def say(line: str) -> None:
        if backend.rank == 0:
            print(line, file=sys.stderr, flush=True)

    names, variables = session.runner.node_names, session.runner.variables
    planning = Planning(asked, backend, names, variables, "torch", torch.get_num_threads())
    driver = Driver(planning, backend, session.strategy, switch, say, asked.options.replan)
    session.runner.planned = driver.document
    return driver


def copies(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of the dense gradients that there are."""
    given = {name: p.grad for name, p in parameters.items()}
    return {n: g.detach().clone() for n, g in given.items() if g is not None and g.layout is torch.strided}
