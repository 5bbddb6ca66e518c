"""Horovod's Keras API under Keras 3, against docs/from-horovod.md, line by line."""

import keras
import numpy as np
import pytest

import grace

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def tried(folder):
    """Return the result of each part: an error's words, or whether both ranks have the same weights."""
    import horovod.keras as hvd

    x = np.full((16, 4), 1.0 + grace.rank(), "f")

    def fit(optimizer, *callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
        model.compile(optimizer, "mse", run_eagerly=True)
        model.fit(x, x[:, :2], batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
        return model

    def same(model):
        told = grace.tensorflow.callbacks.current().allgather_object(np.ravel(model.get_weights()[0]).tolist())
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
            "CommitStateCallback": "'list' object is not callable",
        }
