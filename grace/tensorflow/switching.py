"""Change of the strategy in the middle of training, in TensorFlow."""

from typing import Any

import tensorflow as tf

from grace.core.compressor import Tensor
from grace.errors import ConfigError, ExchangeError
from grace.session.exchange_plan import ExchangePlan
from grace.session.step_runner import StepRunner
from grace.session.switching import switch_plan
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg, StrategyPlan
from grace.strategy.resources import ResourcesArg
from grace.tensorflow.representation import inside, medium_of
from grace.tensorflow.session import Session


def switch(session: Session, plan: ExchangePlan) -> None:
    """Continue with another plan. Every rank must call it between two steps. See :func:`switch_plan`, which may raise.

    The values in memories are converted where the former runner computes with tensors and the new one with arrays, or
    the other way round.
    """
    former = session.runner
    assert former is not None
    variables = {variable.name: variable for variable in former.variables}

    def like(name: str) -> Tensor:
        return session.inside(tf.zeros(variables[name].shape, "float32"))

    def convert(made: StepRunner, value: Any) -> Any:
        return inside(medium_of(made), value)

    with session.medium.computing():
        made = switch_plan(former, plan, like, session.check, session.check_plan, convert)
        session.use_runner(made, plan)


def use_strategy(session: Session, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
    """Implement :meth:`grace.tensorflow.optimizer.DistributedMixin.use_strategy`."""
    if not tf.executing_eagerly():
        raise ConfigError("use_strategy is called between two steps: call it outside of tf.function")
    session.check_open()
    if strategy is None:
        raise ConfigError("use_strategy needs a strategy: a file's path, a Strategy, or a builder or its spec")
    if session.runner is None:
        session.choices = Choices(strategy=strategy, resources=resources)
        return
    if session.runner.in_progress:  # in a step that failed: its state is dropped, as it never updated a variable
        session.runner.abandon()
    session.flush()
    switch(session, StrategyPlan(strategy, resources=resources))
    if session.auto is not None:
        session.auto.stop()
        session.auto_request = None


def check_current(session: Session, runner: StepRunner) -> None:
    """Refuse a graph that was traced for another runner than the one that the session uses now.

    Raises:
        ExchangeError: the graph was traced for a former runner.
    """
    if runner is not session.runner:
        raise ExchangeError(
            "the strategy was changed, and this graph was traced before: it would exchange by the former one. Call "
            "model.make_train_function(force=True) after use_strategy, or make your tf.function anew"
        )
