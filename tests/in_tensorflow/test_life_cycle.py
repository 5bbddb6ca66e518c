"""Keras optimizers that are copied, rebuilt, closed or dropped while they are distributed."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf

import grace
from grace.tensorflow import Allgather
from tests.support.tensorflow_training import LOSS, both_ways, fit, network, traced

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local")]


@pytest.mark.parametrize("compressor", ["dgc", "signum"])
@both_ways
def test_momentum_inside_and_outside_is_refused_at_the_start_and_later(compressor, graph):
    w = tf.Variable([1.0, 2.0])

    def applying(optimizer):
        return traced(lambda: optimizer.apply_gradients([(tf.constant([1.0, 4.0]), w)]), graph)

    sgd, adam = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)
    for made, setting in ((sgd, "momentum"), (adam, "beta_1")):
        said = rf"{compressor} applies momentum itself.* has {setting} 0\.9: .* {setting} 0, .*\(momentum=0\.9\)"
        with pytest.raises(grace.ConfigError, match=said):
            applying(grace.DistributedOptimizer(made, compressor))()
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor)
    applying(optimizer)()
    before = w.numpy().tolist()
    optimizer.momentum = 0.5
    with pytest.raises(grace.ConfigError, match=r"the optimizer has momentum 0\.5 now: it would be"):
        applying(optimizer)()
    assert w.numpy().tolist() == before


@both_ways
def test_a_closed_optimizer_is_plain_and_may_be_distributed_anew(graph):
    given = Allgather("topk(ratio=0.5)")
    w, plain = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5, momentum=0.5)
    before, kind = set(vars(plain)), type(plain)

    def step():
        plain.apply_gradients([(tf.constant([1.0, 4.0]), w)])

    optimizer = grace.DistributedOptimizer(plain, communicator=given)
    apply = traced(step, graph)
    apply()
    assert w.numpy().tolist() == [1.0, 0.0]
    optimizer.close()
    assert type(plain) is kind
    assert not {name for name in set(vars(plain)) - before if "grace" in name}
    if graph:
        with pytest.raises(Exception, match=r"closed.*trace your function anew"):
            apply()
    step()
    assert w.numpy().tolist() == [0.5, -3.0]  # momentum went on, and what topk left out is gone
    again = grace.DistributedOptimizer(plain, communicator=given)
    step()
    assert again.traffic.steps == 1
    assert w.numpy().tolist() == [0.25, -6.5]


def test_of_a_closed_optimizer_nothing_is_left_once_another_exchanges():
    """The last bucket that was exchanged is kept, to be named if the engine fails."""
    w, optimizer, sessions = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(0.5), []
    for _ in range(2):
        grace.DistributedOptimizer(optimizer, "topk(ratio=0.5)")
        optimizer.apply_gradients([(tf.constant([1.0, 4.0]), w)])
        sessions.append(weakref.ref(optimizer._grace))
        optimizer.close()
    gc.collect()
    assert sessions[0]() is None


def test_what_a_deleted_optimizer_used_serves_another_one():
    given, w = Allgather("topk(ratio=0.5)"), tf.Variable([1.0, 2.0])
    for _ in range(2):
        optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.5), communicator=given)
        optimizer.apply_gradients([(tf.constant([1.0, 4.0]), w)])
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
    assert w.numpy().tolist() == [1.0, -2.0]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
def test_a_model_that_was_trained_before_exchanges_from_then_on(scaled):
    model = network()
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, LOSS)
    fit(model, range(1))
    grace.DistributedOptimizer(model.optimizer, compressor="topk(ratio=0.1)")
    fit(model, range(1))
    assert optimizer.traffic.steps == 4
