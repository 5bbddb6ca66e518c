"""Planning for a session: its driver, and its checkpoints, which hold the plan."""

import sys
from collections.abc import Callable
from typing import Any

from grace.core.communicator import Communicator
from grace.planner import planning
from grace.planner.driver import Driver, Resumed
from grace.session import checkpoint
from grace.session.step_runner import StepRunner
from grace.session.switching import build_replacement
from grace.strategy.choices import AutoRequest
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy


def build_driver(
    request: AutoRequest,
    runner: StepRunner,
    start: Strategy,
    switch: Callable[[Strategy], None],
    framework: str,
    threads: int,
    adaptive: bool,
) -> Driver:
    """Return the driver that plans for a session, and have the session's checkpoints hold its state.

    Args:
        request: what the user said.
        runner: the session's first one.
        start: the strategy that it runs.
        switch: goes on by another strategy; it must not keep the session alive.
        framework, threads, adaptive: as :class:`grace.planner.planning.Planning` takes them.
    """
    backend = runner.backend

    def say(line: str) -> None:
        if backend.rank == 0:
            print(line, file=sys.stderr, flush=True)

    planner = planning.Planning(request, backend, runner.node_names, runner.variables, framework, threads, adaptive)
    driver = Driver(planner, backend, start, switch, say, request.options.replan)
    runner.planned = driver.document
    return driver


def load(
    former: StepRunner,
    auto: Driver,
    saved: Any,
    memory: str,
    inside: Callable[[Any], Any],
    check: Callable[[Communicator], None],
) -> tuple[StepRunner, Resumed | None]:
    """Return the runner that goes on from what was saved: of the plan that it has, if it is for as many ranks; else the
    former one, with the memories that fit. Every rank must call it; nothing changes if some rank refuses.

    Args:
        former: of this run.
        auto: what follows its steps.
        saved, memory, inside: as :func:`grace.session.checkpoint.load` takes them.
        check: raises if a communicator does not suit the run.

    Raises:
        ConfigError, ExchangeError, RankError: as that does.
    """
    checkpoint.compare(former.backend, saved, memory)
    resumed = auto.found(saved)
    if resumed is None:
        checkpoint.load(former, lambda: saved, "keep" if memory == "strict" else memory, inside)
        return former, None
    runner = build_replacement(former, StrategyPlan(resumed.strategy), check)
    try:
        checkpoint.load(runner, lambda: saved, memory, inside)
    except BaseException:
        runner.close()
        raise
    return runner, resumed
