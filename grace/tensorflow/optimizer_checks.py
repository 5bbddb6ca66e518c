"""Checks of optimizers that cannot be distributed as they are, with the reasons."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from grace.core.communicator import Communicator
from grace.errors import ConfigError
from grace.session.hyperparameters import double_momentum_error, momentum_owners

LEAVE_OUT = "leave it out"
HOROVODS = {
    "average_aggregated_gradients": f"{LEAVE_OUT}, Keras averages the gradients that it accumulates",
    "backward_passes_per_step": "give Keras's optimizer gradient_accumulation_steps=N, or leave it out if it is 1",
    "device_dense": LEAVE_OUT,
    "device_sparse": LEAVE_OUT,
    "groups": "bucket_bytes= or group_bytes= bound what travels together",
    "name": LEAVE_OUT,
    "num_groups": "bucket_bytes= or group_bytes= bound what travels together",
    "use_locking": LEAVE_OUT,
}
"""Arguments of Horovod's DistributedOptimizer for Keras that Grace's does not take, with what to write instead."""


OPTIMIZERS = ("outer", "period")
"""Arguments of the distributed optimizer that a tape's exchange cannot have."""


def check_arguments(options: Iterable[str], function: str = "DistributedOptimizer") -> None:
    """Raise for arguments that the distributed optimizer, or the exchange of a tape, does not take.

    Raises:
        ConfigError: the first one is Horovod's, or the optimizer's.
        TypeError: it is not known.
    """
    for name in options:
        if name in HOROVODS:
            raise ConfigError(f"{name}= is Horovod's, and for Keras Grace has none: {HOROVODS[name]}")
        if name in OPTIMIZERS:
            raise ConfigError(
                f"{name}= is for grace.DistributedOptimizer(optimizer, ..., outer=..., period=...): outer rounds come "
                "after the optimizer's step, which a tape does not know"
            )
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def check_tape(tape: object) -> None:
    """Refuse an object that is no GradientTape, which would become one.

    Raises:
        ConfigError: the object is another one; the message says what to write instead.
    """
    if isinstance(tape, tf.GradientTape):
        return
    hint = ""
    if tape is tf.GradientTape:
        hint = ": make a tape of it, tf.GradientTape()"
    elif isinstance(tape, keras.optimizers.Optimizer):
        hint = ": an optimizer is for grace.DistributedOptimizer"
    raise ConfigError(f"grace.tensorflow.DistributedGradientTape takes a tf.GradientTape, not {tape!r}{hint}")


def check_not_multi_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise for Keras's MultiOptimizer, which only passes gradients to the optimizers in it.

    Raises:
        ConfigError: the optimizer is a MultiOptimizer.
    """
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # older Keras has none
    if kind is not None and isinstance(optimizer, kind):
        raise ConfigError(
            f"{type(optimizer).__name__} hands all gradients to the optimizers in it. Make each of these distributed "
            "instead: MultiOptimizer(OptimizerMap(grace.DistributedOptimizer(SGD(0.1), ...), "
            '{".*kernel": grace.DistributedOptimizer(Adam(0.01), ...)}))'
        )


def bypass_error(optimizer: keras.optimizers.Optimizer, method: str) -> ConfigError:
    """Return the error for a class whose method updates variables without passing the place where gradients are
    exchanged."""
    name = type(optimizer).__name__
    inner = [key for key, value in vars(optimizer).items() if isinstance(value, keras.optimizers.Optimizer)]
    to = f"its {inner[0]}" if inner else "another optimizer"
    return ConfigError(
        f"{name}.{method}() hands gradients to {to}, or applies them itself, so they were not exchanged, and each rank "
        f"has updated variables by its own gradients. Make the optimizer inside distributed, {name}("
        f"grace.DistributedOptimizer(optimizer, ...)), or let {name}.{method}() call super().{method}()"
    )


def given_twice(optimizer: keras.optimizers.Optimizer, variable: "keras.Variable | tf.Variable") -> ConfigError:
    """Return the error for a variable that has two gradients in one step, of which one would be lost."""
    name = getattr(variable, "path", None) or variable.name
    return ConfigError(
        f"{type(optimizer).__name__}.apply() got two gradients of the variable {name!r}: add them up first, or apply "
        "them in two steps"
    )


def delayed_variables_left_out(optimizer: keras.optimizers.Optimizer) -> ConfigError:
    """Return the error for a class whose ``apply`` applies some gradients only, where means come a step later."""
    name = type(optimizer).__name__
    return ConfigError(
        f"{name}.apply() calls super().apply() with some of the variables only, and means that are applied in a later "
        "step (staleness) would be lost for the others: call it once, with all of them, or choose a strategy without "
        "staleness"
    )


def check_momentum(
    communicators: Iterable[Communicator], optimizer: keras.optimizers.Optimizer, later: bool = False
) -> None:
    """Refuse a memory or compressor that applies momentum, for an optimizer that does so too.

    Raises:
        ConfigError: momentum would be applied twice.
    """
    setting = "momentum" if hasattr(optimizer, "momentum") else "beta_1"
    momentum = getattr(optimizer, setting, 0.0)
    parts = momentum_owners(communicators)
    if parts and momentum:
        raise double_momentum_error(parts[0], "the optimizer", setting, momentum, " now" if later else "")
