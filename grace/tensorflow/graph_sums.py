"""Plain sums in a graph: gradients that nothing compresses and nobody remembers never enter Python."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from grace.communicators import Allreduce
from grace.compressors.none import NoCompression
from grace.exchange.bucket import Bucket
from grace.exchange.tracing import recorder
from grace.kernels.tensorflow.graph_numbers import number
from grace.session.step_runner import StepRunner
from grace.tensorflow.sharding import Pair


def all_sums(runner: StepRunner) -> bool:
    """Whether a step is sums of gradients and nothing else: no state is there that they could spoil."""
    traced = recorder.run is not None  # which wants each variable's times
    if runner.stateful or traced or not runner.buckets:
        return False
    return all(map(_is_plain, runner.buckets))


def _is_plain(bucket: Bucket) -> bool:
    communicator = bucket.communicator
    parts = (type(communicator), type(communicator.compressor))
    return parts == (Allreduce, NoCompression) and not any(variable.sparse for variable in bucket.variables)


class GraphSums:
    """The plain sums of one step.

    A bucket's gradients travel in one tensor, and behind them a 1 or 0 for each: whether this rank has it. Where the
    ranks are is an exchange of its own, of a variable without elements, whose wire travels behind the first bucket.

    Args:
        runner: one of which :func:`all_sums` holds.
    """

    def __init__(self, runner: StepRunner):
        self.runner, self.buckets = runner, runner.buckets
        self.variables = [variable for bucket in self.buckets for variable in bucket.variables]
        first = self.buckets[0]
        empty = dataclasses.replace(first.variables[0], shape=(0,), dtype="float32")
        self.places = dataclasses.replace(first, variables=[empty])
        """The bucket of the exchange that tells where the ranks are."""
        self.empty = [np.zeros(0, np.float32)]
        self.owed: dict[str, Any] = {}

    def count(self) -> None:
        """Count what a run of the graph sends."""
        traffic, backend, before = self.runner.traffic, self.runner.backend, self.runner.backend.sent_bytes
        for variable in self.variables:
            counted = traffic.payload_bytes.get(variable.name, 0)
            traffic.payload_bytes[variable.name] = counted + variable.nbytes
            traffic.header_bytes += variable.bits // 8
        held = sum(variable.nbytes + variable.bits // 8 for variable in self.variables)
        backend.count(2 * (backend.size - 1) / backend.size * held)
        traffic.sent_bytes += backend.sent_bytes - before

    def run(self, given: Sequence[Sequence[tf.Tensor]], present: Sequence[Sequence[bool]], told: tf.Tensor) -> Any:
        """The operations.

        Args:
            given: each bucket's gradients.
            present: whether this rank has them.
            told: the wire of the exchange of places, which has begun.

        Returns:
            what came of that wire, and each shard's mean with whether any rank has one, by name.
        """
        from grace.backends.horovod_tensorflow import Operation  # which needs Horovod

        backend: Any = self.runner.backend
        predivide = self.runner.context.predivide
        told.set_shape([None])
        received, pairs = None, dict[str, Pair]()
        for i, bucket in enumerate(self.buckets):
            like = given[i][0]
            parts = [self._over(tf.reshape(gradient, [-1]), predivide) for gradient in given[i]]
            parts.append(tf.constant([float(here) for here in present[i]], like.dtype))
            rides = i == 0 and like.dtype == tf.float32
            if rides:
                parts.append(told)
            buffer = tf.concat(parts, 0)
            label = f"{bucket.label}.sum"
            total = backend.run(Operation("allreduce", buffer), buffer, label)
            if i == 0 and not rides:
                received = backend.run(Operation("allreduce", told), told, f"{label}.places")
            sizes = [variable.numel for variable in bucket.variables]
            held, count = sum(sizes), len(sizes)
            if rides:
                received = total[held + count :]
            found = tf.unstack(total[held : held + count] > 0, count)
            total = self._over(total[:held], self.runner.context.size / predivide)
            for variable, value, there in zip(bucket.variables, tf.split(total, sizes), found, strict=True):
                pairs[variable.name] = tf.reshape(value, variable.shape), there
        return received, pairs

    def borrow(self) -> bool:
        """Take what a checkpoint's run still had to apply to these variables; whether there is something."""
        owed = self.runner.carried_over
        self.owed = {v.name: owed.pop(v.name) for v in self.variables if v.name in owed}
        return bool(self.owed)

    def add_carried_over(self, pairs: dict[str, Pair], owing: tf.Tensor) -> dict[str, Pair]:
        """The means and what was taken, if there is something."""
        values = [pairs[variable.name][0] for variable in self.variables]
        found = [pairs[variable.name][1] for variable in self.variables]
        dtypes = [value.dtype for value in values]

        def added(*values: tf.Tensor) -> list[tf.Tensor]:
            owed = [self.owed.get(variable.name, 0.0) for variable in self.variables]
            return [value + tf.cast(more, value.dtype) for value, more in zip(values, owed, strict=True)]

        def there() -> list[tf.Tensor]:
            return tf.py_function(lambda: [variable.name in self.owed for variable in self.variables], [], flags)

        flags = [tf.bool] * len(found)
        values = tf.cond(owing, lambda: tf.py_function(added, values, dtypes), lambda: values)
        found = tf.cond(owing, lambda: [a | b for a, b in zip(found, there(), strict=True)], lambda: found)
        for variable, value, flag in zip(self.variables, values, found, strict=True):
            value.set_shape(variable.shape)
            flag.set_shape([])
        return {v.name: (value, flag) for v, value, flag in zip(self.variables, values, found, strict=True)}

    def _over(self, flat: tf.Tensor, by: float) -> tf.Tensor:
        """Divided, in float32 where the dtype is narrower."""
        if by == 1:
            return flat
        wide = tf.float32 if flat.dtype.size == 2 else flat.dtype
        return tf.cast(tf.cast(flat, wide) / number(by, wide), flat.dtype)
