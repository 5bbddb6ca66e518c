"""Plain sums in a graph: gradients without compression and memory never enter Python."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from grace.communicators import Allreduce
from grace.compressors.none import NoCompression
from grace.core.compressor import Tensor
from grace.exchange.bucket import Bucket
from grace.exchange.tracing import recorder
from grace.kernels.tensorflow.graph_numbers import number
from grace.session.step_runner import StepRunner
from grace.tensorflow.reductions import graph_engine
from grace.tensorflow.sharding import Pair

DensePairs = dict[str, tuple[tf.Tensor, tf.Tensor]]
"""Mean and flag of each variable, by name."""


def all_sums(runner: StepRunner) -> bool:
    """Return True if a step consists of plain sums of gradients: it has no state that an error could spoil."""
    traced = recorder.run is not None  # a trace has each variable's times, which sums in a graph do not
    if runner.stateful_communicators or traced or not runner.buckets:
        return False
    return all(map(_is_plain, runner.buckets))


def _is_plain(bucket: Bucket) -> bool:
    communicator = bucket.communicator
    parts = (type(communicator), type(communicator.compressor))
    return parts == (Allreduce, NoCompression) and not any(variable.sparse for variable in bucket.variables)


class GraphSums:
    """Plain sums of one step.

    A bucket's gradients travel in one tensor, and behind them a 1 or 0 for each: 1 if this rank has it. The step stamps
    are an exchange of their own, of a variable without elements, whose wire travels behind the first bucket.

    Args:
        runner: a runner for which :func:`all_sums` is True.
    """

    def __init__(self, runner: StepRunner):
        self.runner = runner
        self.buckets = runner.buckets
        self.variables = [variable for bucket in self.buckets for variable in bucket.variables]
        first = self.buckets[0]
        empty = dataclasses.replace(first.variables[0], shape=(0,), dtype="float32")
        self.stamp_bucket = dataclasses.replace(first, variables=[empty])
        """Bucket of the exchange that carries the step stamps."""
        self.empty = [np.zeros(0, np.float32)]
        self.carried_over: dict[str, Tensor] = {}
        """Means of a checkpoint's run that were not applied yet, by name."""

    def count_traffic(self) -> None:
        """Count the bytes that one run of the graph sends."""
        traffic = self.runner.traffic
        backend = self.runner.backend
        before = backend.sent_bytes
        for variable in self.variables:
            counted = traffic.payload_bytes.get(variable.name, 0)
            traffic.payload_bytes[variable.name] = counted + variable.nbytes
            traffic.header_bytes += variable.bits // 8
        nbytes = sum(variable.nbytes + variable.bits // 8 for variable in self.variables)
        backend.count(2 * (backend.size - 1) / backend.size * nbytes)  # a ring's all-reduce
        traffic.sent_bytes += backend.sent_bytes - before

    def run(
        self, gradients: Sequence[Sequence[tf.Tensor]], present: Sequence[Sequence[bool]], stamps: tf.Tensor
    ) -> tuple[tf.Tensor, DensePairs]:
        """Add the operations to the graph.

        Args:
            gradients: each bucket's gradients.
            present: True for each of them that this rank has.
            stamps: the wire of the step stamps' exchange, which has begun.

        Returns:
            The received wire of step stamps, and the pairs of all shards by name.
        """
        horovod = graph_engine(self.runner.backend)
        assert horovod is not None  # GraphRun exchanges over no other engine
        predivide = self.runner.context.predivide
        stamps.set_shape([None])
        received, pairs = None, DensePairs()
        for i, bucket in enumerate(self.buckets):
            like = gradients[i][0]
            parts = [self._divide(tf.reshape(gradient, [-1]), predivide) for gradient in gradients[i]]
            parts.append(tf.constant([float(is_present) for is_present in present[i]], like.dtype))
            # Step stamps are float32: they travel in the first buffer if it is too, else by themselves.
            rides = i == 0 and like.dtype == tf.float32
            if rides:
                parts.append(stamps)
            buffer = tf.concat(parts, 0)
            label = f"{bucket.label}.sum"
            total = horovod.run_allreduce(buffer, label)
            if i == 0 and not rides:
                received = horovod.run_allreduce(stamps, f"{label}.stamps")
            sizes = [variable.numel for variable in bucket.variables]
            total_numel, count = sum(sizes), len(sizes)
            if rides:
                received = total[total_numel + count :]
            found = tf.unstack(total[total_numel : total_numel + count] > 0, count)
            total = self._divide(total[:total_numel], self.runner.context.size / predivide)
            for variable, value, flag in zip(bucket.variables, tf.split(total, sizes), found, strict=True):
                pairs[variable.name] = tf.reshape(value, variable.shape), flag
        return received, pairs

    def pop_carried_over(self) -> bool:
        """Take the means that a checkpoint's run had still to apply to these variables.

        Returns:
            True if there are any.
        """
        means = self.runner.carried_over
        self.carried_over = {v.name: means.pop(v.name) for v in self.variables if v.name in means}
        return bool(self.carried_over)

    def add_carried_over(self, pairs: DensePairs, has_carried_over: tf.Tensor) -> dict[str, Pair]:
        """Add the operations that add carried-over means, if there are any, to this step's means, unless it
        overflowed."""
        values = [pairs[variable.name][0] for variable in self.variables]
        found = [pairs[variable.name][1] for variable in self.variables]
        count = len(values)
        dtypes = [*(value.dtype for value in values), *[tf.bool] * count]

        def add_means(*values: tf.Tensor) -> list[tf.Tensor]:
            carried_over, self.carried_over = self.carried_over, {}
            if not all(bool(tf.reduce_all(tf.math.is_finite(value))) for value in values):
                # An overflow, of which all ranks have the same sums: the means wait for a step without one.
                self.runner.carry_over(carried_over)
                return [*values, *[tf.constant(False)] * count]
            means = [carried_over.get(variable.name, 0.0) for variable in self.variables]
            sums = [value + tf.cast(mean, value.dtype) for value, mean in zip(values, means, strict=True)]
            return [*sums, *(tf.constant(variable.name in carried_over) for variable in self.variables)]

        def with_means() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            both = tf.py_function(add_means, values, dtypes)
            return both[:count], [a | b for a, b in zip(found, both[count:], strict=True)]

        values, found = tf.cond(has_carried_over, with_means, lambda: (values, found))
        for variable, value, flag in zip(self.variables, values, found, strict=True):
            value.set_shape(variable.shape)
            flag.set_shape([])
        return {v.name: (value, flag) for v, value, flag in zip(self.variables, values, found, strict=True)}

    def _divide(self, flat: tf.Tensor, by: float) -> tf.Tensor:
        """Divide a flat tensor by a number, in float32 where the dtype is narrower."""
        if by == 1:
            return flat
        wide = tf.float32 if flat.dtype.size == 2 else flat.dtype
        return tf.cast(tf.cast(flat, wide) / number(by, wide), flat.dtype)
