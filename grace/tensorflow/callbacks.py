"""Keras callbacks for training on several ranks."""

from numbers import Real
from typing import Any

import keras

from grace.backends.runtime import current
from grace.core.backend import Backend
from grace.core.given import keras_backend, keras_runs_on
from grace.tensorflow.distribute import refuse_distribute
from grace.tensorflow.variables import broadcast_as, broadcast_variables


class OnRanks(keras.callbacks.Callback):
    """What callbacks for several ranks have in common.

    Args:
        backend: the engine; that of ``grace.init()`` if left out.
    """

    def __init__(self, backend: Backend | None = None):
        super().__init__()
        self.backend = backend

    @property
    def ranks(self) -> Backend:
        """The engine."""
        return current() if self.backend is None else self.backend

    def set_model(self, model: Any) -> None:
        """Keras hands over the model, before anything else.

        Raises:
            ConfigError: it was made under a strategy of tf.distribute, or Keras does not run on TensorFlow.
        """
        if keras_backend() != "tensorflow":
            raise keras_runs_on(keras_backend())
        super().set_model(model)
        refuse_distribute(getattr(model, "distribute_strategy", None))


class BroadcastCallback(OnRanks):
    """Starts every rank from the root's weights, all of them (batch statistics too), and optimizer variables.

    So it is enough that the root restored a model. What compressors and memories remember stays each rank's own.

    Args:
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
    """

    def __init__(self, root: int = 0, backend: Backend | None = None):
        super().__init__(backend)
        self.root, self.unbuilt = root, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast, before the first batch.

        Raises:
            RankError: the ranks have other models or optimizers, or not all are built.
        """
        optimizer, trained = self.model.optimizer, self.model.trainable_variables
        if trained and not optimizer.built:  # a restored one is
            with keras.name_scope(optimizer.name):
                optimizer.build(trained)
        self.unbuilt = not self.model.built
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch what that has built."""
        if self.unbuilt:
            self.unbuilt = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer, backend = self.model.optimizer, self.ranks
        broadcast_variables(self.model.variables, self.root, backend)
        slots = [variable.path.split("/")[-1] for variable in optimizer.variables]  # without the optimizer's own name
        broadcast_as(slots, optimizer.variables, self.root, backend)


class MetricAverageCallback(OnRanks):
    """Replaces the loss and metrics of an epoch, and of an evaluation, by their means over ranks.

    Put it before callbacks that use them (early stopping, checkpoints), so that all ranks decide alike.

    Args:
        backend: the engine; that of ``grace.init()`` if left out.
    """

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the epoch's metrics."""
        self._average(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Average an evaluation's metrics."""
        self._average(logs)

    def _average(self, logs: dict[str, Any] | None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        everyone = self.ranks.allgather_object(numbers)
        for name in numbers:
            values = [other[name] for other in everyone if name in other]
            (logs or {})[name] = sum(values) / len(values)
