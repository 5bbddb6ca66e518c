"""The session of one model in TensorFlow: its variables, the runner of its steps, and its checkpoints."""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from grace.core.api_names import KERAS
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.errors import ConfigError, ExchangeError
from grace.exchange.bucket import Traffic
from grace.kernels.tensorflow.graph_numbers import check_not_xla
from grace.session import checkpoint
from grace.session.exchange_plan import ExchangePlan
from grace.session.metrics import metrics
from grace.session.outer_rounds import OuterRounds
from grace.session.settings import Settings
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.session.switching import build_replacement, returns_to_step, switch_plan
from grace.strategy.choices import AutoRequest, Choices
from grace.strategy.execution import StrategyArg, StrategyPlan
from grace.strategy.plan import Strategy
from grace.strategy.resources import ResourcesArg
from grace.tensorflow.distribute import check_not_distribute
from grace.tensorflow.local_model import KerasModel, ModelInGraph
from grace.tensorflow.reductions import assign_means, largest, summed
from grace.tensorflow.representation import Tensors, from_tensors, representation_of
from grace.tensorflow.sharding import Mean
from grace.tensorflow.variables import AnyVariable, broadcast_initial, broadcast_variables, value_of

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.driver import Driver

_sessions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of sessions that began over each set of ranks: the operations of two sessions must have different names."""


class Session:
    """Variables of a model, the runner of their exchanges, and the state of both: all that the exchange of a step, in
    :class:`~grace.tensorflow.step_session.StepSession`, and outer rounds work on.

    Args:
        choices: compressor, memory, communicator and strategy as the user gave them.
        backend: the engine.
        settings: the user's other choices.
        check: raises if a communicator does not suit the optimizer.
        for_optimizer: True if ``take_anchors`` is called before each update, and ``run_rounds`` after it.
        optimizer_variables: returns further variables that start from rank 0's, where ranks have different ones.
        optimizer_slots: returns the variables of the optimizer that differ by rank where ranks train alone.
        facts: returns further facts that all ranks must share; called at the first exchange.
        adaptive: True if the optimizer divides each element by its history, as Adam does.
    """

    def __init__(
        self,
        choices: Choices,
        backend: Backend,
        settings: Settings,
        *,
        check: Callable[[Communicator], None] = lambda communicator: None,
        for_optimizer: bool = False,
        optimizer_variables: Callable[[], Sequence[AnyVariable]] = lambda: (),
        optimizer_slots: Callable[[], Sequence[AnyVariable]] = lambda: (),
        facts: Callable[[], Sequence[tuple[str, str]]] = lambda: (),
        adaptive: bool = False,
    ):
        if backend.framework not in ("", "tensorflow"):
            raise ConfigError(
                f"this run was joined for {backend.framework} ({backend.describe()}), and this is TensorFlow. Call "
                "grace.init(framework='tensorflow') under horovodrun or mpirun"
            )
        self.choices = choices
        self.backend = backend
        self.settings = settings
        self.check = check
        self.for_optimizer = for_optimizer
        self.facts = facts
        self.adaptive = adaptive
        self.optimizer_variables = optimizer_variables
        self.optimizer_slots = optimizer_slots
        self.lr = 1.0
        predivide = settings.reduction.predivide
        self.context = Context(seed=settings.seed, lr=lambda name: self.lr, predivide=predivide, api_names=KERAS)
        self.variables: list[AnyVariable] = []
        self.names: list[str] = []
        self.runner: StepRunner | None = None
        self.closed = False
        self.saved: tuple[SavedState | None, str] | None = None
        """State to load at the first exchange, and how memories are treated."""
        self.saved_slots: list[list[Tensor]] | None = None
        """Values of the slots of all ranks' optimizers, to load at the first exchange if ranks train alone."""
        self.next_strategy: tuple[StrategyArg, ResourcesArg | None] | None = None
        """Strategy and resources to switch to at the first exchange, after a state was loaded."""
        self.plan: ExchangePlan | None = None
        self.auto_request: AutoRequest | None = None
        self.driver: Driver | None = None
        self.delayed_ids: set[int] = set()
        """Ids of variables whose means are delayed: a step may bring no mean of them yet."""
        self.missing_everywhere: list[bool] = []
        """True for each variable that no rank had a gradient for when the exchange began."""
        self._function: Callable[..., list[Mean]] | None = None
        """The step as a graph, for engines whose eager operations block one another."""
        self.needs_broadcast = settings.broadcast
        """True until all ranks have started from rank 0's values."""
        self.needs_lr = False
        self.loss_scaled = False
        """True if the optimizer is in a LossScaleOptimizer, which skips steps that overflow."""
        self.representation = Tensors()
        """Tensors, or NumPy arrays of their memory, that the exchange computes with."""

    @functools.cached_property
    def label(self) -> str:
        """Prefix of the names of this session's operations. It has the session's number among those that began a
        collective, which all ranks do in one order; a session that exists on one rank only does not count."""
        ranks = getattr(self.backend, "process_set", self.backend)
        _sessions[ranks] = number = _sessions.get(ranks, 0) + 1
        return f"grace.{number}"

    # -- the runner ------------------------------------------------------------------------------------

    def check_plan(self, runner: StepRunner) -> None:
        """Raise ConfigError if the runner of a plan does not suit this session."""
        self.settings.check_sums(runner.communicators, bool(runner.outer_rounds))
        if runner.outer_rounds and not self.for_optimizer:
            raise ConfigError(
                "outer rounds, and sync none(period), come after the optimizer's step, which a tape does not know: use "
                "grace.DistributedOptimizer"
            )

    def use_runner(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Continue with this runner, made from this plan. Called between two steps."""
        self.runner = runner
        self.plan = plan
        self.representation = representation_of(runner)
        self._function = None  # traced for the former runner
        runner.callbacks.computing = self.representation.computing
        self.needs_lr = any(communicator.memory.needs_lr for communicator in runner.communicators)
        self.delayed_ids = {id(value_of(self.variables[i])) for i in self._delayed(runner)}
        for bucket in runner.buckets:  # Horovod's errors name operations: put a variable's name into theirs
            bucket.label = f"{self.label}.{bucket.index}.{re.sub('[^A-Za-z0-9_.]', '_', bucket.variables[0].name)}"
        for i, bucket in enumerate(runner.outer_rounds.buckets):
            bucket.label = f"{self.label}.outer.{i}"
        runner.outer_rounds.model = KerasModel(self)

    def variable(self, name: str) -> tf.Variable:
        """Return one of the variables."""
        return value_of(self.variables[self.names.index(name)])

    def _load(self, saved: SavedState | None, memory: str) -> None:
        former, driver, resumed = self.runner, self.driver, None
        assert former is not None
        if driver is not None:
            checkpoint.compare(former.backend, saved, memory)
            resumed = driver.resumed_from(saved)
            memory = "keep" if driver.is_elsewhere(resumed) and memory == "strict" else memory
        if driver is None or resumed is None:  # the memories that fit go into the run's own plan
            checkpoint.load(former, lambda: saved, memory, self.from_tensors)
            return
        plan = StrategyPlan(resumed.strategy)
        runner = build_replacement(former, plan, self.check)
        try:
            checkpoint.load(runner, lambda: saved, memory, functools.partial(from_tensors, representation_of(runner)))
        except BaseException:
            runner.close()
            raise
        former.close()
        self.use_runner(runner, plan)
        driver.resume(resumed)

    def _delayed(self, runner: StepRunner) -> list[int]:
        """Return the indices of variables that have a shard whose mean is delayed."""
        shards = runner.shards_of
        return [
            i
            for i, variable in enumerate(runner.variables)
            if any(shard.communicator.delayed for shard in shards[variable.name])
        ]

    def close(self) -> None:
        """End the exchange: components given by the user may then serve another one. No collective."""
        if self.runner is not None:
            self.runner.close()
        self.closed = True

    def check_open(self) -> None:
        """Raise if the exchange has ended, or cannot be part of the graph that is being traced."""
        check_not_xla()
        check_not_distribute()
        if self.closed:
            raise ExchangeError(
                "this exchange was closed, and a graph that was traced before still wants it: call model.compile "
                "again, or trace your function anew"
            )

    def _starts_from_python(self, runner: StepRunner) -> bool:
        """Return True if Python starts one collective after the other; False if a graph holds the engine's
        operations."""
        if not self.backend.pairs_by_name or self.driver is not None:
            return True
        # A graph has the same collectives at every step; these communicators have others in some steps.
        return any(c.moves_payloads or c.compress_after for c in runner.communicators)

    def switch(self, plan: ExchangePlan) -> None:
        """Switch to another plan between two steps, on every rank; see :func:`switch_plan`, which may raise."""
        former = self.runner
        assert former is not None
        shapes = {variable.name: variable.shape for variable in former.variables}

        def like(name: str) -> Tensor:
            return self.from_tensors(tf.zeros(shapes[name], "float32"))

        def convert(made: StepRunner, value: Any) -> Any:
            # The former runner may compute with tensors and the new one with arrays, or the other way round.
            return from_tensors(representation_of(made), value)

        with self.representation.computing():
            made = switch_plan(former, plan, like, self.flush, self.check, self.check_plan, convert)
            self.use_runner(made, plan)

    def use_strategy(self, strategy: StrategyArg, resources: ResourcesArg | None = None) -> None:
        """Switch to another strategy, as :meth:`grace.tensorflow.optimizer.DistributedMixin.use_strategy` documents."""
        if not tf.executing_eagerly():
            raise ConfigError("use_strategy is called between two steps: call it outside of tf.function")
        self.check_open()
        if strategy is None:
            raise ConfigError("use_strategy needs a strategy: a file's path, a Strategy, or a builder or its spec")
        if self.runner is None and self.state() is None:
            self.choices = Choices(strategy=strategy, resources=resources)
            return
        if self.runner is None:  # a loaded state fits the choices that it was saved with
            self.next_strategy = strategy, resources
            return
        if self.runner.in_progress:  # in a step that failed: its state is dropped, as it never updated a variable
            self.runner.abort()
        alone_before = self.runner.outer_rounds.fragment_of
        self.switch(StrategyPlan(strategy, resources=resources))
        if returns_to_step(alone_before, self.runner):
            broadcast_variables(self.optimizer_slots(), 0, self.backend)
        if self.driver is not None:
            self.driver.stop()
            self.auto_request = None

    def check_current(self, runner: StepRunner) -> None:
        """Refuse a graph that was traced for another runner than the one that is in use now.

        Raises:
            ExchangeError: the graph was traced for a former runner.
        """
        if runner is not self.runner:
            raise ExchangeError(
                "the strategy was changed, and this graph was traced before: it would exchange by the former one. Call "
                "model.make_train_function(force=True) after use_strategy, or make your tf.function anew"
            )

    # -- variables that ranks train alone --------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def take_anchors(self) -> None:
        """Take the variables that ranks train alone for anchors, eagerly or in a graph. Called before an update.

        Raises:
            ExchangeError: variables are the anchors now.
        """
        self._call_rounds_if(OuterRounds.needs_anchors, OuterRounds.take_anchors)

    @tf.autograph.experimental.do_not_convert
    def run_rounds(self) -> None:
        """Run the outer rounds that are due, eagerly or in a graph. Called after the optimizer's step."""
        self._call_rounds_if(lambda rounds: rounds.due, OuterRounds.run_due)

    def _call_rounds_if(self, due: Callable[[OuterRounds], bool], method: Callable[[OuterRounds], None]) -> None:
        """Call a method of the outer rounds if it is due. A graph passes all variables through the call, which orders
        it among their reads and updates."""
        if self.runner is None or not self.runner.outer_rounds:
            return
        fragments = self.runner.outer_rounds.fragments
        names = list(dict.fromkeys(shard.whole.name for fragment in fragments for shard in fragment.shards))
        variables = [self.variable(name) for name in names]

        def call_on(*values: tf.Tensor) -> list[tf.Tensor]:
            return self._call_rounds_on(method, dict(zip(names, values, strict=True)))

        def run() -> int:
            before = [tf.convert_to_tensor(variable) for variable in variables]
            after = tf.py_function(call_on, before, [value.dtype for value in before])
            for variable, value in zip(variables, after, strict=True):
                variable.assign(tf.reshape(value, variable.shape))
            return 0

        # Where Keras accumulates gradients, the step is in a tf.cond, which a graph orders among operations on the same
        # variables alone: without these reads it could look for rounds before the step has ended, and clear slots that
        # the step still writes.
        written = [*variables, *map(value_of, self.optimizer_variables())]
        with tf.control_dependencies([tf.convert_to_tensor(variable) for variable in written]):
            is_due = tf.py_function(lambda: due(self._current_rounds()), [], tf.bool)
        tf.cond(is_due, run, lambda: 0)

    def _current_rounds(self) -> OuterRounds:
        """Return the rounds of the current runner, which may be another one than when a graph was traced."""
        assert self.runner is not None
        return self.runner.outer_rounds

    def _call_rounds_on(self, method: Callable[[OuterRounds], None], values: dict[str, tf.Tensor]) -> list[tf.Tensor]:
        """Call a method of the rounds on these values of variables, and return their values after it."""
        rounds = self._current_rounds()
        whole = {name: self.from_tensors(value) for name, value in values.items()}
        # The graph holds the variables' values: for this call rounds work on these, not on the variables themselves.
        model, rounds.model = rounds.model, ModelInGraph(self, whole)
        try:
            with self.representation.computing():
                method(rounds)
        finally:
            rounds.model = model
        return [self.representation.to_tensor(value) for value in whole.values()]

    def flush(self) -> None:
        """Run a last round, so that all ranks have equal variables."""
        if self.runner is not None:
            with self.representation.computing():
                self.runner.outer_rounds.flush()

    def finish_alone(self, averages: "Sequence[keras.Variable]", finish: Callable[[], None]) -> None:
        """Run a last round, and take for anchors what variables become by moving averages, which each rank keeps of its
        own. The averages become their means over ranks first.

        Args:
            averages: the moving averages.
            finish: overwrites variables by the averages.
        """
        self.flush()
        assign_means(self.backend, averages, f"{self.label}.averages")
        finish()
        assert self.runner is not None
        with self.representation.computing():
            self.runner.outer_rounds.take_anchors(anew=True)

    @contextlib.contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Return a context in which variables are those that all ranks share."""
        if self.runner is None:
            yield
            return
        with self.runner.outer_rounds.at_anchor():
            yield

    def check_anchors(self) -> None:
        """Raise if variables were changed in the context of :meth:`at_anchor`, whose end would undo it.

        Raises:
            ConfigError: variables were changed.
        """
        if self.runner is None:
            return
        with self.representation.computing():
            changed = self.runner.outer_rounds.changed_at_anchor()
        if changed:
            raise ConfigError(
                f"{changed[0]!r} was changed while the model had the variables that all ranks share, and training goes "
                "on with this rank's own: leave out callbacks that change weights during evaluations or at the end of "
                "an epoch, as SwapEMAWeights does. With use_ema, fit ends with the mean of all ranks' averages"
            )

    def all_true(self, flag: tf.Tensor) -> tf.Tensor:
        """Return, on all ranks, True if the flag (a scalar) is true on all ranks."""
        self.check_open()
        total = summed(self.backend, tf.reshape(tf.cast(flag, tf.float32), [1]), f"{self.label}.true")
        return tf.reshape(total, []) >= self.backend.size

    def largest(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the maximum over ranks of each element of each tensor."""
        self.check_open()
        return largest(self.backend, tensors, f"{self.label}.largest")

    # -- Python's side of a step -------------------------------------------------------------------------

    def broadcast_initial(self) -> None:
        """Start all ranks from rank 0's values, once.

        Called after the agreement, or when the graph that initializes variables (of a model that was not built) first
        runs.
        """
        if self.needs_broadcast:
            self.needs_broadcast = False
            broadcast_initial(self.variables, self.optimizer_variables(), self.backend)

    def from_tensors(self, value: Any) -> Any:
        """Convert a gradient, or the tensors in nested dicts and lists of a saved state, to those that the exchange
        computes with."""
        return from_tensors(self.representation, value)

    @property
    def strategy(self) -> Strategy | None:
        """Strategy that is executed; None if there is one method for all, or before the first exchange."""
        return None if self.plan is None else self.plan.strategy

    @property
    def traffic(self) -> Traffic:
        """Counts of all that was exchanged so far."""
        return Traffic() if self.runner is None else self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank for a logger, counted since the last call; see :mod:`grace.session.metrics`. No
        collective.

        Where TensorFlow's graph waits (over Horovod), ``seconds_wait`` is NaN.
        """
        waits = self.runner is None or self._starts_from_python(self.runner)
        return metrics(self.runner, self.traffic, waits)

    # -- checkpoints -----------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Return the user's choices as arguments of :func:`~grace.tensorflow.DistributedOptimizer`."""
        plan = self.plan or self.choices.plan(self.settings.limits)
        chosen = plan.options() if self.auto_request is None else {"strategy": self.auto_request.options.spec}
        return {**chosen, **self.settings.arguments()}

    def state(self, everyone: bool = False) -> SavedState | None:
        """Return the state of this rank's compressor and memory (with ``everyone``, by a collective, of all ranks');
        None before the first exchange."""
        if self.runner is None:
            return None if self.saved is None else self.saved[0]
        if self.runner.in_progress:  # in a step that failed: its state is dropped, as it never updated a variable
            self.runner.abort()
        return checkpoint.gather(self.runner) if everyone else checkpoint.save(self.runner)

    def slots(self) -> list[list[Tensor]] | None:
        """Return the values of the slots of all ranks' optimizers, by a collective, if ranks train alone; else None."""
        if self.runner is None or not self.runner.outer_rounds:
            return self.saved_slots
        return self.backend.allgather_object([np.asarray(value_of(slot)) for slot in self.optimizer_slots()])

    def restore(self, saved: SavedState | None, memory: str = "strict") -> None:
        """Continue from a saved state. Before the first exchange it is loaded at the first one, where all ranks receive
        a refusal."""
        checkpoint.check_mode(memory)
        if self.runner is None:
            self.saved = (saved, memory)
            return
        if self.runner.in_progress:
            self.runner.abort()
        self._load(saved, memory)
