"""Refusal of tf.distribute's strategies, which exchange gradients in their own way."""

import re

import tensorflow as tf

from grace.errors import ConfigError

PUBLIC = {"CollectiveAllReduceStrategy": "MultiWorkerMirroredStrategy"}
"""Public name of a class whose own name differs."""
REASONS = {
    "MirroredStrategy": "averages gradients over the devices of one process itself, uncompressed",
    "MultiWorkerMirroredStrategy": "averages gradients over its workers itself, uncompressed",
    "ParameterServerStrategy": "lets each worker step at its own pace, where an exchange needs all ranks in each step",
    "TPUStrategy": "compiles steps by XLA, which cannot compile an exchange",
    "OneDeviceStrategy": "runs steps in a context of its own; tf.device places a model too",
}


def distribute_error(name: str) -> ConfigError:
    """Return the error for a strategy's class.

    >>> print(str(distribute_error("TPUStrategyV2"))[:92])
    Grace does not go under tf.distribute's TPUStrategy, which compiles steps by XLA, which cann
    >>> "step at its own pace" in str(distribute_error("ParameterServerStrategyV2"))
    True
    """
    name = re.sub(r"V\d$", "", name)
    name = PUBLIC.get(name, name)
    reason = REASONS.get(name, "places variables and adds up gradients itself")
    return ConfigError(
        f"Grace does not go under tf.distribute's {name}, which {reason}. Grace's ranks are processes, one for a "
        "device, each with its own model: leave the strategy and its scope out, and start ranks by horovodrun or mpirun"
    )


def check_not_distribute(*made: "tf.distribute.Strategy | None") -> None:
    """Raise under a strategy's scope, or for models and optimizers that were made under one.

    Args:
        made: the strategies that models and optimizers were made under, as Keras keeps them.

    Raises:
        ConfigError: a strategy was found; the message names it.
    """
    found = [tf.distribute.get_strategy()] if tf.distribute.has_strategy() else []
    for strategy in [*found, *made]:
        if isinstance(strategy, tf.distribute.Strategy) and type(strategy).__name__ != "_DefaultDistributionStrategy":
            raise distribute_error(type(strategy).__name__)


def strategy_of(variable: "tf.Variable | tf.Tensor") -> "tf.distribute.Strategy | None":
    """Return the strategy that a variable was made under, if the strategy has copied it to its devices; else None."""
    return variable.distribute_strategy if isinstance(variable, tf.distribute.DistributedValues) else None
