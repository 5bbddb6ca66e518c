"""Keras callbacks for training on several ranks."""

import contextlib
from numbers import Real

import keras

from grace.backends.runtime import backend_or_current
from grace.core.arguments import check_keras_backend
from grace.core.backend import Backend
from grace.errors import ConfigError
from grace.session.metrics import add_up
from grace.tensorflow.distribute import check_not_distribute
from grace.tensorflow.optimizer_state import accumulators, distributed_in, without_loss_scale
from grace.tensorflow.session import Session
from grace.tensorflow.variables import broadcast_named, broadcast_variables, names_of_slots

Logs = dict[str, float]
"""Numbers of a batch, epoch or evaluation by name, which Keras's callbacks read and change."""


class OnRanks(keras.callbacks.Callback):
    """Base class of callbacks for training on several ranks.

    Args:
        backend: the engine; that of ``grace.init()`` if left out.
    """

    def __init__(self, backend: Backend | None = None):
        super().__init__()
        self.backend = backend

    @property
    def ranks(self) -> Backend:
        """Engine of the ranks."""
        return backend_or_current(self.backend)

    def set_model(self, model: keras.Model) -> None:
        """Check the model that Keras hands over, before anything else.

        Raises:
            ConfigError: the model was made under a strategy of tf.distribute, or Keras does not run on TensorFlow.
        """
        check_keras_backend()
        super().set_model(model)
        check_not_distribute(getattr(model, "distribute_strategy", None))


class BroadcastCallback(OnRanks):
    """Callback that starts every rank from the root's weights (batch statistics too) and optimizer variables.

    So it is enough that the root restored a model. Layers that were adapted to data, or given a vocabulary, become the
    root's. The state of compressors and memories stays each rank's own, and so do gradients that ranks accumulate
    (``gradient_accumulation_steps``) if all have made as many steps.

    Args:
        root: the rank whose values count.
        backend: the engine; that of ``grace.init()`` if left out.
    """

    def __init__(self, root: int = 0, backend: Backend | None = None):
        super().__init__(backend)
        self.root = root
        self.unbuilt = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Broadcast the model and the optimizer, before the first batch.

        Raises:
            RankError: the ranks have other models or optimizers, or not all are built.
        """
        optimizer = self.model.optimizer
        trained = self.model.trainable_variables
        if trained and not optimizer.built:  # built on all ranks: a rank that restored its optimizer has built it
            with keras.name_scope(optimizer.name):
                optimizer.build(trained)
        self.unbuilt = not self.model.built
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Broadcast the variables that the first batch has built, after it."""
        if self.unbuilt:
            self.unbuilt = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer, backend = self.model.optimizer, self.ranks
        broadcast_variables(self.model, self.root, backend)
        # What ranks have accumulated up to one step are parts of a mean. A rank at another step, which did not restore
        # what the root did, takes the root's.
        steps = backend.allgather_object(int(without_loss_scale(optimizer)._iterations.numpy()))
        own = {id(variable) for variable in accumulators(optimizer)} if len(set(steps)) == 1 else set()
        variables = [variable for variable in optimizer.variables if id(variable) not in own]
        broadcast_named(names_of_slots(variables), variables, self.root, backend)


class MetricAverageCallback(OnRanks):
    """Callback that replaces the loss and metrics of an epoch, and of an evaluation, by their means over ranks, in the
    logs of callbacks behind it. What ``model.evaluate`` returns stays this rank's: Keras gives callbacks a copy.

    Each rank is weighted by the number of its examples. So the mean of a loss or an accuracy is the one over all ranks'
    examples, also where shards of data are uneven. The examples are those that Keras's loss tracker counts; where a
    model of some rank has none (a ``train_step`` of its own), ranks count alike, as they do in Horovod's callback. A
    metric that is no mean over examples (``AUC``) becomes the mean of the ranks' values, not its value over all
    examples.

    Put it before callbacks that use metrics (early stopping, checkpoints), so that all ranks decide alike.

    Args:
        backend: the engine; that of ``grace.init()`` if left out.
    """

    trained: float | None = None
    """Number of examples of the epoch under way, if an evaluation has begun since: Keras counts anew for that."""
    tested: float | None = None
    """Number of examples of the last evaluation."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forget the examples of the former epoch: Keras begins to count."""
        self.trained = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Note the epoch's examples so far: Keras is about to begin to count anew."""
        self.trained = self._examples()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the epoch's metrics."""
        self._average(logs, self._examples() if self.trained is None else self.trained)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Average an evaluation's metrics."""
        self.tested = self._examples()
        self._average(logs, self.tested)

    def _examples(self) -> float | None:
        """Return the number of examples that went into the loss; None if no metric counts them."""
        means = [metric for metric in self.model.metrics if isinstance(metric, keras.metrics.Mean)]
        return next((float(mean.count) for mean in means if mean.name == "loss"), None)

    def _average(self, logs: Logs | None, examples: float | None) -> None:
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


class TrafficCallback(keras.callbacks.Callback):
    """Callback that adds counts of an epoch's exchange to its logs, for callbacks behind it (History, CSVLogger,
    TensorBoard).

    The numbers are those of ``metrics()`` (:mod:`grace.session.metrics`), of this rank, under names that begin with
    ``grace_``: ``grace_bytes_sent``, ``grace_ratio``, ... No collective. Put it behind ``MetricAverageCallback``, which
    would average them over ranks.

    Args:
        source: an object with ``metrics()``, such as a :class:`~grace.tensorflow.GradientExchange`; the model's
            optimizer, or all distributed ones in it, if left out.

    Raises:
        ConfigError: the source has no ``metrics()``.
    """

    def __init__(self, source: "Session | keras.optimizers.Optimizer | None" = None):
        super().__init__()
        if source is not None and not hasattr(source, "metrics"):
            raise ConfigError(f"TrafficCallback takes what has metrics(), such as a GradientExchange, not {source!r}")
        self.source = source

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin to count.

        Raises:
            ConfigError: nothing is exchanged, or Keras does not run on TensorFlow.
        """
        check_keras_backend()
        if not self._sources():
            raise ConfigError(
                "TrafficCallback logs the traffic of a distributed optimizer, and the model's optimizer is none: "
                "compile the model with grace.DistributedOptimizer(...), or pass a GradientExchange: "
                "TrafficCallback(exchange)"
            )
        self._numbers()  # drops what was counted before

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch's numbers."""
        if logs is not None:
            logs.update({f"grace_{name}": value for name, value in self._numbers().items()})

    def _sources(self) -> "list[Session | keras.optimizers.Optimizer]":
        return distributed_in(self.model.optimizer) if self.source is None else [self.source]

    def _numbers(self) -> dict[str, float]:
        return add_up([source.metrics() for source in self._sources()])


class AnchorCallback(keras.callbacks.Callback):
    """Callback for outer rounds: the model has the variables that all ranks share while it is evaluated, and while the
    callbacks behind this one act at the end of an epoch; in between it has this rank's own.

    Put it before callbacks that save (``ModelCheckpoint``), stop or restore weights (``EarlyStopping``). At the end of
    training it runs a last round (``flush()``), after which all ranks have equal variables. Without outer rounds it
    changes nothing. Give it to all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._anchored = contextlib.ExitStack()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check the model's optimizer.

        Raises:
            ConfigError: nothing is exchanged.
        """
        if not distributed_in(self.model.optimizer):
            raise ConfigError(
                "AnchorCallback gives a model what the ranks of a distributed optimizer share, and the model's is not "
                "distributed: compile it with grace.DistributedOptimizer(..., outer=...). If the model has "
                "distributed optimizers as attributes, as a GAN has, call their anchor() and flush() instead"
            )

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Take the anchors before an evaluation."""
        self._enter()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Return to this rank's variables after an evaluation.

        Raises:
            ConfigError: another callback has changed the variables meanwhile.
        """
        self._leave()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Take the anchors, which later callbacks save."""
        self._enter()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Return to this rank's variables, which training goes on with.

        Raises:
            ConfigError: another callback has changed the variables meanwhile.
        """
        self._leave()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Run a last round."""
        self._anchored.close()
        for optimizer in distributed_in(self.model.optimizer):
            optimizer.flush()

    def _enter(self) -> None:
        for optimizer in distributed_in(self.model.optimizer):
            self._anchored.enter_context(optimizer.anchor())

    def _leave(self) -> None:
        with self._anchored:
            for optimizer in distributed_in(self.model.optimizer):
                optimizer._grace.check_anchors()
