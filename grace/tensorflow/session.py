"""The variables of one model, their runner, and the way of gradients through it, eagerly and in graphs."""

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from grace.core.api_names import KERAS
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.exchange.bucket import Bucket, Traffic
from grace.exchange.sparse_rows import SparseRows
from grace.exchange.step_stamp import CYCLE, digest
from grace.kernels.tensorflow.graph_numbers import refuse_xla
from grace.planner.asked import Asked, asked, started
from grace.planner.driver import Driver
from grace.planner.resuming import load
from grace.session import checkpoint
from grace.session.agreement import gather_or_raise
from grace.session.metrics import metrics
from grace.session.plan import ExchangePlan
from grace.session.settings import Settings
from grace.session.setup import build_step_runner
from grace.session.step_runner import StepRunner
from grace.session.versions import public
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyPlan
from grace.tensorflow.auto import PlannedRun, driver_of
from grace.tensorflow.averaging import average
from grace.tensorflow.distribute import refuse_distribute
from grace.tensorflow.graph_exchange import GraphRun, HostRun
from grace.tensorflow.reductions import largest, summed
from grace.tensorflow.representation import Tensors, inside, medium_of
from grace.tensorflow.variables import alike, described_as, names_as_saved, names_of, start_alike, value_of

_sessions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many began over each set of ranks: the operations of one must not have another's names."""


class Mean(NamedTuple):
    """What the exchange made of one variable's gradients.

    ``found`` tells whether any rank had one: a bool, or a scalar tensor where a graph has none to give; ``value``
    (a tensor or tf.IndexedSlices) is zeros if not, or None where that is known.
    """

    value: Any
    found: Any


class Session:
    """Exchanges the gradients of a list of variables, step by step.

    Nothing happens before the first gradients are there: they tell which variables are sparse. Then the ranks
    compare their variables and settings, and start from rank 0's values.

    Args:
        choices: compressor, memory, communicator and strategy as the user gave them.
        backend: the engine.
        settings: what else the user chose.
        check: raises if a communicator does not suit the optimizer.
        averages: whether somebody calls :meth:`average` after each step.
        beside: further variables that start from rank 0's, where ranks have different ones.
        facts: further facts that all ranks must share, asked for at the first exchange.
    """

    def __init__(
        self,
        choices: Choices,
        backend: Backend,
        settings: Settings,
        *,
        check: Callable[[Communicator], None] = lambda communicator: None,
        averages: bool = False,
        beside: Callable[[], Sequence[Any]] = lambda: (),
        facts: Callable[[], Sequence[tuple[str, str]]] = lambda: (),
    ):
        if backend.framework not in ("", "tensorflow"):
            raise ConfigError(
                f"this run was joined for {backend.framework} ({backend.describe()}), and this is TensorFlow. Call "
                "grace.init(framework='tensorflow') under horovodrun or mpirun"
            )
        self.choices, self.backend, self.settings = choices, backend, settings
        self.check, self.averages, self.facts, self.beside = check, averages, facts, beside
        self.lr = 1.0
        predivide = settings.reduction.predivide
        self.context = Context(seed=settings.seed, lr=lambda name: self.lr, predivide=predivide, api_names=KERAS)
        self.variables: list[Any] = []
        self.names: list[str] = []
        self.runner: StepRunner | None = None
        self.closed = False
        self.saved: tuple[Any, str] | None = None
        self.plan: ExchangePlan | None = None
        self.asked: Asked | None = None
        self.auto: Driver | None = None
        self.due: list[int] = []
        """The ids of the buckets that are averaged after this step."""
        self.late: set[int] = set()
        """The ids of variables of which a step may bring nothing yet."""
        self.nowhere: list[bool] = []
        """Of each, whether no rank had a gradient for it when the exchange began."""
        self._function: Any = None
        self.unequal, self.needs_lr = settings.broadcast, False
        self.medium = Tensors()

    @functools.cached_property
    def label(self) -> str:
        """What its operations' names begin with: by its number among those that began a collective, which all ranks
        do in one order; one that a rank only made does not count."""
        ranks = getattr(self.backend, "process_set", self.backend)
        _sessions[ranks] = number = _sessions.get(ranks, 0) + 1
        return f"grace.{number}"

    # -- start -----------------------------------------------------------------------------------------

    def _prepare(self, variables: Sequence[Any], gradients: Sequence[Any]) -> StepRunner:
        if self.runner is None:
            with tf.init_scope():  # once, also while a graph is traced
                try:
                    self._build(variables, gradients)
                except BaseException:
                    self.runner = None
                    raise
        assert self.runner is not None
        return self.runner

    def _build(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        names = names_as_saved(names_of(variables), variables, self.saved and self.saved[0])
        sparse_too = not self.settings.sparse_as_dense
        mine = [(sparse_too and isinstance(g, tf.IndexedSlices), g is not None) for g in gradients]
        made = all(value_of(v).is_initialized() for v in variables)  # or a graph does it when it runs
        told = gather_or_raise(self.backend, "TensorFlow's variables", (names, mine, bool(made)))
        names = told[0][0] if alike(names, told[0][0]) else names
        same = [flags for _, flags, _ in told if len(flags) == len(names)]  # others are refused below
        sparse, present = ([any(rank[i][j] for rank in same) for i in range(len(names))] for j in (0, 1))
        self.nowhere = [not found for found in present]

        def described() -> list[Variable]:
            self.settings.check()
            return [described_as(n, v, rows) for n, v, rows in zip(names, variables, sparse, strict=True)]

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
        self.check_plan(runner)
        self.variables, self.names = list(variables), names
        assert self.plan is not None
        self.take(runner, self.plan)
        runner.hyperparameters = lambda: [("the learning rate", f"{self.lr:g}")]
        self.auto = driver_of(self) if self.asked else None
        if self.saved is None:
            checkpoint.compare(self.backend, checkpoint.NOTHING, "strict")
        else:
            self._load(*self.saved)
        if all(everywhere for *_, everywhere in told):
            self.start_equal()

    def check_plan(self, runner: StepRunner) -> None:
        """Raise if what was made of a plan does not suit this."""
        self.settings.check_votes(runner.communicators)
        if runner.averages and not self.averages:
            raise ConfigError(
                "sync none(period) averages variables after the optimizer's step, which a tape does not know: use "
                "grace.DistributedOptimizer"
            )

    def take(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Go on by this runner, which is of this plan, between two steps."""
        self.runner, self.plan = runner, plan
        self.medium, self._function = medium_of(runner), None
        runner.computing = self.medium.computing
        self.needs_lr = any(communicator.memory.needs_lr for communicator in runner.communicators)
        self.late = {id(value_of(self.variables[i])) for i in self._delayed(runner)}
        for bucket in runner.buckets:  # Horovod's errors name operations: let them say a variable
            bucket.label = f"{self.label}.{bucket.index}.{re.sub('[^A-Za-z0-9_.]', '_', bucket.variables[0].name)}"

    def _choose(self, facts: list[tuple[str, str]]) -> ExchangePlan:
        wanted = self.asked = asked(self.choices)
        if wanted:
            self.settings.check_auto()
        facts += [("the strategy", wanted.options.spec)] if wanted else []
        self.plan = (started(self.choices) if wanted else self.choices).plan(self.settings.limits)
        return self.plan

    def _load(self, saved: Any, memory: str) -> None:
        former, auto = self.runner, self.auto
        assert former is not None
        if auto is None:
            checkpoint.load(former, lambda: saved, memory, self.inside)
            return
        runner, resumed = load(former, auto, saved, memory, self.inside, self.check)
        if resumed is not None:
            former.close()
            self.take(runner, StrategyPlan(resumed.strategy))
            auto.resume(resumed)

    def _delayed(self, runner: StepRunner) -> list[int]:
        """The places of variables of which a step may bring nothing yet."""
        shards = runner.shards_of
        late = [any(p.communicator.delayed for p in shards[v.name]) for v in runner.variables]
        return [i for i, is_late in enumerate(late) if is_late]

    def close(self) -> None:
        """End the exchange: components given by the user may serve another one. No collective."""
        if self.runner is not None:
            self.runner.close()
        self.closed = True

    def check_open(self) -> None:
        """Raise if it has ended, or cannot be in this graph."""
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
        self, gradients: Sequence[Any], variables: Sequence[Any], lr: Any = None, updates: Any = None
    ) -> list[Mean]:
        """Exchange the gradients of all ranks; the same variables at every call.

        Args:
            gradients: tensors, tf.IndexedSlices or None.
            variables: whose they are.
            lr: the learning rate, for memories that follow it; all ranks must have the same.
            updates: how many steps the optimizer has made, likewise.
        """
        self.check_open()
        runner = self._prepare(variables, gradients)
        place = {id(value_of(v)): i for i, v in enumerate(self.variables)}
        if [place.get(id(value_of(v))) for v in variables] != list(range(len(self.variables))):
            raise ConfigError(
                f"the exchange was begun with {len(self.variables)} variables ({', '.join(self.names[:3])}, ...); give "
                "it the same ones in the same order at every step, with None where there is no gradient"
            )
        present = tuple(gradient is not None for gradient in gradients)
        given = [self._entering(i, gradient) for i, gradient in enumerate(gradients)]
        number = 0 if updates is None else tf.cast(updates, tf.int64) % CYCLE  # which a float32 holds
        rate = tf.stack([tf.cast(1.0 if lr is None else lr, tf.float32), tf.cast(number, tf.float32)])
        if tf.executing_eagerly() and self._driven(runner):
            run = HostRun if self.auto is None else PlannedRun
            return self._leaving(run(self, runner, present).run(given, rate))
        if not tf.executing_eagerly():
            return self._in_graph(given, present, rate)
        # the engine's operations block when they are run one by one; in a graph they are under way together
        if self._function is None:
            self._function = tf.function(self._in_graph, autograph=False, reduce_retracing=True)
        means = self._function(given, present, rate)
        return [Mean(m.value if bool(m.found) else None, bool(m.found)) for m in means]

    def _in_graph(self, given: list[Any], present: tuple[bool, ...], rate: tf.Tensor) -> list[Mean]:
        assert self.runner is not None
        driven = HostRun if self.auto is None else PlannedRun
        run = driven if self._driven(self.runner) else GraphRun
        means = run(self, self.runner, present).in_graph(given, rate)
        return [Mean(*self._typed(i, value, found)) for i, (value, found) in enumerate(means)]

    def _driven(self, runner: StepRunner) -> bool:
        """Whether Python starts one collective after the other."""
        if not self.backend.pairs_by_name or self.auto is not None:
            return True
        # A graph's collectives are the same at every step.
        return any(c.moves_payloads or c.compress_after for c in runner.communicators)

    def _entering(self, i: int, gradient: Any) -> Any:
        """A gradient as the exchange takes it: a tensor, or :class:`SparseRows`."""
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

    def _leaving(self, outcomes: list[tuple[Any, Any]]) -> list[Mean]:
        return [Mean(None, False) if v is None else Mean(*self._typed(i, v, f)) for i, (v, f) in enumerate(outcomes)]

    def _typed(self, i: int, value: Any, found: Any) -> tuple[Any, Any]:
        assert self.runner is not None
        variable = self.runner.variables[i]
        if isinstance(value, SparseRows):
            values = tf.cast(value.values, variable.dtype)
            return tf.IndexedSlices(values, value.rows, tf.constant(variable.shape, tf.int32)), found
        return tf.cast(value, variable.dtype), found

    @tf.autograph.experimental.do_not_convert
    def average(self) -> None:
        """After the optimizer's step: average what ranks train on their own, if it is time to."""
        average(self)

    def all_true(self, flag: tf.Tensor) -> tf.Tensor:
        """Whether the flag (a scalar) is true on all ranks, on all ranks."""
        self.check_open()
        total = summed(self.backend, tf.reshape(tf.cast(flag, tf.float32), [1]), f"{self.label}.true")
        return tf.reshape(total, []) >= self.backend.size

    def largest(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return, for each of the tensors, the largest of each element over ranks."""
        self.check_open()
        return largest(self.backend, tensors, f"{self.label}.largest")

    # -- Python's side of a step -------------------------------------------------------------------------

    def start_equal(self) -> None:
        """Let all ranks start from rank 0's values, once: after the agreement, or when the graph that makes variables
        (of a model that was not built) first runs."""
        if self.unequal:
            self.unequal = False
            start_alike(self.variables, self.beside(), self.backend)

    def start(self, bucket: Bucket, gradients: Sequence[Any], present: Sequence[bool], rate: Any) -> Any:
        """Begin the exchange of one bucket, with eager tensors."""
        assert self.runner is not None
        self.check_open()
        if self.needs_lr or bucket.carries:
            self.lr, updates = map(float, np.asarray(rate))
            self.context.updates, self.context.settings = int(updates), digest(self.lr)
        return self.runner.start(bucket, [self.inside(gradient) for gradient in gradients], present)

    def inside(self, value: Any) -> Any:
        """A gradient, or nested dicts and lists of what was saved, as the exchange computes with it."""
        return inside(self.medium, value)

    @property
    def strategy(self) -> Any:
        """The strategy that is executed; None if there is one method for all, or before the first exchange."""
        return None if self.plan is None else self.plan.strategy

    @property
    def traffic(self) -> Traffic:
        """What was exchanged so far, counted."""
        return Traffic() if self.runner is None else self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank for a logger, since the last call; see :mod:`grace.session.metrics`. No collective.

        Where TensorFlow's graph waits (over Horovod), ``seconds_wait`` is NaN.
        """
        waits = self.runner is None or self._driven(self.runner)
        return metrics(self.runner, self.traffic, waits)

    # -- checkpoints -----------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The user's choices, as :func:`~grace.tensorflow.DistributedOptimizer` takes them."""
        plan = self.plan or self.choices.plan(self.settings.limits)
        chosen = plan.options() if self.asked is None else {"strategy": self.asked.options.spec}
        return {**chosen, **self.settings.arguments()}

    def state(self, everyone: bool = False) -> dict[str, Any] | None:
        """What this rank (or, by a collective, everyone) remembers; None before anything was exchanged."""
        if self.runner is None:
            return None if self.saved is None else self.saved[0]
        if self.runner.begun:  # in a step that failed: its state is dropped, as it never updated a variable
            self.runner.abandon()
        return checkpoint.gather(self.runner) if everyone else checkpoint.save(self.runner)

    def restore(self, saved: dict[str, Any] | None, memory: str = "strict") -> None:
        """Go on from a state. If there was no exchange yet: at the first one, where all ranks hear of a refusal."""
        checkpoint.check_mode(memory)
        if self.runner is None:
            self.saved = (saved, memory)
            return
        if self.runner.begun:
            self.runner.abandon()
        self._load(saved, memory)
