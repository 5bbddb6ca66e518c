"""Scripts written for Horovod: their own operations beside exchanges, what is refused by name, and Horovod's Keras API
under Keras 3, against docs/from-horovod.md, line by line."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.backends.runtime import current
from tests.support.tensorflow_training import on_horovod


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


def tried(folder):
    """Return the result of each part: an error's words, or whether both ranks have the same weights."""
    import horovod.keras as hvd
    from horovod.tensorflow import broadcast_variables

    x = np.full((16, 4), 1.0 + grace.rank(), "f")

    def fit(optimizer, *callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
        return model

    def same(model):
        told = current().allgather_object(np.ravel(model.get_weights()[0]).tolist())
        return told[0] == told[1]

    def said(call):
        with pytest.raises((AttributeError, TypeError, ValueError)) as error:
            call()
        return str(error.value)

    sgd, made = (lambda: keras.optimizers.SGD(0.1, momentum=0.9)), hvd.callbacks
    plain = f"{folder}/{grace.rank()}.keras"
    fit(sgd()).save(plain)
    state = lambda: hvd.elastic.KerasState(fit(sgd()), batch=0, epoch=0)  # noqa: E731
    return {
        "DistributedOptimizer": same(fit(hvd.DistributedOptimizer(sgd()))),
        "load_model": type(hvd.load_model(plain).optimizer) is keras.optimizers.SGD,
        "LearningRateWarmupCallback": said(lambda: fit(sgd(), made.LearningRateWarmupCallback(0.1, warmup_epochs=1))),
        "LearningRateScheduleCallback": said(lambda: fit(sgd(), made.LearningRateScheduleCallback(0.1, 0.5))),
        "MetricAverageCallback": said(lambda: fit(sgd(), made.MetricAverageCallback())),
        "BroadcastGlobalVariablesCallback": said(lambda: fit(sgd(), made.BroadcastGlobalVariablesCallback(0))),
        "broadcast_variables": said(lambda: broadcast_variables(fit(sgd()).variables, 0)).rpartition("'Symbol")[2],
        "CommitStateCallback": said(lambda: hvd.elastic.CommitStateCallback(state())),
    }


def test_horovods_keras_api_is_broken_as_the_page_says(horovod, tmp_path):
    for found in horovod.run(tried, str(tmp_path)):
        assert found == {
            "DistributedOptimizer": False,  # nothing is exchanged
            "load_model": True,  # likewise
            "LearningRateWarmupCallback": "module 'keras.backend' has no attribute 'get_value'",
            "LearningRateScheduleCallback": "module 'keras.backend' has no attribute 'get_value'",
            "MetricAverageCallback": "module 'keras.backend' has no attribute 'constant'",
            "BroadcastGlobalVariablesCallback": "'Variable' object has no attribute 'ref'",
            "broadcast_variables": "icTensor' object has no attribute 'assign'\n",
            "CommitStateCallback": "'list' object is not callable",
        }
