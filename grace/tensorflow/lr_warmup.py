"""Warm-up of the learning rate over the first epochs, where many ranks make a large one."""

from collections.abc import Sequence
from numbers import Real

import keras

from grace.core.backend import Backend
from grace.errors import ConfigError, RankError
from grace.session.agreement import first_difference, gather_or_raise
from grace.tensorflow.callbacks import Logs, OnRanks
from grace.tensorflow.optimizer_state import without_loss_scale


class LearningRateWarmupCallback(OnRanks):
    """Callback that raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over the first epochs.

    In batch s (from 0) of epoch e, with n batches an epoch, the learning rate is

        initial_lr / size * (1 + (size - 1) * (e + (s + 1) / n) / warmup_epochs)

    (Goyal et al. 2017, arXiv 1706.02677; the numbers of Horovod's callback of this name.) Afterwards it is not changed.
    ``fit(initial_epoch=...)`` and ``BackupAndRestore`` continue in the middle.

    Args:
        initial_lr: the learning rate after the warm-up: that of one rank, times the number of ranks.
        warmup_epochs: number of epochs of the warm-up; it may be a fraction.
        momentum_correction: True to scale the velocities of SGD and RMSprop, which contain the learning rate, as it
            changes.
        steps_per_epoch: batches an epoch; as Keras counts them, if left out.
        verbose: 1 to print the end of the warm-up, on rank 0.
        backend: the engine; that of ``grace.init()`` if left out.

    Raises:
        ConfigError: a number is out of range.

    >>> LearningRateWarmupCallback(0.1 * 8).rate(done=0, ranks=8, steps=100)
    0.1014
    >>> LearningRateWarmupCallback(0.1 * 8).rate(done=499, ranks=8, steps=100)
    0.8
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        backend: Backend | None = None,
    ):
        super().__init__(backend)
        for name, value in [("initial_lr", initial_lr), ("warmup_epochs", warmup_epochs)]:
            if not isinstance(value, Real) or not 0 < value < float("inf"):
                raise ConfigError(f"LearningRateWarmupCallback takes a positive number as {name}, not {value!r}")
        if steps_per_epoch is not None and (not isinstance(steps_per_epoch, int) or steps_per_epoch < 1):
            raise ConfigError(f"steps_per_epoch is a number of batches, not {steps_per_epoch!r}")
        self.initial_lr = float(initial_lr)
        self.warmup_epochs = float(warmup_epochs)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.verbose = verbose
        self.steps = 1
        self.epoch = 0
        self.warming = False

    def rate(self, done: int, ranks: int, steps: int) -> float:
        """Return the learning rate of a batch.

        Args:
            done: number of batches before it, since training began.
            ranks: number of ranks.
            steps: number of batches an epoch.
        """
        progress = min(1.0, (done + 1) / (self.warmup_epochs * steps))
        return self.initial_lr * (1 + (ranks - 1) * progress) / ranks

    def set_model(self, model: keras.Model) -> None:
        """Check the model that Keras hands over.

        Raises:
            ConfigError: the optimizer's learning rate is a schedule, which sets it at every step.
        """
        super().set_model(model)
        rate = getattr(self._optimizer, "_learning_rate", None)
        if callable(rate) and not isinstance(rate, keras.Variable):
            name = getattr(rate, "__name__", type(rate).__name__)
            raise ConfigError(
                f"the optimizer's learning rate is {name}, which decides it at every step, so "
                "LearningRateWarmupCallback cannot: give the optimizer a number, and decay by "
                "keras.callbacks.LearningRateScheduler; or leave this callback out, and give the schedule a warm-up of "
                "its own (keras.optimizers.schedules.CosineDecay has warmup_target and warmup_steps)"
            )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the ranks' numbers, since all must have the same learning rate in a step.

        Raises:
            ConfigError: the number of batches an epoch is not known.
            RankError: the ranks have different ones.
        """
        steps = self.steps_per_epoch or self.params.get("steps")
        error = None
        if not steps:
            error = ConfigError(
                "LearningRateWarmupCallback must know how many batches an epoch has, which Keras does not before the "
                "first has ended: pass steps_per_epoch=... to it"
            )
        own = [(name, f"{getattr(self, name)}") for name in ("initial_lr", "warmup_epochs", "momentum_correction")]
        everyone = gather_or_raise(self.ranks, "a warm-up", [*own, ("steps_per_epoch", f"{steps}")], error)
        if any(other != everyone[0] for other in everyone):
            facts: list[Sequence[tuple[str, str]]] = [
                [(f"{name} =", value) for name, value in other] for other in everyone
            ]
            raise RankError(first_difference(facts, DIFFERENT, number_of=self.ranks.number_of))
        self.steps = steps

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the number of the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the learning rate, as long as it warms up."""
        done = self.epoch * self.steps + batch
        if done < self.warmup_epochs * self.steps:
            self.warming = True
            self._set(self.rate(done, self.ranks.size, self.steps))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the learning rate, and print it at the end of the warm-up."""
        if self.warming and epoch + 1 >= self.warmup_epochs:
            self.warming = False
            self._set(self.initial_lr)  # with steps_per_execution not every batch begins here
            if self.verbose and self.ranks.rank == 0:
                print(f"\nEpoch {epoch + 1}: the learning rate has warmed up to {self.initial_lr:g}")
        if logs is not None:
            logs["learning_rate"] = float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    @property
    def _optimizer(self) -> keras.optimizers.Optimizer:
        return without_loss_scale(getattr(self.model, "optimizer", None))

    def _set(self, rate: float) -> None:
        optimizer = self._optimizer
        before = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = rate
        after = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        if self.momentum_correction and before not in (0.0, after):
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (after / before))


def _velocities(optimizer: keras.optimizers.Optimizer) -> "Sequence[keras.Variable]":
    """Return momenta that contain the learning rate: v <- momentum * v - lr * g. Others are sums of gradients."""
    if isinstance(optimizer, keras.optimizers.SGD):
        return getattr(optimizer, "momentums", ())
    return getattr(optimizer, "_momentums", ()) if isinstance(optimizer, keras.optimizers.RMSprop) else ()


DIFFERENT = "the ranks are about to warm up their learning rates differently; the first difference: "
