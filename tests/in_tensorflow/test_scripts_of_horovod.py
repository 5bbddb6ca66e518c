"""Scripts written for Horovod: their own operations beside exchanges, and what is refused by name."""

import time

import keras
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import on_horovod

pytestmark = pytest.mark.ranks


@on_horovod
def test_eager_operations_of_the_script_do_not_meet_those_of_exchanges():
    """The script broadcasts eagerly, where Horovod heeds no names, while exchanges of earlier steps are under way."""
    import horovod.tensorflow as hvd

    made = keras.optimizers.SGD(0.01)
    optimizer = grace.DistributedOptimizer(made, "topk(ratio=0.1)", communicator="reduce_broadcast(staleness=2)")
    weights = [tf.Variable(tf.random.stateless_normal((32, 32), (i, 0))) for i in range(4)]
    for step in range(24):
        gradients = [tf.tanh(w) * (1.0 + grace.rank()) for w in weights]
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        time.sleep(0.002 * (step % 3) * grace.rank())
        mine = tf.constant([step + grace.rank()])
        assert int(hvd.broadcast(mine, 1)[0]) == step + 1
        received = hvd.alltoall(tf.concat([mine, mine], 0))
        assert (received[0] if isinstance(received, (tuple, list)) else received).numpy().tolist() == [step, step + 1]
    return [w.numpy().tobytes() for w in weights]


@on_horovod
def test_what_a_script_left_in_of_horovod_is_refused_by_name():
    import horovod.keras

    sgd = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    ours, theirs, fp16 = grace.DistributedOptimizer, horovod.keras.DistributedOptimizer, horovod.keras.Compression.fp16
    for wrap, said in {
        lambda: ours(theirs(sgd())): "is Horovod's DistributedOptimizer already: leave that out",
        lambda: theirs(ours(sgd())): "leave out hvd.DistributedOptimizer",
        lambda: ours(sgd(), compression=fp16): "Grace's is compressor=",
        lambda: ours(sgd(), fp16): "Grace's is compressor=",
        lambda: grace.tensorflow.DistributedGradientTape(tf.GradientTape(), compression=fp16): "Grace's is compressor=",
        lambda: ours(sgd(), backward_passes_per_step=1, average_aggregated_gradients=True): "gradient_accumulation_st",
        lambda: ours(sgd(), num_groups=2): "for Keras Grace has none: bucket_bytes=",
        lambda: ours(tf.compat.v1.train.AdamOptimizer()): "those of TensorFlow 1 need sessions",
    }.items():
        with pytest.raises(grace.ConfigError, match=said):
            wrap()
