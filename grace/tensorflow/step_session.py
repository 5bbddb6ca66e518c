"""The session of a list of variables whose gradients are exchanged when it is called, eagerly and in graphs."""

from collections.abc import Sequence
from typing import Union

import tensorflow as tf

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.exchange.header import CYCLE
from grace.exchange.sparse_rows import SparseRows
from grace.session import checkpoint
from grace.session.agreement import gather_or_raise
from grace.session.exchange_plan import ExchangePlan
from grace.session.hierarchy import advise_hierarchy
from grace.session.setup import build_step_runner
from grace.session.step_runner import StepRunner
from grace.session.versions import public
from grace.tensorflow.auto import PlannedRun, driver_of
from grace.tensorflow.graph_exchange import GraphRun, HostRun
from grace.tensorflow.session import Session
from grace.tensorflow.sharding import Flag, Gradient, Mean, Pair
from grace.tensorflow.variables import (
    AnyVariable,
    describe_variable,
    names_as_saved,
    names_match,
    names_of,
    value_of,
)

TapeGradient = Union["tf.Tensor", "tf.IndexedSlices", None]
"""Gradient as tapes and optimizers give it; None for a variable that this rank has no gradient of."""


class StepSession(Session):
    """Session that exchanges the gradients of its variables whenever it is called.

    The first call tells the sparse variables, and starts the exchange: the ranks compare their variables and settings,
    and start from rank 0's values.
    """

    # -- start -----------------------------------------------------------------------------------------

    def _prepare(self, variables: Sequence[AnyVariable], gradients: Sequence[TapeGradient]) -> StepRunner:
        if self.runner is None:
            with tf.init_scope():  # eagerly, also while a graph is traced: the collectives of the start run once
                try:
                    self._build(variables, gradients)
                    if self.next_strategy is not None:
                        self.use_strategy(*self.next_strategy)
                        self.next_strategy = None
                except BaseException:
                    self.runner = None  # the next call begins anew, on all ranks alike
                    raise
        assert self.runner is not None
        return self.runner

    def _build(self, variables: Sequence[AnyVariable], gradients: Sequence[TapeGradient]) -> None:
        names = names_as_saved(names_of(variables), variables, self.saved and self.saved[0])
        sparse_too = not self.settings.sparse_as_dense
        own_flags = [(sparse_too and isinstance(g, tf.IndexedSlices), g is not None) for g in gradients]
        initialized = all(value_of(v).is_initialized() for v in variables)  # or a graph does it when it runs
        received = gather_or_raise(self.backend, "TensorFlow's variables", (names, own_flags, bool(initialized)))
        # Keras numbers layers by what a process made before: ranks whose names differ only so use rank 0's.
        names = received[0][0] if names_match(names, received[0][0]) else names
        same = [flags for _, flags, _ in received if len(flags) == len(names)]  # others are refused below
        sparse = [any(rank[i][0] for rank in same) for i in range(len(names))]
        present = [any(rank[i][1] for rank in same) for i in range(len(names))]
        self.missing_everywhere = [not found for found in present]
        if self.for_optimizer and not any(present):  # as Keras says it; a tape returns None instead
            raise ValueError(
                "No gradients provided for any variable, on any rank: compute the loss from the trainable variables, "
                "within the tape."
            )

        def described() -> list[Variable]:
            self.settings.check()
            return [describe_variable(n, v, rows) for n, v, rows in zip(names, variables, sparse, strict=True)]

        facts = [
            ("TensorFlow", public(tf.__version__)),
            ("an optimizer, not a tape:", str(self.for_optimizer)),
            *self.settings.facts(),
            *self.facts(),
        ]

        runner = build_step_runner(
            described,
            lambda: self._choose(facts),
            self.backend,
            self.context,
            facts,
            self.check,
            hierarchical=self.settings.hierarchical,
            compress_after=self.settings.compress_after,
        )
        advise_hierarchy(runner)
        self.check_plan(runner)
        self.variables = list(variables)
        self.names = names
        assert self.plan is not None
        self.use_runner(runner, self.plan)
        # For errors about ranks that differ.
        runner.callbacks.hyperparameters = lambda: [("the learning rate", f"{self.lr:g}")]
        self.driver = driver_of(self) if self.auto_request else None
        if self.saved is None:  # another rank may have loaded a checkpoint: all refuse together
            checkpoint.compare(self.backend, checkpoint.NOTHING, "strict")
        else:
            self._load(*self.saved)
            # in the middle of a period ranks have parameters of their own, which were loaded
            self.needs_broadcast = self.needs_broadcast and not runner.outer_rounds.has_anchors
            self.saved_slots = None
        # where a graph initializes variables, it also starts them equal: they have no values yet
        if all(rank_initialized for *_, rank_initialized in received):
            self.broadcast_initial()

    def _choose(self, facts: list[tuple[str, str]]) -> ExchangePlan:
        request = self.auto_request = self.choices.auto_request()
        choices = self.choices
        if request is not None:
            self.settings.check_auto()
            facts += [("the strategy", request.options.spec)]
            choices = request.starting_choices(choices)
        self.plan = choices.plan(self.settings.limits)
        return self.plan

    # -- a step ----------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def exchange(
        self,
        gradients: Sequence[TapeGradient],
        variables: Sequence[AnyVariable],
        lr: "tf.Tensor | float | None" = None,
        updates: "tf.Tensor | tf.Variable | None" = None,
    ) -> list[Mean]:
        """Exchange the gradients of all ranks. Every call takes the same variables in the same order.

        Args:
            gradients: tensors, tf.IndexedSlices or None.
            variables: the variables of these gradients.
            lr: the learning rate, for memories that follow it; all ranks must have the same.
            updates: number of steps that the optimizer has made; all ranks must have the same.
        """
        self.check_open()
        runner = self._prepare(variables, gradients)
        self._check_same(variables)
        present = tuple(gradient is not None for gradient in gradients)
        converted = [self._to_exchange(i, gradient) for i, gradient in enumerate(gradients)]
        # Both numbers of the step stamp travel to Python in one tensor; a float32 holds any number below CYCLE.
        number = 0 if updates is None else tf.cast(updates, tf.int64) % CYCLE
        rate = tf.stack([tf.cast(1.0 if lr is None else lr, tf.float32), tf.cast(number, tf.float32)])
        if tf.executing_eagerly() and self._starts_from_python(runner):
            run = HostRun if self.driver is None else PlannedRun
            return self._to_means(run(self, runner, present).run(converted, rate))
        if not tf.executing_eagerly():
            return self._add_to_graph(converted, present, rate)
        # Eagerly each of the engine's operations blocks; in a graph they are under way together.
        if self._function is None:
            self._function = tf.function(self._add_to_graph, autograph=False, reduce_retracing=True)
        means = self._function(converted, present, rate)
        return [Mean(m.value if bool(m.found) else None, bool(m.found)) for m in means]

    def _check_same(self, variables: Sequence[AnyVariable]) -> None:
        """Raise ConfigError if variables are not those that the exchange was begun with, in the same order."""
        before, now = ([id(value_of(v)) for v in each] for each in (self.variables, variables))
        if before == now:
            return
        n = next(
            (i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), min(len(before), len(now))
        )
        had, has = (repr(names[n]) if n < len(names) else "none" for names in (self.names, names_of(variables)))
        raise ConfigError(
            f"the exchange was begun with {len(before)} variables, and this step has {len(now)}: as number {n + 1} "
            f"{has}, where there was {had}. Give it the same ones in the same order at every step, with None where "
            "there is no gradient; others need a GradientExchange of their own"
        )

    def _add_to_graph(self, converted: list[Gradient], present: tuple[bool, ...], rate: tf.Tensor) -> list[Mean]:
        assert self.runner is not None
        driven = HostRun if self.driver is None else PlannedRun
        run = driven if self._starts_from_python(self.runner) else GraphRun
        means = run(self, self.runner, present).add_to_graph(converted, rate)
        return [Mean(*self._to_own_dtype(i, value, found)) for i, (value, found) in enumerate(means)]

    def _to_exchange(self, i: int, gradient: TapeGradient) -> Gradient:
        """Return a gradient as the exchange takes it: a tensor, or :class:`SparseRows`."""
        assert self.runner is not None
        variable = self.runner.variables[i]
        if variable.sparse:
            if gradient is None:
                return SparseRows(tf.zeros([0, *variable.shape[1:]], variable.dtype), tf.zeros([0], tf.int64))
            rows_shape = [None, *variable.shape[1:]]
            if not isinstance(gradient, tf.IndexedSlices):
                rows = tf.range(variable.shape[0], dtype=tf.int64)
                return SparseRows(_of_shape(gradient, variable.shape, variable), rows)
            return SparseRows(_of_shape(gradient.values, rows_shape, variable), tf.cast(gradient.indices, tf.int64))
        if gradient is None:
            return tf.zeros(variable.shape, variable.dtype)
        return tf.cast(_of_shape(gradient, variable.shape, variable), variable.dtype)

    def _to_means(self, outcomes: list[Pair]) -> list[Mean]:
        return [
            Mean(None, False) if v is None else Mean(*self._to_own_dtype(i, v, f)) for i, (v, f) in enumerate(outcomes)
        ]

    def _to_own_dtype(self, i: int, value: Gradient | None, found: Flag) -> "tuple[tf.Tensor | tf.IndexedSlices, Flag]":
        assert self.runner is not None
        variable = self.runner.variables[i]
        if isinstance(value, SparseRows):
            values = tf.cast(value.values, variable.dtype)
            return tf.IndexedSlices(values, value.rows, tf.constant(variable.shape, tf.int32)), found
        return tf.cast(value, variable.dtype), found


def _of_shape(gradient: "tf.Tensor | tf.IndexedSlices", shape: Sequence[int | None], variable: Variable) -> tf.Tensor:
    """Return a gradient as a dense tensor, whose shape must be that of its variable.

    Raises:
        ConfigError: the shape is another one. If a graph knows it only when it runs, the graph raises.
    """
    tensor = tf.convert_to_tensor(gradient)
    # Kernels read as many numbers as the variable has, behind the end of a smaller tensor too.
    if not tensor.shape.is_compatible_with(shape):
        raise ConfigError(
            f"the gradient of {variable.name!r} has the shape {tensor.shape}, and the variable {variable.shape}: give "
            "each variable its own gradient"
        )
    return tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, shape)
