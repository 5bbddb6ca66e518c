"""A checkpoint of a run that plans its strategy: the plan is gone on with, and memories are loaded under it."""

from collections.abc import Callable
from typing import Any

from grace.core.communicator import Communicator
from grace.planner.driver import Driver, Resumed
from grace.session import checkpoint
from grace.session.step_runner import StepRunner
from grace.session.switching import build_replacement
from grace.strategy.execution import StrategyPlan


def load(
    former: StepRunner,
    auto: Driver,
    saved: Any,
    memory: str,
    inside: Callable[[Any], Any],
    check: Callable[[Communicator], None],
) -> tuple[StepRunner, Resumed | None]:
    """The runner that goes on from what was saved: of the plan that it has, if it is for as many ranks; else the
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
