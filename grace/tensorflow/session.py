"""The session of one model in TensorFlow: its variables, the runner of its steps, and the exchange of its gradients,
eagerly and in graphs."""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import tensorflow as tf

from grace.core.api_names import KERAS
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.exchange.bucket import Bucket, Traffic
from grace.exchange.header import CYCLE, digest
from grace.exchange.sparse_rows import SparseRows
from grace.kernels.tensorflow.graph_numbers import refuse_xla
from grace.session import checkpoint
from grace.session.agreement import gather_or_raise
from grace.session.exchange_plan import ExchangePlan
from grace.session.hierarchy import advise_hierarchy
from grace.session.metrics import metrics
from grace.session.settings import Settings
from grace.session.setup import build_step_runner
from grace.session.step_runner import AnyRoundTrip, StepRunner
from grace.session.switching import build_replacement
from grace.session.versions import public
from grace.strategy.choices import AutoRequest, Choices
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy
from grace.tensorflow import rounds
from grace.tensorflow.auto import PlannedRun, driver_of
from grace.tensorflow.distribute import refuse_distribute
from grace.tensorflow.graph_exchange import GraphRun, HostRun
from grace.tensorflow.reductions import largest, summed
from grace.tensorflow.representation import Tensors, inside, medium_of
from grace.tensorflow.sharding import Flag, Gradient, Pair
from grace.tensorflow.variables import (
    AnyVariable,
    broadcast_initial,
    describe_variable,
    names_as_saved,
    names_match,
    names_of,
    value_of,
)

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.driver import Driver

TapeGradient = Union["tf.Tensor", "tf.IndexedSlices", None]
"""Gradient as tapes and optimizers give it; None for a variable that this rank has no gradient of."""
_sessions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of sessions that began over each set of ranks: the operations of two sessions must have different names."""


class Mean(NamedTuple):
    """Mean (or sum) over ranks of one variable's gradients.

    ``found`` is True if any rank had a gradient: a bool, or a scalar tensor where a graph computes it. ``value`` (a
    tensor or tf.IndexedSlices) is zeros if no rank had one, or None where that is known.
    """

    value: "tf.Tensor | tf.IndexedSlices | None"
    found: Flag


class Session:
    """Exchange of the gradients of a list of variables, step by step.

    The exchange begins with the first gradients, which tell the sparse variables. Then the ranks compare their
    variables and settings, and start from rank 0's values.

    Args:
        choices: compressor, memory, communicator and strategy as the user gave them.
        backend: the engine.
        settings: the user's other choices.
        check: raises if a communicator does not suit the optimizer.
        averages: True if :meth:`hold` is called before each update, and :meth:`run_rounds` after it.
        beside: returns further variables that start from rank 0's, where ranks have different ones.
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
        averages: bool = False,
        beside: Callable[[], Sequence[AnyVariable]] = lambda: (),
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
        self.averages = averages
        self.facts = facts
        self.adaptive = adaptive
        self.beside = beside
        self.lr = 1.0
        predivide = settings.reduction.predivide
        self.context = Context(seed=settings.seed, lr=lambda name: self.lr, predivide=predivide, api_names=KERAS)
        self.variables: list[AnyVariable] = []
        self.names: list[str] = []
        self.runner: StepRunner | None = None
        self.closed = False
        self.saved: tuple[dict[str, Any] | None, str] | None = None
        """State to load at the first exchange, and how memories are treated."""
        self.plan: ExchangePlan | None = None
        self.auto_request: AutoRequest | None = None
        self.auto: Driver | None = None
        self.late: set[int] = set()
        """Ids of variables whose means are delayed: a step may bring no mean of them yet."""
        self.missing_everywhere: list[bool] = []
        """True for each variable that no rank had a gradient for when the exchange began."""
        self._function: Callable[..., list[Mean]] | None = None
        """The step as a graph, for engines whose eager operations block one another."""
        self.needs_broadcast = settings.broadcast
        """True until all ranks have started from rank 0's values."""
        self.needs_lr = False
        self.medium = Tensors()

    @functools.cached_property
    def label(self) -> str:
        """Prefix of the names of this session's operations. It has the session's number among those that began a
        collective, which all ranks do in one order; a session that exists on one rank only does not count."""
        ranks = getattr(self.backend, "process_set", self.backend)
        _sessions[ranks] = number = _sessions.get(ranks, 0) + 1
        return f"grace.{number}"

    # -- start -----------------------------------------------------------------------------------------

    def _prepare(self, variables: Sequence[AnyVariable], gradients: Sequence[TapeGradient]) -> StepRunner:
        if self.runner is None:
            with tf.init_scope():  # eagerly, also while a graph is traced: the collectives of the start run once
                try:
                    self._build(variables, gradients)
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

        def described() -> list[Variable]:
            self.settings.check()
            return [describe_variable(n, v, rows) for n, v, rows in zip(names, variables, sparse, strict=True)]

        facts = [
            ("TensorFlow", public(tf.__version__)),
            ("an optimizer, not a tape:", str(self.averages)),
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
        runner.hyperparameters = lambda: [("the learning rate", f"{self.lr:g}")]  # for errors about ranks that differ
        self.auto = driver_of(self) if self.auto_request else None
        if self.saved is None:  # another rank may have loaded a checkpoint: all refuse together
            checkpoint.compare(self.backend, checkpoint.NOTHING, "strict")
        else:
            self._load(*self.saved)
            # in the middle of a period ranks have parameters of their own, which were loaded
            self.needs_broadcast = self.needs_broadcast and not runner.outer_rounds.has_anchors
        # where a graph initializes variables, it also starts them equal: they have no values yet
        if all(rank_initialized for *_, rank_initialized in received):
            self.start_equal()

    def check_plan(self, runner: StepRunner) -> None:
        """Raise ConfigError if the runner of a plan does not suit this session."""
        self.settings.check_votes(runner.communicators)
        if runner.outer_rounds and not self.averages:
            raise ConfigError(
                "outer rounds, and sync none(period), come after the optimizer's step, which a tape does not know: use "
                "grace.DistributedOptimizer"
            )

    def use_runner(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Continue with this runner, made from this plan. Called between two steps."""
        self.runner = runner
        self.plan = plan
        self.medium = medium_of(runner)
        self._function = None  # traced for the former runner
        runner.computing = self.medium.computing
        self.needs_lr = any(communicator.memory.needs_lr for communicator in runner.communicators)
        self.late = {id(value_of(self.variables[i])) for i in self._delayed(runner)}
        for bucket in runner.buckets:  # Horovod's errors name operations: put a variable's name into theirs
            bucket.label = f"{self.label}.{bucket.index}.{re.sub('[^A-Za-z0-9_.]', '_', bucket.variables[0].name)}"
        for i, bucket in enumerate(runner.outer_rounds.buckets):
            bucket.label = f"{self.label}.outer.{i}"
        rounds.connect(self)

    def _choose(self, facts: list[tuple[str, str]]) -> ExchangePlan:
        request = self.auto_request = self.choices.auto_request()
        choices = self.choices
        if request is not None:
            self.settings.check_auto()
            facts += [("the strategy", request.options.spec)]
            choices = request.starting_choices(choices)
        self.plan = choices.plan(self.settings.limits)
        return self.plan

    def _load(self, saved: dict[str, Any] | None, memory: str) -> None:
        former, auto = self.runner, self.auto
        assert former is not None
        if auto is None:
            checkpoint.load(former, lambda: saved, memory, self.inside)
            return
        checkpoint.compare(former.backend, saved, memory)
        resumed = auto.resumed_from(saved)
        if resumed is None:  # the memories that fit go into the run's own plan
            checkpoint.load(former, lambda: saved, "keep" if memory == "strict" else memory, self.inside)
            return
        runner = build_replacement(former, StrategyPlan(resumed.strategy), self.check)
        try:
            checkpoint.load(runner, lambda: saved, memory, self.inside)
        except BaseException:
            runner.close()
            raise
        former.close()
        self.use_runner(runner, StrategyPlan(resumed.strategy))
        auto.resume(resumed)

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
        refuse_xla()
        refuse_distribute()
        if self.closed:
            raise ExchangeError(
                "this exchange was closed, and a graph that was traced before still wants it: call model.compile "
                "again, or trace your function anew"
            )

    # -- a step ----------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def __call__(
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
        index_of = {id(value_of(v)): i for i, v in enumerate(self.variables)}
        if [index_of.get(id(value_of(v))) for v in variables] != list(range(len(self.variables))):
            raise ConfigError(
                f"the exchange was begun with {len(self.variables)} variables ({', '.join(self.names[:3])}, ...); give "
                "it the same ones in the same order at every step, with None where there is no gradient"
            )
        present = tuple(gradient is not None for gradient in gradients)
        converted = [self._to_exchange(i, gradient) for i, gradient in enumerate(gradients)]
        # Both numbers of the step stamp travel to Python in one tensor; a float32 holds any number below CYCLE.
        number = 0 if updates is None else tf.cast(updates, tf.int64) % CYCLE
        rate = tf.stack([tf.cast(1.0 if lr is None else lr, tf.float32), tf.cast(number, tf.float32)])
        if tf.executing_eagerly() and self._starts_from_python(runner):
            run = HostRun if self.auto is None else PlannedRun
            return self._to_means(run(self, runner, present).run(converted, rate))
        if not tf.executing_eagerly():
            return self._in_graph(converted, present, rate)
        # Eagerly each of the engine's operations blocks; in a graph they are under way together.
        if self._function is None:
            self._function = tf.function(self._in_graph, autograph=False, reduce_retracing=True)
        means = self._function(converted, present, rate)
        return [Mean(m.value if bool(m.found) else None, bool(m.found)) for m in means]

    def _in_graph(self, converted: list[Gradient], present: tuple[bool, ...], rate: tf.Tensor) -> list[Mean]:
        assert self.runner is not None
        driven = HostRun if self.auto is None else PlannedRun
        run = driven if self._starts_from_python(self.runner) else GraphRun
        means = run(self, self.runner, present).in_graph(converted, rate)
        return [Mean(*self._to_own_dtype(i, value, found)) for i, (value, found) in enumerate(means)]

    def _starts_from_python(self, runner: StepRunner) -> bool:
        """Return True if Python starts one collective after the other; False if a graph holds the engine's
        operations."""
        if not self.backend.pairs_by_name or self.auto is not None:
            return True
        # A graph has the same collectives at every step; these communicators have others in some steps.
        return any(c.moves_payloads or c.compress_after for c in runner.communicators)

    def _to_exchange(self, i: int, gradient: TapeGradient) -> Gradient:
        """Return a gradient as the exchange takes it: a tensor, or :class:`SparseRows`."""
        assert self.runner is not None
        variable = self.runner.variables[i]
        if variable.sparse:
            if gradient is None:
                return SparseRows(tf.zeros([0, *variable.shape[1:]], variable.dtype), tf.zeros([0], tf.int64))
            if not isinstance(gradient, tf.IndexedSlices):
                return SparseRows(gradient, tf.range(variable.shape[0], dtype=tf.int64))
            return SparseRows(gradient.values, tf.cast(gradient.indices, tf.int64))
        if gradient is None:
            return tf.zeros(variable.shape, variable.dtype)
        return tf.cast(tf.convert_to_tensor(gradient), variable.dtype)

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

    @tf.autograph.experimental.do_not_convert
    def take_anchors(self) -> None:
        """Take the variables that ranks train alone for anchors, before their first update."""
        rounds.take_anchors(self)

    @tf.autograph.experimental.do_not_convert
    def run_rounds(self) -> None:
        """Run the outer rounds that are due. Called after the optimizer's step."""
        rounds.run_rounds(self)

    def flush(self) -> None:
        """Run a last round, so that all ranks have equal variables."""
        if self.runner is not None:
            with self.medium.computing():
                self.runner.outer_rounds.flush()

    @contextlib.contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Return a context in which variables are those that all ranks share."""
        if self.runner is None:
            yield
            return
        with self.runner.outer_rounds.at_anchor():
            yield

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

    def start_equal(self) -> None:
        """Start all ranks from rank 0's values, once.

        Called after the agreement, or when the graph that initializes variables (of a model that was not built) first
        runs.
        """
        if self.needs_broadcast:
            self.needs_broadcast = False
            broadcast_initial(self.variables, self.beside(), self.backend)

    def start(
        self, bucket: Bucket, gradients: Sequence[Gradient], present: Sequence[bool], rate: tf.Tensor
    ) -> AnyRoundTrip:
        """Start the exchange of one bucket, with eager tensors."""
        assert self.runner is not None
        self.check_open()
        # Only one bucket of a step carries the step stamp; reading the tensor costs as much as compressing a small one.
        if self.needs_lr or bucket.carries_stamps:
            self.lr, updates = map(float, np.asarray(rate))
            self.context.updates = int(updates)
            self.context.hyperparameter_digest = digest(self.lr)
        return self.runner.start(bucket, [self.inside(gradient) for gradient in gradients], present)

    def inside(self, value: Any) -> Any:
        """Convert a gradient, or the tensors in nested dicts and lists of a saved state, to those that the exchange
        computes with."""
        return inside(self.medium, value)

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

    def state(self, everyone: bool = False) -> dict[str, Any] | None:
        """Return the state of this rank's compressor and memory (with ``everyone``, by a collective, of all ranks');
        None before the first exchange."""
        if self.runner is None:
            return None if self.saved is None else self.saved[0]
        if self.runner.in_progress:  # in a step that failed: its state is dropped, as it never updated a variable
            self.runner.abandon()
        return checkpoint.gather(self.runner) if everyone else checkpoint.save(self.runner)

    def restore(self, saved: dict[str, Any] | None, memory: str = "strict") -> None:
        """Continue from a saved state. Before the first exchange it is loaded at the first one, where all ranks receive
        a refusal."""
        checkpoint.check_mode(memory)
        if self.runner is None:
            self.saved = (saved, memory)
            return
        if self.runner.in_progress:
            self.runner.abandon()
        self._load(saved, memory)
