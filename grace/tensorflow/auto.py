"""``strategy="auto"`` in TensorFlow: a step's exchange as one Python function, which reports to the planner, so that
graphs need not be traced anew when the strategy changes."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from grace.core.compressor import Tensor
from grace.exchange.sparse_rows import SparseRows
from grace.strategy.execution import StrategyPlan
from grace.strategy.plan import Strategy
from grace.tensorflow.graph_exchange import HostRun
from grace.tensorflow.graph_tensors import concatenated, dtypes_of, flattened, packed
from grace.tensorflow.session import Session
from grace.tensorflow.sharding import Gradient, Pair

if TYPE_CHECKING:  # the planner is loaded only by who asks for it
    from grace.planner.driver import Driver

ADAPTIVE = ("beta_1", "rho", "initial_accumulator_value")
"""Hyperparameters of optimizers that divide each element by its history."""


class PlannedRun(HostRun):
    """A step whose buckets may be others in the next one. They begin when all gradients are there."""

    def run(self, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[Pair]:
        """Run the step at once, eagerly; a value is None where no rank had a gradient."""
        driver = self.session.driver
        assert driver is not None  # or the session runs a HostRun
        if driver.steps_left:
            for name in self.index_of:
                driver.ready(name)
        driver.computed(lambda: self._copies(gradients))
        pairs = super().run(gradients, rate)
        driver.exchanged()
        driver.stepped()
        return pairs

    def _copies(self, gradients: Sequence[Gradient]) -> dict[str, Tensor]:
        """Return copies of the dense gradients that this rank has, by name: the planner measures methods on them."""
        with self.session.representation.computing():
            inside = {
                name: self.session.from_tensors(gradients[i]) for name, i in self.index_of.items() if self.present[i]
            }
            return {name: x + 0 for name, x in inside.items() if not isinstance(x, SparseRows)}

    def add_to_graph(self, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[Pair]:
        """Return the results of an operation that runs the step when the graph runs."""
        variables, traced, delayed_ids = self.runner.variables, self.runner, self.session.delayed_ids
        like = list(gradients)

        def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
            session = self.session
            assert session.runner is not None
            # The graph has these around the step.
            if session.runner.outer_rounds or traced.outer_rounds or session.delayed_ids != delayed_ids:
                session.check_current(traced)
            session.broadcast_initial()
            run = PlannedRun(session, session.runner, self.present)
            pairs = run.run(tf.nest.pack_sequence_as(like, tensors[:-1]), tensors[-1])
            return concatenated(flattened(v, value) for v, (value, _) in zip(variables, pairs, strict=True))

        flat = tf.py_function(step, [*tf.nest.flatten(like), rate], dtypes_of(variables))
        pairs = packed(variables, flat)
        return [pairs[variable.name] for variable in variables]


def is_adaptive(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if an optimizer divides each element by its history: Adam, RMSprop, Adagrad and their like."""
    return any(hasattr(optimizer, name) for name in ADAPTIVE)


def driver_of(session: Session) -> "Driver":
    """Return the driver that plans for a session."""
    from grace.planner.driver import build_driver

    me = weakref.proxy(session)  # which holds the driver

    def do(strategy: Strategy) -> None:
        me.switch(StrategyPlan(strategy))

    assert session.auto_request is not None
    assert session.runner is not None
    assert session.strategy is not None  # the one that planning starts from
    return build_driver(session.auto_request, session.runner, session.strategy, do, session.adaptive)
