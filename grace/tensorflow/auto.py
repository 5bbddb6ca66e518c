"""``strategy="auto"`` in TensorFlow: a step's exchange as one Python function, so that graphs need not be traced anew
when the strategy changes, and what the planner is told of it."""

import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from grace.core.variable import Variable
from grace.exchange.sparse_rows import SparseRows
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy
from grace.tensorflow.graph_exchange import HostRun
from grace.tensorflow.graph_tensors import dtypes_of, flags, packed, zeros
from grace.tensorflow.sharding import Pair
from grace.tensorflow.switching import check_current, switch

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.auto_request import AutoRequest
    from grace.planner.driver import Driver

ADAPTIVE = ("beta_1", "rho", "initial_accumulator_value")
"""Hyperparameters of optimizers that divide each element by its history."""


class PlannedRun(HostRun):
    """A step whose buckets may be others in the next one. They begin when all gradients are there."""

    def run(self, given: Sequence[Any], rate: Any) -> list[Pair]:
        """At once, eagerly; a value is None where no rank had a gradient."""
        auto = self.session.auto
        if auto.left:
            for name in self.place:
                auto.ready(name)
        auto.computed(lambda: self._copies(given))
        pairs = super().run(given, rate)
        auto.exchanged()
        auto.stepped()
        return pairs

    def _copies(self, given: Sequence[Any]) -> dict[str, Any]:
        with self.session.medium.computing():
            inside = {name: self.session.inside(given[i]) for name, i in self.place.items() if self.present[i]}
            return {name: x + 0 for name, x in inside.items() if not isinstance(x, SparseRows)}

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """An operation that does it when the graph runs."""
        variables, like, traced, late = self.runner.variables, list(given), self.runner, self.session.late

        def step(*tensors: Any) -> list[tf.Tensor]:
            session = self.session
            if session.runner.averages or traced.averages or session.late != late:  # which the graph has around this
                check_current(session, traced)
            session.start_equal()
            run = PlannedRun(session, session.runner, self.present)
            pairs = run.run(tf.nest.pack_sequence_as(like, tensors[:-1]), tensors[-1])
            return [tensor for v, (value, _) in zip(variables, pairs, strict=True) for tensor in _flat(v, value)]

        flat = tf.py_function(step, [*tf.nest.flatten(like), rate], dtypes_of(variables))
        pairs = packed(variables, flat)
        return [pairs[variable.name] for variable in variables]


def _flat(variable: Variable, value: Any) -> list[tf.Tensor]:
    """What a variable brought, as :func:`dtypes_of` says."""
    found = flags()[value is not None]
    value = zeros(variable) if value is None else value
    if variable.sparse:
        return [tf.cast(value.values, tf.float32), tf.cast(value.rows, tf.int32), found]
    return [tf.cast(value, variable.dtype), found]


def is_adaptive(optimizer: Any) -> bool:
    """Return True if an optimizer divides each element by its history: Adam, RMSprop, Adagrad and their like."""
    return any(hasattr(optimizer, name) for name in ADAPTIVE)


def requested(choices: Choices) -> "AutoRequest | None":
    """Return the request for ``strategy="auto"``; None if the user chose something else.

    Raises:
        ConfigError: it has a parameter that is none, or one of a wrong value.
    """
    if not choices.asks_for_auto:
        return None
    from grace.planner.auto_request import auto_request

    return auto_request(choices)


def driver_of(session: Any) -> "Driver":
    """Return what follows a session's steps."""
    from grace.planner.driver import Driver
    from grace.planner.planning import Planning

    me = weakref.proxy(session)  # which holds the driver
    backend, runner, request = session.backend, session.runner, session.asked

    def do(strategy: Strategy) -> None:
        switch(me, StrategyPlan(strategy))

    def say(line: str) -> None:
        if backend.rank == 0:
            print(line, file=sys.stderr, flush=True)

    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    planning = Planning(request, backend, runner.node_names, runner.variables, "tensorflow", threads, session.adaptive)
    driver = Driver(planning, backend, session.strategy, do, say, request.options.replan)
    runner.planned = driver.document
    return driver
