"""Scripts written for Horovod: their own operations beside exchanges, and what is refused by name."""

import time

import keras
import pytest
import tensorflow as tf

import grace

pytestmark = pytest.mark.ranks


def with_own_operations(steps):
    """The script broadcasts eagerly, where Horovod heeds no names, while exchanges of earlier steps are under way."""
    import horovod.tensorflow as hvd

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


def test_eager_operations_of_the_script_do_not_meet_those_of_exchanges(horovod):
    first, second = horovod.run(with_own_operations, 60)
    assert first == second


def left_in():
    import horovod.keras

    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    ours, theirs, fp16 = grace.DistributedOptimizer, horovod.keras.DistributedOptimizer, horovod.keras.Compression.fp16
    said = []
    for wrap in (
        lambda: ours(theirs(sgd())),
        lambda: theirs(ours(sgd())),
        lambda: ours(sgd(), compression=fp16),
        lambda: ours(sgd(), fp16),
        lambda: grace.tensorflow.DistributedGradientTape(tf.GradientTape(), compression=fp16),
    ):
        with pytest.raises(grace.ConfigError) as refused:
            wrap()
        said.append(str(refused.value))
    return said


def test_what_a_script_left_in_of_horovod_is_refused_by_name(horovod):
    for said in horovod.run(left_in):
        assert "is Horovod's DistributedOptimizer already: leave that out" in said[0]
        assert "leave out hvd.DistributedOptimizer" in said[1]
        assert all("Grace's is compressor=" in message for message in said[2:])
