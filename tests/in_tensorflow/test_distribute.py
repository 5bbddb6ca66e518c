"""tf.distribute's strategies are refused by name, wherever they are met first, before any rank waits for another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace

pytestmark = pytest.mark.usefixtures("local")

STRATEGIES = {
    "MirroredStrategy": lambda: tf.distribute.MirroredStrategy(["/cpu:0"]),
    "MultiWorkerMirroredStrategy": lambda: tf.distribute.MultiWorkerMirroredStrategy(),
    "OneDeviceStrategy": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "CentralStorageStrategy": lambda: tf.distribute.experimental.CentralStorageStrategy(),
}
X = np.ones((4, 3), "f")


def net():
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])


def optimizer():
    return grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_refused_where_an_optimizer_or_a_tape_is_made(name):
    strategy = STRATEGIES[name]()
    for wrap in (optimizer, lambda: grace.tensorflow.DistributedGradientTape(tf.GradientTape())):
        with strategy.scope(), pytest.raises(grace.ConfigError, match=f"tf.distribute's {name}, which .*horovodrun"):
            wrap()
    with strategy.scope():
        plain = keras.optimizers.SGD(0.1)
    with pytest.raises(grace.ConfigError, match=name):
        grace.DistributedOptimizer(plain)


def test_a_strategy_is_refused_where_it_is_first_used():
    strategy = STRATEGIES["MirroredStrategy"]()
    with strategy.scope():
        model = net()
    for callbacks in ([grace.tensorflow.BroadcastCallback()], [grace.tensorflow.MetricAverageCallback()], []):
        model.compile(optimizer(), "mse", jit_compile=False)
        with pytest.raises(grace.ConfigError, match="MirroredStrategy"):
            model.fit(X, X[:, :2], verbose=0, callbacks=callbacks)
        assert model.optimizer._grace.runner is None
    with pytest.raises(grace.ConfigError, match="MirroredStrategy"):
        grace.tensorflow.broadcast_variables(model.variables)
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    with pytest.raises(grace.GraceError, match="MirroredStrategy"):  # outside of the scope, of its copies
        optimizer().apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    outside, made = net(), optimizer()
    gradients = [tf.ones(v.shape) for v in outside.trainable_variables]
    with strategy.scope(), pytest.raises(grace.ConfigError, match="MirroredStrategy"):
        made.apply_gradients(zip(gradients, outside.trainable_variables, strict=True))
    made.apply_gradients(zip(gradients, outside.trainable_variables, strict=True))
    assert made.traffic.steps == 1
