"""An exchange inside a graph: Python functions of eager tensors, and the engine's collectives between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from grace.core.waiting import Wait, waits
from grace.errors import ExchangeError
from grace.exchange.bucket import Contribution, Group, Outcome, Traffic
from grace.exchange.sparse_rows import Slices
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.exchanger import Exchanger
from grace.session.sharding import Piece
from grace.tensorflow.sharding import Pair, cut, joined


class Run:
    """One step's exchange, as often as the step is run.

    Args:
        session: whose gradients.
        exchanger: its exchanger.
        present: which variables have a gradient on this rank.
    """

    def __init__(self, session: Any, exchanger: Exchanger, present: Sequence[bool]):
        self.session, self.exchanger = session, exchanger
        self.place = {variable.name: i for i, variable in enumerate(exchanger.variables)}
        self.present = list(present)
        self.pieces = [piece for piece in exchanger.pieces.values() if not piece.period]
        self.order = {piece.variable.name: i for i, piece in enumerate(self.pieces)}

    def of(self, group: Group, given: Sequence[Any]) -> list[Any]:
        """A group's pieces of the variables' gradients."""
        pieces = [self.exchanger.pieces[variable.name] for variable in group.variables]
        return [cut(piece, given[self.place[piece.whole.name]]) for piece in pieces]

    def begin(self, group: Group, pieces: Sequence[Any], rate: Any) -> Any:
        """Start a group, with eager tensors."""
        wholes = [self.exchanger.pieces[variable.name].whole.name for variable in group.variables]
        return self.session.start(group, pieces, [self.present[self.place[name]] for name in wholes], rate)

    def wholes(self, pairs: dict[str, Pair], given: Sequence[Any]) -> list[Pair]:
        """What the exchange brought for each variable, from what it brought for each piece."""

        def own(piece: Piece) -> Pair:
            place = self.place[piece.whole.name]
            return cut(piece, given[place]), self.present[place]

        pairs = {name: (self._times(name, value), found) for name, (value, found) in pairs.items()}
        return [joined(self.exchanger.pieces_of[v.name], pairs, own) for v in self.exchanger.variables]

    def _times(self, name: str, value: Any) -> Any:
        """The aggregate of a piece, as a mean or a sum."""
        votes = self.exchanger.pieces[name].communicator.compressor.votes
        factor = self.session.reduction.factor(votes, self.exchanger.backend.size)
        if value is None or factor == 1:
            return value
        if isinstance(value, Slices):
            return Slices(self._times(name, value.values), value.rows)
        return value * tf.cast(factor, value.dtype)

    def outs(self, group: Group) -> list[Any]:
        """Where the aggregates of a group are written."""
        return self.session.medium.outs(group)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The context of what an exchange computes; what one that fails has begun is forgotten."""
        try:
            with self.session.medium.computing():
                yield
        except BaseException:
            waits.pop(id(self), None)
            self.exchanger.abandon()
            raise

    def tensors(self, outcomes: Sequence[Outcome]) -> list[tf.Tensor]:
        """What a Python function hands back to the graph: each variable's value (and rows), and whether any rank had
        a gradient; see :func:`_dtypes`."""
        flat: list[Any] = []
        for outcome in outcomes:
            variable, found = outcome.variable, outcome.value is not None
            value: Any = self.outside(outcome.value) if found else _zeros(variable)
            if variable.sparse:
                flat += [value.values, tf.cast(value.rows, tf.int32)]
            else:
                flat.append(value if value.dtype == variable.dtype else tf.cast(value, variable.dtype))
            flat.append(tf.constant(found))
        return flat

    def outside(self, value: Any) -> Any:
        """What an exchange brought, as tensors."""
        outside = self.session.medium.outside
        return Slices(*map(outside, value)) if isinstance(value, Slices) else outside(value)


class HostRun(Run):
    """For engines that Python drives: groups start one after the other, in one order on all ranks."""

    def run(self, given: Sequence[Any], rate: Any) -> list[Pair]:
        """At once, eagerly; a value is None where no rank had a gradient."""
        with self.computing():
            for group in self.exchanger.groups:
                self.begin(group, self.of(group, given), rate)
            outcomes = self.exchanger.finish(self.outs)
        pairs: dict[str, Pair] = {
            o.variable.name: (None, False) if o.value is None else (self.outside(o.value), True) for o in outcomes
        }
        return self.wholes(pairs, given)

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """Operations that do it when the graph runs."""
        token: list[tf.Tensor] = []
        for group in self.exchanger.groups:
            mine = self.of(group, given)

            def start(*tensors: Any, group: Group = group, mine: list[Any] = mine) -> int:
                self.session.start_equal()
                with self.computing():
                    self.begin(group, tf.nest.pack_sequence_as(mine, tensors[:-1]), tensors[-1])
                return 0

            with tf.control_dependencies(token):
                token = [tf.py_function(start, [*tf.nest.flatten(mine), rate], tf.int32)]

        def finish() -> list[tf.Tensor]:
            with self.computing():
                outcomes = self.exchanger.finish(self.outs)
                outcomes.sort(key=lambda outcome: self.order[outcome.variable.name])
                return [*self.tensors(outcomes), tf.constant(True)]

        variables = [piece.variable for piece in self.pieces]
        with tf.control_dependencies(token):
            flat = tf.py_function(finish, [], [*_dtypes(variables), tf.bool])
        return self.wholes(_packed(variables, flat[:-1]), given)


class GraphRun(Run):
    """For engines whose operations a graph runs, which find each other by name: groups go their ways side by side.

    Which collectives an exchange takes is learnt while the graph is traced, by an exchange of zeros with nobody.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        recorder.note(waits="TensorFlow's graph")
        self.lock = threading.Lock()
        self.running: dict[int, Any] = {}
        self.operations: dict[int, list[Any]] = {}
        self.outcomes: list[Outcome] = []

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """Operations that do it when the graph runs."""
        pairs: dict[str, Pair] = {}
        flags = []
        for group in self.exchanger.groups:
            brought = self._group(group, self.of(group, given), rate)
            pairs.update(brought)
            flags += [found for _, found in brought.values()]
        done = tf.py_function(self._settle, flags, tf.int32)
        wholes = self.wholes(pairs, given)
        with tf.control_dependencies([done]):  # the next step must find this one ended
            values = tf.nest.map_structure(tf.identity, [value for value, _ in wholes])
        return [(value, found) for value, (_, found) in zip(values, wholes, strict=True)]

    def _group(self, group: Group, mine: list[Any], rate: tf.Tensor) -> dict[str, Pair]:
        backend: Any = self.exchanger.backend
        with tf.init_scope():
            plan = [] if group.communicator.delayed else self._rehearse(group)

        def start(*tensors: Any) -> list[tf.Tensor]:
            return self._start(group, tf.nest.pack_sequence_as(mine, tensors[:-1]), tensors[-1])

        def start_and_go_on(*tensors: Any) -> list[tf.Tensor]:
            start(*tensors)
            return self._last(group)()

        inputs, function = [*tf.nest.flatten(mine), rate], start
        if not plan:  # its collectives are started beside training
            return _packed(group.variables, tf.py_function(start_and_go_on, inputs, _dtypes(group.variables)))
        for i, operations in enumerate(plan):
            sent = tf.py_function(
                function, inputs, [kernels_of(operation.tensor).dtype(operation.tensor) for operation in operations]
            )
            inputs = []
            for j, (operation, tensor) in enumerate(zip(operations, sent, strict=True)):
                tensor.set_shape([None])
                inputs.append(backend.run(operation, tensor, f"{group.label}.{i}.{j}"))
            function = self._next(group)
        flat = tf.py_function(self._last(group), inputs, _dtypes(group.variables))
        return _packed(group.variables, flat)

    # -- what the graph calls ----------------------------------------------------------------------------

    def _start(self, group: Group, gradients: list[Any], rate: Any) -> list[tf.Tensor]:
        with self.lock:
            if self.exchanger.under_way(group):  # the step before failed on its way
                self.exchanger.abandon()
                self.outcomes = []
            self.session.start_equal()
            backend: Any = self.exchanger.backend
            with self.computing(), backend.recording() as operations:
                self.running[group.index] = self.begin(group, gradients, rate)
            waits.setdefault(id(self), Wait(self.running[group.index].place, backend.timeout, backend.give_up))
            self.operations[group.index] = operations
            return self._sent(operations)

    def _next(self, group: Group) -> Callable[..., list[tf.Tensor]]:
        def go_on(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock:
                backend: Any = self.exchanger.backend
                self._receive(group, received)
                with self.computing(), backend.recording() as operations:
                    self.running[group.index].advance()
                self.operations[group.index] = operations
                return self._sent(operations)

        return go_on

    def _last(self, group: Group) -> Callable[..., list[tf.Tensor]]:
        def finish(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock, self.computing():
                self._receive(group, received)
                exchange = self.running[group.index]
                if exchange.advance():
                    raise ExchangeError(f"the exchange of {group.describe()} takes more collectives than it did before")
                outcomes = exchange.finish(self.outs(group))
                self.exchanger.with_owed(outcomes)
                self.outcomes += outcomes
                return self.tensors(outcomes)

        return finish

    def _receive(self, group: Group, received: Sequence[tf.Tensor]) -> None:
        for operation, tensor in zip(self.operations[group.index], received, strict=True):
            operation.received = self.session.medium.inside(tensor)

    def _sent(self, operations: Sequence[Any]) -> list[tf.Tensor]:
        return [self.session.medium.outside(operation.tensor) for operation in operations]

    def _settle(self, *flags: tf.Tensor) -> int:
        with self.lock:
            waits.pop(id(self), None)
            outcomes = self.outcomes
            self.running, self.operations, self.outcomes = {}, {}, []
            self.exchanger.settle(outcomes)
            return 0

    # -- the collectives that an exchange takes ----------------------------------------------------------

    def _rehearse(self, group: Group) -> list[list[Any]]:
        backend: Any = self.exchanger.backend
        sent, communicator = backend.sent_bytes, group.communicator
        zeros = [self.session.inside(_zeros(variable)) for variable in group.variables]
        stateful = self.exchanger.stateful
        plan = []
        with self.computing(), recorder.paused():
            with backend.recording() as operations:
                exchange = communicator.begin(Contribution(group, zeros, [True] * len(zeros), stateful, Traffic()))
            while operations:
                plan.append(operations)
                for operation in operations:
                    operation.received = backend.rehearse(operation)
                with backend.recording() as operations:
                    exchange.advance()
        backend.sent_bytes = sent
        for _, component in self.exchanger.components:
            component.state.rollback()
        return plan


def _zeros(variable: Any) -> Any:
    if variable.sparse:
        return Slices(tf.zeros([0, *variable.shape[1:]], tf.float32), tf.zeros([0], tf.int64))
    return tf.zeros(variable.shape, variable.dtype)


def _dtypes(variables: Sequence[Any]) -> list[tf.DType]:
    """Of what a Python function hands back: each variable's value (and rows), in float32 or its own dtype, and
    whether any rank had a gradient."""
    kinds: list[tf.DType] = []
    for variable in variables:
        kinds += [tf.float32, tf.int32] if variable.sparse else [tf.as_dtype(variable.dtype)]
        kinds.append(tf.bool)
    return kinds


def _packed(variables: Sequence[Any], flat: Sequence[tf.Tensor]) -> dict[str, Pair]:
    rest, pairs = iter(flat), {}
    for variable in variables:
        value: Any = next(rest)
        if variable.sparse:
            value.set_shape([None, *variable.shape[1:]])
            rows = next(rest)
            rows.set_shape([None])
            value = Slices(value, rows)
        else:
            value.set_shape(variable.shape)
        found = next(rest)
        found.set_shape([])
        pairs[variable.name] = (value, found)
    return pairs
