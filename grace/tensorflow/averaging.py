"""Periodic averages, in TensorFlow, of variables that ranks train on their own."""

from typing import Any

import tensorflow as tf

from grace.exchange.bucket import Bucket
from grace.tensorflow.reductions import summed
from grace.tensorflow.sharding import cut, put
from grace.tensorflow.variables import value_of


def average(session: Any) -> None:
    """Average the variables that are due, eagerly or in a graph. Called after the optimizer's step."""
    runner = session.runner
    for bucket in [] if runner is None else runner.averages:
        shards = [runner.shards[variable.name] for variable in bucket.variables]
        variables = [value_of(session.variables[session.names.index(shard.whole.name)]) for shard in shards]

        def write(shards=shards, variables=variables, label=f"{session.label}.average.{bucket.index}") -> int:
            values = [tf.convert_to_tensor(variable) for variable in variables]
            own = [cut(shard, value) for shard, value in zip(shards, values, strict=True)]
            for shard, variable, mean in zip(shards, variables, _means(session, own, label), strict=True):
                put(shard, variable, mean)
            return 0

        due = tf.py_function(lambda bucket=bucket: _is_due(session, bucket), [], tf.bool)
        tf.cond(due, write, lambda: 0)


def _is_due(session: Any, bucket: Bucket) -> bool:
    if bucket is session.runner.averages[0]:  # once a step: due() counts steps
        session.due = [id(other) for other in session.runner.due_averages()]
    return id(bucket) in session.due


def _means(session: Any, values: list[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Return the mean over ranks of each tensor, in its own dtype."""
    backend = session.backend
    sizes = [value.shape.num_elements() for value in values]
    flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
    flat = summed(backend, flat, label)
    flat = flat / tf.cast(backend.size, flat.dtype)
    parts = tf.split(flat, sizes)
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values, strict=True)]
