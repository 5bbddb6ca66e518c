"""An exchange inside a graph: Python functions of eager tensors, and the engine's collectives between them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from grace.core.waits import Wait, waits
from grace.errors import ExchangeError
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.header import Header
from grace.exchange.program import BucketProgram
from grace.exchange.sparse_rows import SparseRows, scaled, values_of
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.sharding import Shard
from grace.session.step_runner import StepRunner
from grace.tensorflow.graph_sums import GraphSums, all_sums
from grace.tensorflow.graph_tensors import concatenated, cut_up, dtypes_of, flags, packed, zeros
from grace.tensorflow.sharding import Pair, cut, joined
from grace.tensorflow.switching import check_current

SMALL = 1 << 20
"""Bytes of gradient that are sent sooner with others than by a Python function of their own."""


class Run:
    """One step's exchange, as often as the step is run.

    Args:
        session: whose gradients.
        runner: its runner.
        present: which variables have a gradient on this rank.
    """

    def __init__(self, session: Any, runner: StepRunner, present: Sequence[bool]):
        self.session, self.runner = session, runner
        self.place = {variable.name: i for i, variable in enumerate(runner.variables)}
        self.present = list(present)
        self.shards = [shard for shard in runner.shards.values() if not shard.period]
        self.order = {shard.variable.name: i for i, shard in enumerate(self.shards)}

    def of(self, bucket: Bucket, given: Sequence[Any]) -> list[Any]:
        """A bucket's shards of the variables' gradients."""
        shards = [self.runner.shards[variable.name] for variable in bucket.variables]
        return [cut(shard, given[self.place[shard.whole.name]]) for shard in shards]

    def begin(self, bucket: Bucket, shards: Sequence[Any], rate: Any) -> Any:
        """Start a bucket, with eager tensors."""
        wholes = [self.runner.shards[variable.name].whole.name for variable in bucket.variables]
        return self.session.start(bucket, shards, [self.present[self.place[name]] for name in wholes], rate)

    def wholes(self, pairs: dict[str, Pair], given: Sequence[Any]) -> list[Pair]:
        """What the exchange brought for each variable, from what it brought for each shard."""

        def own(shard: Shard) -> Pair:
            place = self.place[shard.whole.name]
            return cut(shard, given[place]), self.present[place]

        pairs = {name: (self._scaled(name, value), found) for name, (value, found) in pairs.items()}
        return [joined(self.runner.shards_of[v.name], pairs, own) for v in self.runner.variables]

    def _scaled(self, name: str, value: Any) -> Any:
        """The aggregate of a shard, as a mean or a sum."""
        votes = self.runner.shards[name].communicator.compressor.votes
        factor = self.session.settings.reduction.factor(votes, self.runner.backend.size)
        return None if value is None else scaled(value, factor)

    def outs(self, bucket: Bucket) -> list[Any]:
        """Where the aggregates of a bucket are written."""
        return self.session.medium.outs(bucket)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The context of what an exchange computes; what one that fails has begun is forgotten."""
        check_current(self.session, self.runner)
        try:
            with self.session.medium.computing():
                yield
        except BaseException:
            waits.pop(id(self), None)
            self.runner.abandon()
            raise

    def tensors(self, outcomes: Sequence[Outcome]) -> list[tf.Tensor]:
        """What a Python function hands back to the graph: each variable's value (and rows), and whether any rank had
        a gradient; see :func:`dtypes_of`."""
        flat: list[Any] = []
        for outcome in outcomes:
            variable, found = outcome.variable, outcome.value is not None
            value: Any = self.outside(outcome.value) if found else zeros(variable)
            if variable.sparse:
                flat += [value.values, tf.cast(value.rows, tf.int32)]
            else:
                flat.append(value if value.dtype.name == variable.dtype else tf.cast(value, variable.dtype))
            flat.append(flags()[found])
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
            for bucket in self.runner.buckets:
                self.begin(bucket, self.of(bucket, given), rate)
            outcomes = self.runner.finish_step(self.outs)
        pairs: dict[str, Pair] = {
            o.variable.name: (None, False) if o.value is None else (self.outside(o.value), True) for o in outcomes
        }
        return self.wholes(pairs, given)

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """Operations that do it when the graph runs."""
        token: list[tf.Tensor] = []
        for bucket in self.runner.buckets:
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
                outcomes = self.runner.finish_step(self.outs)
                outcomes.sort(key=lambda outcome: self.order[outcome.variable.name])
                return [*self.tensors(outcomes), tf.constant(True)]

        variables = [shard.variable for shard in self.shards]
        with tf.control_dependencies(token):
            flat = tf.py_function(finish, [], [*dtypes_of(variables), tf.bool])
        return self.wholes(packed(variables, flat[:-1]), given)


class GraphRun(Run):
    """For engines whose operations a graph runs, which find each other by name: buckets go their ways side by side.

    The routes of buckets say which collectives the graph has: one operation for each leg.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        recorder.note(waits="TensorFlow's graph")
        self.lock = threading.Lock()
        self.running: dict[int, Any] = {}
        self.operations: dict[int, list[Any]] = {}
        self.outcomes: list[Outcome] = []
        self.alone = False
        """Whether there is one exchange, whose end is the step's."""

    def in_graph(self, given: Sequence[Any], rate: tf.Tensor) -> list[Pair]:
        """Operations that do it when the graph runs."""
        if all_sums(self.runner):
            self.alone = True
            pairs, done = self._sums(GraphSums(self.runner), given, rate)
        else:
            groups, pairs = grouped(self.runner.buckets), {}
            self.alone = len(groups) == 1
            for buckets in groups:
                pairs.update(self._group(buckets, given, rate))
            ends = [found for _, found in pairs.values()]
            done = ends[0] if self.alone else tf.py_function(self._settle, ends, tf.int32)
        wholes = self.wholes(pairs, given)
        with tf.control_dependencies([done]):  # the next step must find this one ended
            values = tf.nest.map_structure(tf.identity, [value for value, _ in wholes])
        return [(value, found) for value, (_, found) in zip(values, wholes, strict=True)]

    def _sums(self, sums: GraphSums, given: Sequence[Any], rate: tf.Tensor) -> tuple[dict[str, Pair], tf.Tensor]:
        """Buckets of plain sums, and what is there when the step has ended."""
        mine = [self.of(bucket, given) for bucket in sums.buckets]
        present = [
            [self.present[self.place[self.runner.shards[v.name].whole.name]] for v in bucket.variables]
            for bucket in sums.buckets
        ]

        def start(rate: tf.Tensor) -> tf.Tensor:
            sums.count()
            (told,) = self._start(sums.places, sums.empty, rate)
            return told

        with tf.control_dependencies([mine[0][-1]]):  # one of the first: the forward pass has read all variables
            told = tf.py_function(start, [rate], tf.float32)
        received, pairs = sums.run(mine, present, told)
        last = self._last([sums.places], [1])

        def finish(received: tf.Tensor) -> bool:
            with self.lock:
                owing = sums.borrow()
            last(received)
            return owing

        owing = tf.py_function(finish, [received], tf.bool)
        return sums.add_carried_over(pairs, owing), owing

    def _group(self, buckets: Sequence[Bucket], given: Sequence[Any], rate: tf.Tensor) -> dict[str, Pair]:
        """Buckets whose functions are one: each costs as much as to compress a small variable."""
        backend: Any = self.runner.backend
        with tf.init_scope():
            plans = [[] if bucket.communicator.delayed else self._operations_of(bucket) for bucket in buckets]
        mine = [self.of(bucket, given) for bucket in buckets]
        variables = [variable for bucket in buckets for variable in bucket.variables]
        inputs: list[Any] = [*tf.nest.flatten(mine), rate]

        def start(*tensors: Any) -> list[tf.Tensor]:
            given = tf.nest.pack_sequence_as(mine, tensors[:-1])
            return concatenated(
                self._start(bucket, own, tensors[-1]) for bucket, own in zip(buckets, given, strict=True)
            )

        def start_and_go_on(*tensors: Any) -> list[tf.Tensor]:
            start(*tensors)
            return self._last(buckets, [0])()

        if not any(plans):  # their collectives are started beside training
            return packed(variables, tf.py_function(start_and_go_on, inputs, dtypes_of(variables)))
        function: Callable[..., list[tf.Tensor]] = start
        received: list[list[tf.Tensor]] = [[] for _ in buckets]
        for i in range(max(map(len, plans))):
            going = [n for n, plan in enumerate(plans) if len(plan) > i]
            dtypes = [kernels_of(each.tensor).dtype(each.tensor) for n in going for each in plans[n][i]]
            sent = iter(tf.py_function(function, inputs, dtypes))
            for n in going:
                received[n] = []
                for j, operation in enumerate(plans[n][i]):
                    tensor = next(sent)
                    tensor.set_shape([None])
                    received[n].append(backend.run(operation, tensor, f"{buckets[n].label}.{i}.{j}"))
            on = [n for n in going if len(plans[n]) > i + 1]
            inputs = concatenated(received[n] for n in on)
            function = self._next([buckets[n] for n in on], [len(received[n]) for n in on])
        last = self._last(buckets, list(map(len, received)))
        return packed(variables, tf.py_function(last, concatenated(received), dtypes_of(variables)))

    # -- what the graph calls ----------------------------------------------------------------------------

    def _start(self, bucket: Bucket, gradients: list[Any], rate: Any) -> list[tf.Tensor]:
        with self.lock:
            if self.runner.under_way(bucket):  # the step before failed on its way
                self.runner.abandon()
                self.outcomes = []
            self.session.start_equal()
            backend: Any = self.runner.backend
            with self.computing(), backend.recording() as operations:
                self.running[bucket.index] = self.begin(bucket, gradients, rate)
            waits.setdefault(id(self), Wait(self.running[bucket.index].describe_wait, backend.timeout, backend.give_up))
            self.operations[bucket.index] = operations
            return self._sent(operations)

    def _next(self, buckets: Sequence[Bucket], counts: Sequence[int]) -> Callable[..., list[tf.Tensor]]:
        """What goes on with the collectives that brought so many tensors for each bucket."""

        def go_on(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock:
                sent: list[tf.Tensor] = []
                for bucket, own in zip(buckets, cut_up(received, counts), strict=True):
                    sent += self._advanced(bucket, own)
                return sent

        return go_on

    def _advanced(self, bucket: Bucket, received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        backend: Any = self.runner.backend
        self._receive(bucket, received)
        with self.computing(), backend.recording() as operations:
            self.running[bucket.index].advance()
            if self.running[bucket.index].error:  # as on all ranks
                raise self.running[bucket.index].error
        self.operations[bucket.index] = operations
        return self._sent(operations)

    def _last(self, buckets: Sequence[Bucket], counts: Sequence[int]) -> Callable[..., list[tf.Tensor]]:
        """What ends these exchanges, likewise."""

        def finish(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock, self.computing():
                brought: list[Outcome] = []
                for bucket, own in zip(buckets, cut_up(received, counts), strict=True):
                    self._receive(bucket, own)
                    exchange = self.running[bucket.index]
                    if exchange.advance():
                        raise ExchangeError(
                            f"the exchange of {bucket.describe()} takes more collectives than it did before"
                        )
                    outcomes = exchange.finish(self.outs(bucket))
                    self.runner.add_carried_over(outcomes)
                    brought += outcomes
                self.outcomes += brought
                if self.alone:
                    self._end()
                return self.tensors(brought)

        return finish

    def _receive(self, bucket: Bucket, received: Sequence[tf.Tensor]) -> None:
        for operation, tensor in zip(self.operations[bucket.index], received, strict=True):
            operation.received = self.session.medium.inside(tensor)

    def _sent(self, operations: Sequence[Any]) -> list[tf.Tensor]:
        return [self.session.medium.outside(operation.tensor) for operation in operations]

    def _settle(self, *flags: tf.Tensor) -> int:
        with self.lock:
            check_current(self.session, self.runner)
            self._end()
            return 0

    def _end(self) -> None:
        waits.pop(id(self), None)
        outcomes = self.outcomes
        self.running, self.operations, self.outcomes = {}, {}, []
        self.runner.end_step(outcomes)

    # -- the collectives that an exchange takes ----------------------------------------------------------

    def _operations_of(self, bucket: Bucket) -> list[list[Any]]:
        """Return the engine's operations for each leg of a bucket's route; nothing is sent."""
        backend: Any = self.runner.backend
        sent = backend.sent_bytes
        bucket.compares = True  # a graph has the same operations at every step
        program = self._program_of(bucket)
        found = []
        like = values_of(self.session.inside(zeros(bucket.variables[0])))
        for leg, dtype, length in program.buffers():
            buffer = program.kernels.zeros((length,), dtype, like)
            with backend.recording() as operations:
                leg.collective.start(backend, buffer, leg.root)
            found.append(operations)
        backend.sent_bytes = sent
        return found

    def _program_of(self, bucket: Bucket) -> BucketProgram:
        """Return a bucket's program, whose layouts are known: of methods that do not say them, from zeros."""
        given = [self.session.inside(zeros(variable)) for variable in bucket.variables]
        program = BucketProgram(bucket, values_of(given[0]))
        if not program.codec.layouts:
            with self.computing(), recorder.paused():
                program.codec.encode(given, Header(program, [True] * len(given)))
            for _, component in self.runner.components:
                component.state.rollback()
        return program


def grouped(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Neighbours that are started and awaited together, since one of them is small."""
    groups: list[list[Bucket]] = []
    for bucket in buckets:
        delayed = bucket.communicator.delayed
        alike = groups and groups[-1][0].communicator.delayed is delayed and not delayed
        if alike and min(_nbytes([bucket]), _nbytes(groups[-1])) < SMALL:
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
    return groups


def _nbytes(buckets: Sequence[Bucket]) -> int:
    return sum(variable.nbytes for bucket in buckets for variable in bucket.variables)
