"""Exchanges inside graphs: Python functions of eager tensors, and the engine's collectives between them."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from grace.backends.horovod import Operation
from grace.core.compressor import Tensor
from grace.core.waits import Wait, waits
from grace.errors import ExchangeError
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.header import Header, digest
from grace.exchange.round_trip import AnyRoundTrip, BucketProgram
from grace.exchange.sparse_rows import SparseRows, scaled, values_of
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.sharding import Shard
from grace.session.step_runner import StepRunner
from grace.tensorflow.graph_sums import GraphSums, all_sums
from grace.tensorflow.graph_tensors import concatenated, dtypes_of, flattened, packed, split_by_counts, zeros
from grace.tensorflow.reductions import graph_engine
from grace.tensorflow.session import Session
from grace.tensorflow.sharding import Gradient, Pair, cut, joined

SMALL = 1 << 20
"""Bytes of gradient below which a bucket shares its Python functions with a neighbour: a call costs as much as to
compress a small variable."""


class StepRun:
    """Exchange of one step's gradients, which is run as often as the graph.

    Args:
        session: the session that has the gradients.
        runner: the session's runner.
        present: True for each variable that has a gradient on this rank.
    """

    def __init__(self, session: Session, runner: StepRunner, present: Sequence[bool]):
        self.session = session
        self.runner = runner
        self.index_of = {variable.name: i for i, variable in enumerate(runner.variables)}
        self.present = list(present)
        exchanged = {variable.name for bucket in runner.buckets for variable in bucket.variables}
        self.shards = [shard for name, shard in runner.shards.items() if name in exchanged]
        self.order = {shard.variable.name: i for i, shard in enumerate(self.shards)}

    def bucket_gradients(self, bucket: Bucket, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients of a bucket's shards, cut from the variables' gradients."""
        shards = [self.runner.shards[variable.name] for variable in bucket.variables]
        return [cut(shard, gradients[self.index_of[shard.whole.name]]) for shard in shards]

    def start_round_trip(self, bucket: Bucket, shards: Sequence[Gradient], rate: tf.Tensor) -> AnyRoundTrip:
        """Start the exchange of a bucket, with eager tensors."""
        session = self.session
        session.check_open()
        # Only one bucket of a step carries the step stamp; reading the tensor costs as much as compressing a small one.
        if session.needs_lr or bucket.carries_stamps:
            session.lr, updates = map(float, np.asarray(rate))
            session.context.updates = int(updates)
            session.context.hyperparameter_digest = digest(session.lr)
        wholes = [self.runner.shards[variable.name].whole.name for variable in bucket.variables]
        present = [self.present[self.index_of[name]] for name in wholes]
        return self.runner.start_round_trip(bucket, [session.from_tensors(shard) for shard in shards], present)

    def join_shards(self, pairs: dict[str, Pair], gradients: Sequence[Gradient]) -> list[Pair]:
        """Return the mean of each variable, joined from the means of its shards.

        Args:
            pairs: aggregates by the names of shards.
            gradients: this rank's gradients, for shards that are not exchanged.
        """

        def own_gradient(shard: Shard) -> Pair:
            index = self.index_of[shard.whole.name]
            return cut(shard, gradients[index]), self.present[index]

        pairs = {name: (self._scaled(name, value), found) for name, (value, found) in pairs.items()}
        return [joined(self.runner.shards_of[v.name], pairs, own_gradient) for v in self.runner.variables]

    def _scaled(self, name: str, value: Gradient | None) -> Gradient | None:
        """Return the aggregate of a shard, scaled to a mean or a sum, as the user chose."""
        votes = self.runner.shards[name].communicator.compressor.votes
        factor = self.session.settings.reduction.factor(votes, self.runner.backend.size)
        return None if value is None else scaled(value, factor)

    def outs(self, bucket: Bucket) -> "list[np.ndarray | None]":
        """Return the arrays that the aggregates of a bucket are written to."""
        return self.session.representation.outs(bucket)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Return the context of an exchange's computations; an error drops all that this step has begun."""
        self.session.check_current(self.runner)
        try:
            with self.session.representation.computing():
                yield
        except BaseException:
            waits.pop(id(self), None)
            self.runner.abort()
            raise

    def flat_tensors(self, outcomes: Sequence[Outcome]) -> list[tf.Tensor]:
        """Return the tensors that a Python function returns to the graph; see :func:`dtypes_of`."""
        return concatenated(
            flattened(o.variable, None if o.value is None else self.to_tensors(o.value)) for o in outcomes
        )

    def to_tensors(self, value: Tensor | SparseRows) -> Gradient:
        """Convert a result of the exchange to tensors."""
        to_tensor = self.session.representation.to_tensor
        return SparseRows(*map(to_tensor, value)) if isinstance(value, SparseRows) else to_tensor(value)


class HostRun(StepRun):
    """Exchange by an engine that Python drives: buckets start one after the other, in one order on all ranks."""

    def run(self, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[Pair]:
        """Exchange at once, eagerly, and return the means; a value is None where no rank had a gradient."""
        with self.computing():
            for bucket in self.runner.buckets:
                self.start_round_trip(bucket, self.bucket_gradients(bucket, gradients), rate)
            outcomes = self.runner.finish_step(self.outs)
        pairs: dict[str, Pair] = {
            o.variable.name: (None, False) if o.value is None else (self.to_tensors(o.value), True) for o in outcomes
        }
        return self.join_shards(pairs, gradients)

    def add_to_graph(self, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[Pair]:
        """Add the operations to a graph that exchange when it runs, and return the means."""
        token: list[tf.Tensor] = []  # keeps the order in which buckets start, which is the same on all ranks
        for bucket in self.runner.buckets:
            shard_gradients = self.bucket_gradients(bucket, gradients)

            def start(
                *tensors: tf.Tensor, bucket: Bucket = bucket, shard_gradients: list[Gradient] = shard_gradients
            ) -> int:
                self.session.broadcast_initial()
                with self.computing():
                    self.start_round_trip(bucket, tf.nest.pack_sequence_as(shard_gradients, tensors[:-1]), tensors[-1])
                return 0

            with tf.control_dependencies(token):
                token = [tf.py_function(start, [*tf.nest.flatten(shard_gradients), rate], tf.int32)]

        def finish_step() -> list[tf.Tensor]:
            with self.computing():
                outcomes = self.runner.finish_step(self.outs)
                outcomes.sort(key=lambda outcome: self.order[outcome.variable.name])
                return [*self.flat_tensors(outcomes), tf.constant(True)]

        variables = [shard.variable for shard in self.shards]
        with tf.control_dependencies(token):
            flat = tf.py_function(finish_step, [], [*dtypes_of(variables), tf.bool])
        return self.join_shards(packed(variables, flat[:-1]), gradients)


class GraphRun(StepRun):
    """Exchange by an engine whose operations are part of the graph and find each other by name: buckets run side by
    side.

    The routes of buckets say which collectives the graph has: one operation for each leg.
    """

    def __init__(self, session: Session, runner: StepRunner, present: Sequence[bool]):
        super().__init__(session, runner, present)
        engine = graph_engine(runner.backend)
        assert engine is not None  # other engines are driven by HostRun
        self.engine = engine
        recorder.note(waits="TensorFlow's graph")
        self.lock = threading.Lock()
        self.running: dict[int, AnyRoundTrip] = {}
        """Round trips under way, by the buckets' numbers."""
        self.operations: dict[int, list[Operation]] = {}
        """Collectives of the legs that were started last, by the buckets' numbers."""
        self.outcomes: list[Outcome] = []
        self.single_group = False
        """True if there is one group of buckets, whose end is the end of the step."""

    def add_to_graph(self, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[Pair]:
        """Add the operations to a graph that exchange when it runs, and return the means."""
        if all_sums(self.runner):
            self.single_group = True
            pairs, done = self._add_sums(GraphSums(self.runner), gradients, rate)
        else:
            groups, pairs = grouped(self.runner.buckets), {}
            self.single_group = len(groups) == 1
            for buckets in groups:
                pairs.update(self._add_group(buckets, gradients, rate))
            ends = [found for _, found in pairs.values()]
            done = ends[0] if self.single_group else tf.py_function(self._end_step, ends, tf.int32)
        wholes = self.join_shards(pairs, gradients)
        with tf.control_dependencies([done]):  # the next step must find this one ended
            values = tf.nest.map_structure(tf.identity, [value for value, _ in wholes])
        return [(value, found) for value, (_, found) in zip(values, wholes, strict=True)]

    def _add_sums(
        self, sums: GraphSums, gradients: Sequence[Gradient], rate: tf.Tensor
    ) -> tuple[dict[str, Pair], tf.Tensor]:
        """Add the operations of buckets of plain sums, and return their pairs and a tensor that is computed when the
        step has ended."""
        shard_gradients = [self.bucket_gradients(bucket, gradients) for bucket in sums.buckets]
        present = [
            [self.present[self.index_of[self.runner.shards[v.name].whole.name]] for v in bucket.variables]
            for bucket in sums.buckets
        ]

        def start(rate: tf.Tensor) -> tf.Tensor:
            sums.count_traffic()
            (stamps,) = self._start(sums.stamp_bucket, sums.empty, rate)
            return stamps

        # One of the first gradients: when it is computed, the forward pass has read all variables, which
        # broadcast_initial may then overwrite.
        with tf.control_dependencies([shard_gradients[0][-1]]):
            stamps = tf.py_function(start, [rate], tf.float32)
        received, pairs = sums.run(shard_gradients, present, stamps)
        finish_stamps = self._finish_function([sums.stamp_bucket], [1])

        def finish_step(received: tf.Tensor) -> bool:
            with self.lock:
                has_carried_over = sums.pop_carried_over()
            finish_stamps(received)
            return has_carried_over

        has_carried_over = tf.py_function(finish_step, [received], tf.bool)
        return sums.add_carried_over(pairs, has_carried_over), has_carried_over

    def _add_group(self, buckets: Sequence[Bucket], gradients: Sequence[Gradient], rate: tf.Tensor) -> dict[str, Pair]:
        """Add the operations of buckets that share their Python functions, and return their pairs: each call costs as
        much as to compress a small variable.

        1. A Python function starts all buckets, and returns the wires of their first legs.
        2. One collective for each wire follows; then a function that starts the next leg of the buckets that have one,
           its collectives, and so on. Buckets with fewer legs keep what their last leg received.
        3. A function finishes all buckets.
        """
        with tf.init_scope():
            legs = [[] if bucket.communicator.delayed else self._operations_of(bucket) for bucket in buckets]
        shard_gradients = [self.bucket_gradients(bucket, gradients) for bucket in buckets]
        variables = [variable for bucket in buckets for variable in bucket.variables]
        inputs: list[tf.Tensor] = [*tf.nest.flatten(shard_gradients), rate]

        def start(*tensors: tf.Tensor) -> list[tf.Tensor]:
            gradients = tf.nest.pack_sequence_as(shard_gradients, tensors[:-1])
            return concatenated(
                self._start(bucket, own, tensors[-1]) for bucket, own in zip(buckets, gradients, strict=True)
            )

        def start_and_finish(*tensors: tf.Tensor) -> list[tf.Tensor]:
            start(*tensors)
            return self._finish_function(buckets, [0])()

        if not any(legs):  # delayed buckets: their collectives are started outside of the graph, during training
            return packed(variables, tf.py_function(start_and_finish, inputs, dtypes_of(variables)))
        function: Callable[..., list[tf.Tensor]] = start
        received: list[list[tf.Tensor]] = [[] for _ in buckets]
        for number in range(max(map(len, legs))):
            active = [i for i, of_bucket in enumerate(legs) if len(of_bucket) > number]
            if number > 0:
                inputs = concatenated(received[i] for i in active)
                function = self._advance_function([buckets[i] for i in active], [len(received[i]) for i in active])
            dtypes = [kernels_of(each.tensor).dtype(each.tensor) for i in active for each in legs[i][number]]
            wires = iter(tf.py_function(function, inputs, dtypes))
            for i in active:
                received[i] = self._add_collectives(legs[i][number], wires, f"{buckets[i].label}.{number}")
        finish = self._finish_function(buckets, list(map(len, received)))
        return packed(variables, tf.py_function(finish, concatenated(received), dtypes_of(variables)))

    def _add_collectives(
        self, operations: Sequence[Operation], wires: Iterator[tf.Tensor], label: str
    ) -> list[tf.Tensor]:
        """Add the collectives of one leg of a bucket, each of the next wire, and return the tensors they receive."""
        received = []
        for number, operation in enumerate(operations):
            wire = next(wires)
            wire.set_shape([None])
            received.append(self.engine.run(operation, wire, f"{label}.{number}"))
        return received

    # -- what the graph calls ----------------------------------------------------------------------------

    def _start(self, bucket: Bucket, gradients: Sequence[Gradient], rate: tf.Tensor) -> list[tf.Tensor]:
        with self.lock:
            if self.runner.under_way(bucket):  # the step before failed before it ended
                self.runner.abort()
                self.outcomes = []
            self.session.broadcast_initial()
            with self.computing(), self.engine.recording() as operations:
                self.running[bucket.index] = self.start_round_trip(bucket, gradients, rate)
            waits.setdefault(
                id(self), Wait(self.running[bucket.index].describe_wait, self.engine.timeout, self.engine.give_up)
            )
            self.operations[bucket.index] = operations
            return self._wires(operations)

    def _advance_function(self, buckets: Sequence[Bucket], counts: Sequence[int]) -> Callable[..., list[tf.Tensor]]:
        """Return the function that starts the next leg of buckets, from the tensors that the last one received for
        them."""

        def advance(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock:
                sent: list[tf.Tensor] = []
                for bucket, own in zip(buckets, split_by_counts(received, counts), strict=True):
                    sent += self._advance(bucket, own)
                return sent

        return advance

    def _advance(self, bucket: Bucket, received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._receive(bucket, received)
        trip = self.running[bucket.index]
        with self.computing(), self.engine.recording() as operations:
            trip.advance()
            if trip.error:  # as on all ranks
                raise trip.error
        self.operations[bucket.index] = operations
        return self._wires(operations)

    def _finish_function(self, buckets: Sequence[Bucket], counts: Sequence[int]) -> Callable[..., list[tf.Tensor]]:
        """Return the function that finishes the round trips of buckets, from the tensors that the last legs received
        for them."""

        def finish_buckets(*received: tf.Tensor) -> list[tf.Tensor]:
            with self.lock, self.computing():
                group_outcomes: list[Outcome] = []
                for bucket, own in zip(buckets, split_by_counts(received, counts), strict=True):
                    self._receive(bucket, own)
                    trip = self.running[bucket.index]
                    if trip.advance():
                        raise ExchangeError(
                            f"the exchange of {bucket.describe()} takes more collectives than it did before"
                        )
                    outcomes = trip.finish(self.outs(bucket))
                    self.runner.add_carried_over(outcomes)
                    group_outcomes += outcomes
                self.outcomes += group_outcomes
                if self.single_group:
                    self._commit()
                return self.flat_tensors(group_outcomes)

        return finish_buckets

    def _receive(self, bucket: Bucket, received: Sequence[tf.Tensor]) -> None:
        for operation, tensor in zip(self.operations[bucket.index], received, strict=True):
            operation.received = self.session.representation.from_tensor(tensor)

    def _wires(self, operations: Sequence[Operation]) -> list[tf.Tensor]:
        return [self.session.representation.to_tensor(operation.tensor) for operation in operations]

    def _end_step(self, *flags: tf.Tensor) -> int:
        """End the step, after the last of several groups. The graph passes the groups' flags to order the calls."""
        with self.lock:
            self.session.check_current(self.runner)
            self._commit()
            return 0

    def _commit(self) -> None:
        waits.pop(id(self), None)  # the watch reports no wait of a step that has ended
        outcomes = self.outcomes
        self.running = {}
        self.operations = {}
        self.outcomes = []
        self.runner.end_step(outcomes)

    # -- the collectives that an exchange takes ----------------------------------------------------------

    def _operations_of(self, bucket: Bucket) -> list[list[Operation]]:
        """Return the engine's operations for each leg of a bucket's route; nothing is sent."""
        sent_bytes = self.engine.sent_bytes
        # A graph has the same operations in each step, so digests are compared in each.
        bucket.compares_every_step = True
        program = self._program_of(bucket)
        operations_of_legs: list[list[Operation]] = []
        like = values_of(self.session.from_tensors(zeros(bucket.variables[0])))
        for leg, dtype, length in program.buffers():
            buffer = program.kernels.zeros((length,), dtype, like)
            with self.engine.recording() as operations:
                leg.collective.start(self.engine, buffer, leg.root)
            operations_of_legs.append(operations)
        self.engine.sent_bytes = sent_bytes  # nothing was sent
        return operations_of_legs

    def _program_of(self, bucket: Bucket) -> BucketProgram:
        """Return a bucket's program with known layouts; methods that do not declare sizes encode zeros once, to find
        them."""
        gradients = [self.session.from_tensors(zeros(variable)) for variable in bucket.variables]
        program = BucketProgram(bucket, values_of(gradients[0]))
        if not program.codec.layouts:
            with self.computing(), recorder.paused():
                program.codec.encode(gradients, Header(program, [True] * len(gradients)))
            for _, component in self.runner.components:
                component.state.rollback()
        return program


def grouped(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return buckets in groups that are started and awaited together: neighbours of which one is small."""
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
