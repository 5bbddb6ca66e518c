"""The distributed optimizer for Keras 3: the user's own, whose gradients are exchanged compressed."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import keras
import tensorflow as tf

from grace.backends.horovod import Compression, NoHorovodSubclass, compressor_for
from grace.core.api_names import KERAS
from grace.core.arguments import accept_grace_argument, check_keras_backend, optimizer_type_error
from grace.core.backend import Backend
from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.live_instances import live_instances
from grace.core.outer import OuterArg
from grace.core.subclassing import with_mixins
from grace.errors import ConfigError
from grace.exchange.bucket import Traffic
from grace.session.checkpoint import warn_own_state
from grace.session.hyperparameters import hyperparameter_facts, numeric_settings
from grace.session.settings import ReduceOp, Settings
from grace.session.state_schema import SavedState
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg
from grace.strategy.plan import Strategy
from grace.strategy.resources import ResourcesArg
from grace.tensorflow.auto import is_adaptive
from grace.tensorflow.distribute import check_not_distribute
from grace.tensorflow.loss_scale import all_finite, patch_check_finite
from grace.tensorflow.optimizer_checks import (
    bypass_error,
    check_arguments,
    check_momentum,
    check_not_multi_optimizer,
    delayed_variables_left_out,
    given_twice,
)
from grace.tensorflow.optimizer_state import (
    FILE,
    GraceState,
    assign_own,
    distributed_in,
    register_as,
    slots,
    variables_to_broadcast,
    without_loss_scale,
)
from grace.tensorflow.reductions import engine_of
from grace.tensorflow.sharding import Flag, Mean
from grace.tensorflow.step_session import StepSession, TapeGradient
from grace.tensorflow.variables import AnyVariable, is_overwritten, value_of

if TYPE_CHECKING:  # Horovod need not be installed; the planner is loaded only by who asks for it
    from horovod.common.process_sets import ProcessSet
    from keras.src.saving.saving_lib import H5IOStore

    from grace.planner.explain import Plan


@dataclass
class _Step:
    """State of the step that is being made, by the ids of variables.

    Attributes:
        absent: variables that have no gradient on this rank.
        given: ids of the variables that ``apply`` was called with.
        variables: the variables that Keras applies gradients to.
        held: absent variables among them, and what stands for their gradients: zeros, or :data:`LEAST`.
        found: for each absent variable, True if another rank had a gradient (a bool, or a scalar tensor).
        in_range: False if a loss scale skips this step, because a mean is not finite.
    """

    absent: "dict[int, keras.Variable]" = field(default_factory=dict)
    given: Set[int] = frozenset()
    variables: "list[keras.Variable]" = field(default_factory=list)
    held: "list[tuple[TapeGradient, keras.Variable]]" = field(default_factory=list)
    found: dict[int, Flag] = field(default_factory=dict)
    in_range: Flag = True


LEAST = float("-inf")
"""Value, in a maximum over ranks, of a rank that has no gradient."""


class _NoVariable:
    """Stand-in for a variable where a rank has no gradient of any. Keras reads its constraint."""

    constraint = None


NO_VARIABLE: Any = _NoVariable()


def _key(variable: AnyVariable) -> int:
    return id(value_of(variable))


class DistributedMixin(NoHorovodSubclass):
    """Overrides of a Keras optimizer's methods that make it exchange its gradients.

    Keras calls ``_clip_gradients`` when it is about to use gradients: after the last of
    ``gradient_accumulation_steps``, and before clipping. That is where they are exchanged. A class whose ``apply``
    never comes there is refused.
    """

    _grace: StepSession
    _finalizer: weakref.finalize
    """Closes the session, once: when the optimizer is closed, or deleted."""
    _step: _Step
    _exchanged: bool
    """True if the call under way has exchanged its gradients, or accumulates them for a later step."""
    _accumulated: set[int]
    """Ids of variables that this rank has accumulated a gradient of since the last exchange; in graphs, ever."""
    grace_state: GraceState
    built: bool
    learning_rate: "tf.Tensor | keras.Variable"
    iterations: "tf.Tensor | keras.Variable"
    _trainable_variables: "list[keras.Variable]"
    use_ema: bool
    _model_variables_moving_average: "list[keras.Variable | None]"

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[TapeGradient, AnyVariable]]) -> "tf.Variable":
        """Update the variables with the means of these gradients, which Keras lets ``apply`` exchange."""
        return self._call_checked("apply_gradients", super().apply_gradients, grads_and_vars)  # type: ignore[misc]

    def _call_checked(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that applies gradients, and raise ConfigError if they were not exchanged on the way."""
        self._exchanged = False
        result = function(*args)
        if not self._exchanged:
            raise bypass_error(self, name)
        return result

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[TapeGradient], trainable_variables: "Sequence[keras.Variable] | None" = None
    ) -> None:
        """Exchange the gradients, and update the variables with their means. Keras's ``model.fit`` calls it."""
        if self._grace.runner is not None:
            check_momentum(self._grace.runner.communicators, self, later=True)
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built and grads:
                with keras.name_scope(self.name):  # type: ignore[attr-defined]
                    self.build(trainable_variables)  # type: ignore[attr-defined]
        variables = list(self._trainable_variables)
        wanted = variables if trainable_variables is None else trainable_variables
        known = {_key(variable): variable for variable in variables}
        given = [_key(variable) for variable in wanted]
        usable = len(given) == len(grads) and known.keys() >= set(given)
        # A rank without any gradient takes part in the exchange of the others.
        alone = self._grace.backend.size == 1 and all(gradient is None for gradient in grads)
        if not usable or not grads or alone:
            # Keras raises its own error, or returns if there are no gradients.
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            self._exchanged = not grads
            return
        if len(set(given)) < len(given):
            raise given_twice(self, next(v for v, key in zip(wanted, given, strict=True) if given.count(key) > 1))
        # Keras drops variables without a gradient, but another rank may have one: all variables take part, with zeros
        # where this rank has none, and update_step skips those that no rank has a gradient for.
        gradient_of = {key: g for key, g in zip(given, grads, strict=True) if g is not None}
        absent = {key: variable for key, variable in known.items() if key not in gradient_of}
        object.__setattr__(self, "_step", _Step(absent, set(given)))
        filled = [self._missing_gradient(v) if key in absent else gradient_of[key] for key, v in known.items()]
        try:
            self._call_checked("apply", super().apply, filled, variables)  # type: ignore[misc]
            self._grace.run_rounds()
        finally:
            object.__setattr__(self, "_step", _Step())

    def _missing_gradient(self, variable: keras.Variable) -> tf.Tensor:
        """Return the tensor that stands for a gradient that this rank does not have."""
        return tf.fill(variable.shape, tf.cast(LEAST if is_overwritten(variable) else 0.0, variable.dtype))

    def _overwrite_variables_directly_with_gradients(
        self, grads: Sequence[TapeGradient], vars: "Sequence[keras.Variable]"
    ) -> "tuple[Sequence[TapeGradient], Sequence[keras.Variable]]":
        """Overwrite variables as Keras does, with the largest of all ranks' values: Keras takes the largest of several
        batches', too."""
        own: list[TapeGradient] = list(grads)
        overwritten = [i for i, variable in enumerate(vars) if is_overwritten(variable)]
        if overwritten:
            largest = self._grace.largest([own[i] for i in overwritten])
            with tf.control_dependencies(largest):  # the order of collectives: the exchange follows, on every rank
                own = tf.nest.map_structure(tf.identity, own, expand_composites=True)
            for i, value in zip(overwritten, largest, strict=True):
                own[i] = tf.where(value == self._missing_gradient(vars[i]), vars[i].value, value)
        grads, vars = super()._overwrite_variables_directly_with_gradients(own, vars)  # type: ignore[misc]
        self._exchanged = self._exchanged or not grads
        # Keras applies constraints to the variables that it gets from here. Those of absent variables are applied in
        # update_step, if another rank has a gradient.
        absent = self._step.absent.keys()
        pairs = list(zip(grads, vars, strict=True))
        self._step.held = held = [(g, v) for g, v in pairs if _key(v) in absent]
        if not held:
            return grads, vars
        rest = [(g, v) for g, v in pairs if _key(v) not in absent]
        if not rest:  # Keras ends the step without an exchange if it gets no variable
            return [0.0], [NO_VARIABLE]
        return [g for g, _ in rest], [v for _, v in rest]

    def _backend_increment_gradient_accumulators(self, *args: Any) -> None:
        self._exchanged = True  # gradients are accumulated, and exchanged in a later step
        self._accumulated.update(self._step.given - self._step.absent.keys())
        super()._backend_increment_gradient_accumulators(*args)  # type: ignore[misc]

    def _backend_apply_gradients(
        self, grads: Sequence[TapeGradient], trainable_variables: "Sequence[keras.Variable]"
    ) -> None:
        # In one order on all ranks, whose absent variables differ: clipping adds up norms in it.
        order = {_key(variable): i for i, variable in enumerate(self._trainable_variables)}
        own = [pair for pair in zip(grads, trainable_variables, strict=True) if pair[1] is not NO_VARIABLE]
        pairs = [*own, *self._step.held]
        pairs.sort(key=lambda pair: order[_key(pair[1])])
        self._step.variables = [variable for _, variable in pairs]
        super()._backend_apply_gradients([gradient for gradient, _ in pairs], self._step.variables)  # type: ignore[misc]

    def _absent_here(self) -> set[int]:
        """Return the ids of variables that this rank has no gradient of, nor has accumulated one since the last
        exchange."""
        # What was accumulated for a variable that this call is not given, of a layer that was frozen meanwhile, is
        # dropped, as Keras does. A graph is traced once for many periods, in any of which a variable may have had one.
        absent = self._step.absent.keys() - (self._accumulated & self._step.given)
        if tf.executing_eagerly():
            self._accumulated.clear()
        return absent

    def _clip_gradients(self, grads: list[TapeGradient]) -> list[TapeGradient]:
        """Exchange the gradients, and clip the means as the user chose. Called by Keras."""
        means = self._exchange(grads)
        return super()._clip_gradients([_mean_or_zeros(means[_key(v)], v) for v in self._step.variables])  # type: ignore[misc]

    def _exchange(self, grads: list[TapeGradient]) -> dict[int, Mean]:
        """Exchange the gradients, and return the means by the ids of variables; note which were found and are finite.

        Raises:
            ConfigError: this call leaves out variables whose means are delayed.
        """
        self._exchanged = True
        step = self._step
        variables = [v for v in self._trainable_variables if not is_overwritten(v)]
        gradient_of = {_key(v): g for v, g in zip(step.variables, grads, strict=True)}
        # Keras may pass some variables only. The exchange takes all of them at every step, in one order.
        absent = self._absent_here()
        gradients = [None if _key(v) in absent else gradient_of.get(_key(v)) for v in variables]
        exchanged = self._grace.exchange(gradients, variables, self.learning_rate, value_of(self.iterations))
        self._grace.take_anchors()
        if self._grace.delayed_ids - gradient_of.keys():  # their means come in a later step, which this call would lose
            raise delayed_variables_left_out(self)
        means = dict(zip(map(_key, variables), exchanged, strict=True))
        step.found = {key: means[key].found for key in means if key in step.absent.keys() | self._grace.delayed_ids}
        if self._grace.loss_scaled:
            step.in_range = all_finite(exchanged)
        return means

    def _update_if_found(self, variable: keras.Variable, update: Callable[[], object]) -> None:
        """Update a variable, unless no rank had a gradient for it."""
        _run_if(self._step.found.get(_key(variable), True), update)

    def _backend_update_step(self, *args: Any) -> None:
        """Update the variables, unless a loss scale skips this step. Called by Keras."""
        _run_if(self._step.in_range, functools.partial(super()._backend_update_step, *args))  # type: ignore[misc]

    def update_step(self, gradient: TapeGradient, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        """Update a variable by the user's optimizer, if some rank had a gradient for it."""
        parent: Any = super()
        absent = self._step.absent.get(_key(variable))

        def update() -> None:
            parent.update_step(gradient, variable, learning_rate)
            if absent is not None and absent.constraint is not None:
                absent.assign(absent.constraint(absent))

        self._update_if_found(variable, update)

    def _apply_weight_decay(self, variables: "Sequence[keras.Variable]") -> None:
        _run_if(self._step.in_range, functools.partial(self._decay_where_found, super(), variables))

    def _decay_where_found(self, parent: Any, variables: "Sequence[keras.Variable]") -> None:
        """Apply Keras's weight decay to the variables that some rank had a gradient of."""
        certain = [v for v in variables if _key(v) not in self._step.found]
        parent._apply_weight_decay(certain)
        for variable in variables:
            if _key(variable) in self._step.found:
                self._update_if_found(variable, functools.partial(parent._apply_weight_decay, [variable]))

    def finalize_variable_values(self, var_list: "Sequence[keras.Variable]") -> None:
        """Overwrite the variables by Keras's moving averages, with ``use_ema``. Keras's ``model.fit`` calls it at its
        end.

        Ranks that train alone have averages of their own. So with outer rounds a last one runs, and the variables
        become the means of all ranks' averages; every rank must call it, after as many iterations.
        """
        finish = functools.partial(super().finalize_variable_values, var_list)  # type: ignore[misc]
        runner = self._grace.runner
        if runner is None or not runner.outer_rounds or not self.use_ema:
            finish()
            return
        averages = [average for average in self._model_variables_moving_average if average is not None]
        self._grace.finish_alone(averages, finish)

    def close(self) -> None:
        """End the exchange, and make this the plain optimizer again that it was, with its momenta and settings.

        Compressors and memories given by you may serve another optimizer, and this one may be made distributed anew.
        Graphs that were traced before raise when they run: call ``model.compile`` again. Of a LossScaleOptimizer close
        the optimizer in it, by ``optimizer.inner_optimizer.close()``.
        """
        self._finalizer()
        del self.grace_state
        for name in ("_grace", "_finalizer", "_step", "_exchanged", "_accumulated"):
            object.__delattr__(self, name)
        self.__class__ = type(self).__bases__[0]  # type: ignore[assignment]

    def save_own_variables(self, store: "H5IOStore") -> None:
        """Save the optimizer's variables, alone or with the model. Called by Keras."""
        super().save_own_variables(store)  # type: ignore[misc]
        self.grace_state.save_beside(store)

    def load_own_variables(self, store: "H5IOStore") -> None:
        """Load the optimizer's variables. Called by Keras."""
        super().load_own_variables(store)  # type: ignore[misc]
        state = self.grace_state.load_beside(store)
        if state is not None and self._grace.runner is None:
            assign_own(self, state)

    def save_assets(self, dir_path: str) -> None:
        """Write this rank's state beside the optimizer's variables. Called when Keras saves the model."""
        Path(dir_path, FILE).write_bytes(self.grace_state.serialize())

    def load_assets(self, dir_path: str) -> None:
        """Load this rank's state, if the file holds one. Called when Keras loads into this very optimizer."""
        if Path(dir_path, FILE).exists():
            self.grace_state.deserialize(Path(dir_path, FILE).read_bytes())

    @classmethod
    def from_config(cls, config: dict[str, Any], **options: Any) -> keras.optimizers.Optimizer:
        """Return an optimizer of the user's class with these settings, which is not distributed."""
        return cls.__bases__[0].from_config(config, **options)  # type: ignore[attr-defined, no-any-return]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Return the parts of a copy or a pickle: as Keras's, an optimizer of these settings that has made no step, and
        without the exchange."""
        return type(self).__bases__[0].from_config, (self.get_config(),)  # type: ignore[attr-defined]

    @property
    def strategy(self) -> Strategy | None:
        """:class:`~grace.strategy.plan.Strategy` that is executed; None if there is one method for all, or before the
        first exchange."""
        return self._grace.strategy

    @property
    def plan(self) -> "Plan | None":
        """Reasons of ``strategy="auto"`` for its choice; prints as a table. None as long as it measures, and where the
        user chose."""
        driver = self._grace.driver
        return None if driver is None else driver.explanation

    def use_strategy(self, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
        """Continue with another strategy. Memories are kept; a residual that the new strategy has no memory for is
        applied, as its mean over ranks, at the next step. Outer rounds end with a last one; if their variables are
        exchanged in every step from now on, all ranks continue with the state of rank 0's optimizer (its momenta).
        Every rank must call it, between two steps; rank 0's strategy counts. Before the first exchange it is the choice
        that the exchange begins with, or, if a state was loaded, continues with.

        Graphs that were traced before raise when they run, rather than exchange by the former strategy: in
        ``model.fit`` call ``model.make_train_function(force=True)`` after it, and make a ``tf.function`` of your own
        anew. (Those of an optimizer made with ``strategy="auto"`` go on.) Planning ends, if there was any.

        Args:
            strategy, resources: as :func:`DistributedOptimizer` takes them: ``"uniform(compressor=topk)"``.

        Raises:
            ConfigError: it does not suit this model or run, and the former strategy stays.
            RankError: another rank refuses it.
        """
        self._grace.use_strategy(strategy, resources)

    def anchor(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which variables are the anchors of the last outer round, which all ranks share. Evaluate
        and save in it. Without outer rounds it changes nothing. No collective."""
        return self._grace.at_anchor()

    def flush(self) -> None:
        """Run a last outer round, after which all ranks have equal variables. Every rank must call it, after as many
        iterations. Without outer rounds it does nothing.

        Raises:
            StepError: ranks have made other numbers of iterations.
        """
        self._grace.flush()

    @property
    def traffic(self) -> Traffic:
        """Counts of all that was exchanged so far."""
        return self._grace.traffic

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank for a logger, counted since the last call; see :mod:`grace.session.metrics`. No
        collective.

        Where TensorFlow's graph waits (over Horovod), ``seconds_wait`` is NaN.
        """
        return self._grace.metrics()

    def state(self) -> SavedState | None:
        """Return the state of this rank's compressor and memory: plain numbers, text and tensors; None before the first
        exchange. ``model.save`` and ``tf.train.Checkpoint`` save it by themselves."""
        if self._grace.runner is not None:
            warn_own_state(self._grace.runner, "optimizer.state()", "optimizer.full_state()")
        return self._grace.state()

    def full_state(self) -> SavedState | None:
        """Return the ``state()`` of all ranks, which loads on any number of ranks. Every rank must call it."""
        return self._grace.state(everyone=True)

    def load_state(self, state: SavedState | None, memory: str = "strict") -> None:
        """Continue from ``state()`` of the same rank, or from ``full_state()``.

        Args:
            state: the saved state.
            memory: "strict"; "keep" to keep the memories that fit this run, and drop the others with a warning; or
                "reset" to start with empty ones.

        Raises:
            ConfigError: it belongs to another rank, number of ranks or method; at the first exchange if there was
                none yet.
        """
        self._grace.restore(state, memory)


def _run_if(flag: Flag, action: Callable[[], object]) -> None:
    """Run an action if a flag, which may be a tensor, is True."""
    if tf.is_tensor(flag):
        tf.cond(flag, lambda: (action(), 0)[1], lambda: 0)  # both branches must return a tensor
    elif flag:
        action()


def _mean_or_zeros(mean: Mean, variable: keras.Variable) -> "tf.Tensor | tf.IndexedSlices":
    return tf.zeros(variable.shape, variable.dtype) if mean.value is None else mean.value


@accept_grace_argument
def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    compressor: CompressorArg | None = None,
    memory: MemoryArg | None = None,
    communicator: CommunicatorArg | None = None,
    *,
    outer: OuterArg | None = None,
    period: int | None = None,
    strategy: StrategyArg | None = None,
    resources: ResourcesArg | None = None,
    op: str | int = "average",
    gradient_predivide_factor: float = 1.0,
    process_set: "ProcessSet | None" = None,
    backend: Backend | None = None,
    sparse_as_dense: bool = False,
    broadcast: bool = True,
    hierarchical: bool = False,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
    group_bytes: int | None = None,
    compression: Compression | None = None,
    **horovods: Any,
) -> keras.optimizers.Optimizer:
    """Make a Keras 3 optimizer exchange its gradients, compressed, before it applies them.

    The optimizer is changed in place and returned: it still is of its class. It goes into ``model.compile``, or
    into your own loop with ``apply_gradients``, eagerly or in a ``tf.function``. Gradients are accumulated over
    ``gradient_accumulation_steps`` and then exchanged, and the means are clipped. A ``LossScaleOptimizer`` may be
    inside or around it; whether a gradient overflowed is then decided by all ranks together. On a GPU use
    ``compile(jit_compile=False)``: XLA cannot compile an exchange.

    Args:
        optimizer: any Keras optimizer (TensorFlow backend).
        compressor: spec ("topk(ratio=0.01)"), dict or object; "none" if left out.
        memory: spec, dict or object; the compressor's default if left out.
        communicator: spec, dict or object, or a Communicator object that holds all three; the compressor's default
            for so many ranks (:func:`~grace.communicators.choice.break_even`). Such an object may also be given as in
            GRACE: as the second argument, or as ``grace=``.
        outer: spec or object of an outer optimizer ("nesterov(lr=0.7, momentum=0.6)"; "none" averages): ranks train
            alone, and exchange how far they have drifted, by these three, instead of gradients. See ``anchor()`` and
            ``flush()`` of the optimizer.
        period: iterations between two such exchanges.
        strategy: the exchange of each variable, instead of one method for all: a strategy file's path, a
            :class:`~grace.strategy.Strategy`, or a builder's spec ("parallax(compressor=qsgd)") or object. Rank 0's
            counts. If nothing is given, the file that ``grace launch --strategy`` names.
        resources: the cluster that a builder builds for: a resource file's path, or
            :class:`~grace.launch.cluster.Resources`; it must describe the ranks that there are. Rank 0's counts. If
            nothing is given, the file that ``grace launch -r`` names.
        op: "average" or "sum" over ranks (or Horovod's constants; Adasum is refused).
        gradient_predivide_factor: divide gradients by it before the exchange, and multiply the average with it.
        process_set: a Horovod process set; all ranks if left out.
        backend: a Backend object, instead of that of ``grace.init()``.
        sparse_as_dense: exchange tf.IndexedSlices as dense gradients, instead of by rows.
        broadcast: start every rank from rank 0's trainable variables, at the first exchange.
        hierarchical: the ranks of a node average their gradients first, uncompressed, and one of them exchanges for
            all; for several ranks on each node of a slow network. Ranks are on one node if their hosts' names (or
            GRACE_NODE) are the same. Not for Horovod.
        compress_after: steps that are exchanged uncompressed first; memories begin with the compression. Not for
            methods that apply momentum, and not for ``strategy="auto"``.
        seed: the seed of stochastic methods' random numbers; the same on all ranks.
        bucket_bytes: bytes on the wire that a collective carries; if left out, as many as keep the link busy
            (:class:`grace.session.bucket_limits.Limits`): 1 to 2 MB of a model of 100 MB, and 25 MiB uncompressed.
        group_bytes: bytes of gradient that share a collective at most, whatever is sent of them.
        compression: ``grace.Compression.none`` or ``.fp16``, as in scripts for Horovod; whatever else is refused,
            because ``compressor`` is Grace's.
        horovods: refused. The errors for Horovod's other arguments say what to write instead.

    Raises:
        ConfigError: what was given cannot work; nothing was exchanged.
        RankError: (at the first exchange) the ranks gave different things, or another rank's cannot work.

    >>> import grace
    >>> engine = grace.init("local")
    >>> w = tf.Variable([1.0, 2.0])
    >>> opt = DistributedOptimizer(keras.optimizers.SGD(0.5), compressor="topk(ratio=0.5)")
    >>> isinstance(opt, keras.optimizers.SGD)
    True
    >>> _ = opt.apply_gradients([(tf.constant([1.0, 4.0]), w)])
    >>> w.numpy()
    array([1., 0.], dtype=float32)
    >>> grace.shutdown()
    """
    check_keras_backend()
    check_arguments(horovods)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise optimizer_type_error(optimizer)
    inner = without_loss_scale(optimizer)
    if isinstance(inner, DistributedMixin):
        raise ConfigError("this optimizer is distributed already")
    check_not_multi_optimizer(inner)
    compressor = compressor_for(inner, compression, compressor)
    check_not_distribute(inner._distribution_strategy)
    backend = engine_of(process_set, backend)
    # the optimizer holds the session: no circle
    optimizer_ref: Callable[[], keras.optimizers.Optimizer] = weakref.ref(inner)
    cls: type = type(inner)
    session = StepSession(
        Choices(compressor, memory, communicator, strategy, resources, outer, period),
        backend,
        Settings(
            reduction=ReduceOp(op, gradient_predivide_factor),
            bucket_bytes=bucket_bytes,
            group_bytes=group_bytes,
            seed=seed,
            sparse_as_dense=sparse_as_dense,
            broadcast=broadcast,
            hierarchical=hierarchical,
            compress_after=compress_after,
        ),
        check=lambda chosen: check_momentum([chosen], optimizer_ref()),
        for_optimizer=True,
        optimizer_variables=lambda: variables_to_broadcast(optimizer_ref()),
        optimizer_slots=lambda: slots(optimizer_ref()),
        facts=lambda: hyperparameter_facts(cls.__name__, [numeric_settings(optimizer_ref().get_config())], KERAS.group),
        adaptive=is_adaptive(inner),
    )
    inner.__class__ = _distributed_class(cls)
    register_as(inner.__class__, cls)
    finalizer = weakref.finalize(inner, session.close)
    finalizer.atexit = False
    added = {"_grace": session, "_finalizer": finalizer, "_step": _Step(), "_exchanged": False, "_accumulated": set()}
    for name, value in added.items():
        object.__setattr__(inner, name, value)  # Keras's __setattr__ would track and copy what is in them
    inner.grace_state = GraceState(session)
    patch_check_finite()
    if inner.built:
        _retrace_models_of(inner)
    return optimizer


def _retrace_models_of(optimizer: keras.optimizers.Optimizer) -> None:
    """Let ``model.fit`` trace the models that were trained with this optimizer anew: what it traced before has no
    exchange, and each rank would go on alone."""
    for model in live_instances(keras.Model):
        if getattr(model, "train_function", None) is None:
            continue
        # a GAN has two
        optimizers = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
        if any(optimizer in distributed_in(value) for value in optimizers):
            model.make_train_function(force=True)


@functools.cache
def _distributed_class(cls: type) -> type:
    return with_mixins(cls, DistributedMixin)
