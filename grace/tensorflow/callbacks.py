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
    """Replaces the loss and metrics of an epoch, and of an evaluation, by their means over ranks, each rank weighted by
    how many examples it had.

    So the mean of a loss or an accuracy is the one over all ranks' examples, also where shards of data are uneven. The
    examples are those that Keras's loss tracker counts; where a model of some rank has none (a ``train_step`` of its
    own), ranks count alike, as they do in Horovod's callback. A metric that is no mean over examples (``AUC``) is the
    mean of the ranks' values, not its value over all examples.

    Put it before callbacks that use them (early stopping, checkpoints), so that all ranks decide alike.

    Args:
        backend: the engine; that of ``grace.init()`` if left out.
    """

    trained: float | None = None
    tested: float | None = None
    """Examples of the epoch under way, if an evaluation has begun since, for which Keras counts anew, and of that."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras begins to count."""
        self.trained = None

    def on_test_begin(self, logs: Any = None) -> None:
        """Keras is about to begin to count anew."""
        self.trained = self._examples()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Average the epoch's metrics."""
        self._average(logs, self._examples() if self.trained is None else self.trained)

    def on_test_end(self, logs: Any = None) -> None:
        """Average an evaluation's metrics."""
        self.tested = self._examples()
        self._average(logs, self.tested)

    def _examples(self) -> float | None:
        """How many went into the loss; None if nobody counts them."""
        means = [metric for metric in self.model.metrics if isinstance(metric, keras.metrics.Mean)]
        return next((float(mean.count) for mean in means if mean.name == "loss"), None)

    def _average(self, logs: dict[str, Any] | None, examples: float | None) -> None:
        numbers = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        mine = {name: (value, self.tested if name.startswith("val_") else examples) for name, value in numbers.items()}
        everyone = self.ranks.allgather_object(mine)
        for name in numbers:
            found = [other[name] for other in everyone if name in other]
            counts = [count for _, count in found]
            total = 0.0 if None in counts else sum(counts)
            weights = [count / total for count in counts] if total else [1 / len(found)] * len(found)
            (logs or {})[name] = sum(
                weight * value for weight, (value, _) in zip(weights, found, strict=True) if weight
            )
