"""Exchanges that run beside training, and Horovod's own operations of the script meanwhile."""

from __future__ import annotations

import time

import pytest
from pools import launched

import grace

pytestmark = pytest.mark.ranks


def with_own_operations(steps):
    """The script broadcasts eagerly, where Horovod heeds no names, while exchanges of earlier steps are under way."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    made = keras.optimizers.SGD(0.01)
    optimizer = grace.DistributedOptimizer(made, "topk(ratio=0.1)", communicator="reduce_broadcast(staleness=2)")
    weights = [tf.Variable(tf.random.stateless_normal((32, 32), (i, 0))) for i in range(4)]
    for step in range(steps):
        gradients = [tf.tanh(w) * (1.0 + grace.rank()) for w in weights]
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        time.sleep(0.002 * (step % 3) * grace.rank())
        mine = tf.constant([step + grace.rank()])
        assert int(hvd.broadcast(mine, 1)[0]) == step + 1
        received = hvd.alltoall(tf.concat([mine, mine], 0))
        assert (received[0] if isinstance(received, (tuple, list)) else received).numpy().tolist() == [step, step + 1]
    return [w.numpy().tobytes() for w in weights]


def test_eager_operations_of_the_script_do_not_meet_those_of_exchanges():
    first, second = launched("horovodrun-gloo", 2, "tensorflow").run(with_own_operations, 60, timeout=100)
    assert first == second
