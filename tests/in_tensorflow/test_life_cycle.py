"""What Keras optimizers may become while they are distributed, and what becomes of them."""

# ruff: noqa: E402 - what is imported after TensorFlow needs it

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import keras

import grace

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone():
    """One process."""
    grace.shutdown()
    grace.init("local")
    yield
    grace.shutdown()


@pytest.mark.parametrize("compressor", ["dgc", "signum"])
@pytest.mark.parametrize("graph", [False, True], ids=["eagerly", "in a graph"])
def test_momentum_inside_and_outside_is_refused_at_the_start_and_later(compressor, graph):
    w = tf.Variable([1.0, 2.0])

    def applying(optimizer):
        step = lambda: optimizer.apply_gradients([(tf.constant([1.0, 4.0]), w)])  # noqa: E731
        return tf.function(step, autograph=False) if graph else step

    for made in (keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)):
        with pytest.raises(grace.ConfigError, match=rf"{compressor} applies momentum itself.*\(momentum=0.9\)"):
            applying(grace.DistributedOptimizer(made, compressor))()
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    applying(optimizer)()
    before = w.numpy().tolist()
    optimizer.momentum = 0.5
    with pytest.raises(grace.ConfigError, match=r"the optimizer has momentum 0\.5 now"):
        applying(optimizer)()
    assert w.numpy().tolist() == before
