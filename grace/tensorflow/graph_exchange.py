"""An exchange inside a graph: Python functions of eager tensors, and the engine's collectives between them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from grace.core.waiting import Wait, waits
from grace.errors import ExchangeError
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.sparse_rows import SparseRows, scaled
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.exchanger import Exchanger
from grace.session.sharding import Shard
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
        self.shards = [shard for shard in exchanger.shards.values() if not shard.period]
        self.order = {shard.variable.name: i for i, shard in enumerate(self.shards)}

    def of(self, bucket: Bucket, given: Sequence[Any]) -> list[Any]:
        """A bucket's shards of the variables' gradients."""
        shards = [self.exchanger.shards[variable.name] for variable in bucket.variables]
        return [cut(shard, given[self.place[shard.whole.name]]) for shard in shards]

    def begin(self, bucket: Bucket, shards: Sequence[Any], rate: Any) -> Any:
        """Start a bucket, with eager tensors."""
        wholes = [self.exchanger.shards[variable.name].whole.name for variable in bucket.variables]
        return self.session.start(bucket, shards, [self.present[self.place[name]] for name in wholes], rate)

    def wholes(self, pairs: dict[str, Pair], given: Sequence[Any]) -> list[Pair]:
        """What the exchange brought for each variable, from what it brought for each shard."""

        def own(shard: Shard) -> Pair:
            place = self.place[shard.whole.name]
            return cut(shard, given[place]), self.present[place]

        pairs = {name: (self._scaled(name, value), found) for name, (value, found) in pairs.items()}
        return [joined(self.exchanger.shards_of[v.name], pairs, own) for v in self.exchanger.variables]

    def _scaled(self, name: str, value: Any) -> Any:
        """The aggregate of a shard, as a mean or a sum."""
        votes = self.exchanger.shards[name].communicator.compressor.votes
        factor = self.session.settings.reduction.factor(votes, self.exchanger.backend.size)
        return None if value is None else scaled(value, factor)

    def outs(self, bucket: Bucket) -> list[Any]:
        """Where the aggregates of a bucket are written."""
        return self.session.medium.outs(bucket)

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
        return SparseRows(*map(outside, value)) if isinstance(value, SparseRows) else outside(value)


class HostRun(Run):
    """For engines that Python drives: buckets start one after the other, in one order on all ranks."""

    def run(self, given: Sequence[Any], rate: Any) -> list[Pair]:
        """At once, eagerly; a value is None where no rank had a gradient."""
        with self.computing():
            for bucket in self.exchanger.buckets:
                self.begin(bucket, self.of(bucket, given), rate)
            outcomes = self.exchanger.finish(self.outs)
        pairs: dict[str, Pair] = {
            o.variable.name: (None, False) if o.value is None else (self.outside(o.value), True) for o in outcomes
        }
        return self.wholes(pairs, given)

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """Operations that do it when the graph runs."""
        token: list[tf.Tensor] = []
        for bucket in self.exchanger.buckets:
            mine = self.of(bucket, given)

            def start(*tensors: Any, bucket: Bucket = bucket, mine: list[Any] = mine) -> int:
                self.session.start_equal()
                with self.computing():
                    self.begin(bucket, tf.nest.pack_sequence_as(mine, tensors[:-1]), tensors[-1])
                return 0

            with tf.control_dependencies(token):
                token = [tf.py_function(start, [*tf.nest.flatten(mine), rate], tf.int32)]

        def finish() -> list[tf.Tensor]:
            with self.computing():
                outcomes = self.exchanger.finish(self.outs)
                outcomes.sort(key=lambda outcome: self.order[outcome.variable.name])
                return [*self.tensors(outcomes), tf.constant(True)]

        variables = [shard.variable for shard in self.shards]
        with tf.control_dependencies(token):
            flat = tf.py_function(finish, [], [*_dtypes(variables), tf.bool])
        return self.wholes(_packed(variables, flat[:-1]), given)


class GraphRun(Run):
    """For engines whose operations a graph runs, which find each other by name: buckets go their ways side by side.

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
        for bucket in self.exchanger.buckets:
            brought = self._group(bucket, self.of(bucket, given), rate)
            pairs.update(brought)
            flags += [found for _, found in brought.values()]
        done = tf.py_function(self._settle, flags, tf.int32)
        wholes = self.wholes(pairs, given)
        with tf.control_dependencies([done]):  # the next step must find this one ended
            values = tf.nest.map_structure(tf.identity, [value for value, _ in wholes])
        return [(value, found) for value, (_, found) in zip(values, wholes, strict=True)]

    def _group(self, bucket: Bucket, mine: list[Any], rate: tf.Tensor) -> dict[str, Pair]:
        backend: Any = self.exchanger.backend
        with tf.init_scope():
            plan = [] if bucket.communicator.delayed else self._rehearse(bucket)

        def start(*tensors: Any) -> list[tf.Tensor]:
            return self._start(bucket, tf.nest.pack_sequence_as(mine, tensors[:-1]), tensors[-1])

        def start_and_go_on(*tensors: Any) -> list[tf.Tensor]:
            start(*tensors)
            return self._last(bucket)()

        inputs, function = [*tf.nest.flatten(mine), rate], start
        if not plan:  # its collectives are started beside training
            return _packed(bucket.variables, tf.py_function(start_and_go_on, inputs, _dtypes(bucket.variables)))
        for i, operations in enumerate(plan):
            sent = tf.py_function(
                function, inputs, [kernels_of(operation.tensor).dtype(operation.tensor) for operation in operations]
            )
            inputs = []
            for j, (operation, tensor) in enumerate(zip(operations, sent, strict=True)):
                tensor.set_shape([None])
                inputs.append(backend.run(operation, tensor, f"{bucket.label}.{i}.{j}"))
            function = self._next(bucket)
        flat = tf.py_function(self._last(bucket), inputs, _dtypes(bucket.variables))
        return _packed(bucket.variables, flat)

    # -- what the graph calls ----------------------------------------------------------------------------

    def _start(self, bucket: Bucket, gradients: list[Any], rate: Any) -> list[tf.Tensor]:
        with self.lock:
            if self.exchanger.under_way(bucket):  # the step before failed on its way
                self.exchanger.abandon()
                self.outcomes = []
            self.session.start_equal()
            backend: Any = self.exchanger.backend
            with self.computing(), backend.recording() as operations:
                self.running[bucket.index] = self.begin(bucket, gradients, rate)
            waits.setdefault(id(self), Wait(self.running[bucket.index].place, backend.timeout, backend.give_up))
            self.operations[bucket.index] = operations
            return self._sent(operations)

    def _next(self, bucket: Bucket) -> Callable[..., list[tf.Tensor]]:
        def go_on(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock:
                backend: Any = self.exchanger.backend
                self._receive(bucket, received)
                with self.computing(), backend.recording() as operations:
                    self.running[bucket.index].advance()
                    if self.running[bucket.index].refusal:  # as on all ranks
                        raise self.running[bucket.index].refusal
                self.operations[bucket.index] = operations
                return self._sent(operations)

        return go_on

    def _last(self, bucket: Bucket) -> Callable[..., list[tf.Tensor]]:
        def finish(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock, self.computing():
                self._receive(bucket, received)
                exchange = self.running[bucket.index]
                if exchange.advance():
                    raise ExchangeError(
                        f"the exchange of {bucket.describe()} takes more collectives than it did before"
                    )
                outcomes = exchange.finish(self.outs(bucket))
                self.exchanger.with_owed(outcomes)
                self.outcomes += outcomes
                return self.tensors(outcomes)

        return finish

    def _receive(self, bucket: Bucket, received: Sequence[tf.Tensor]) -> None:
        for operation, tensor in zip(self.operations[bucket.index], received, strict=True):
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

    def _rehearse(self, bucket: Bucket) -> list[list[Any]]:
        backend: Any = self.exchanger.backend
        sent, communicator = backend.sent_bytes, bucket.communicator
        bucket.compares = True
        zeros = [self.session.inside(_zeros(variable)) for variable in bucket.variables]
        stateful = self.exchanger.stateful
        plan = []
        with self.computing(), recorder.paused():
            with backend.recording() as operations:
                exchange = communicator.begin(Contribution(bucket, zeros, [True] * len(zeros), stateful, Traffic()))
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
        return SparseRows(tf.zeros([0, *variable.shape[1:]], tf.float32), tf.zeros([0], tf.int64))
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
            value = SparseRows(value, rows)
        else:
            value.set_shape(variable.shape)
        found = next(rest)
        found.set_shape([])
        pairs[variable.name] = (value, found)
    return pairs
