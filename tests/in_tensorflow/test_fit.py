"""Methods under Keras ``fit`` and in custom steps, eager and graph, over real ranks."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.drawing import THOROUGH
from tests.support.pools import launched
from tests.support.tensorflow_training import LOSS, digest, network, samples
from tests.support.training import SPECS, momentum_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHORT = {
    "mpirun-mpi": [("qsgd", "fit")] + [("signsgd", way) for way in ("tf.function", "eager loop")],
    "horovodrun-gloo": [("powersgd(rank=2)", "fit"), ("topk(ratio=0.1)", "fit eagerly")],
}
"""Each way with one kind of exchange; test_engines.py has every method, and all kinds in graphs."""
WAYS = ("tf.function", "fit", "eager loop", "fit eagerly")
CASES = {engine: list(itertools.product(SPECS, WAYS)) for engine in SHORT} if THOROUGH else SHORT
EVERY = [(engine, *case) for engine, cases in CASES.items() for case in cases]


def train(spec: str, way: str) -> tuple[str, list[float], int]:
    """A hash of the weights, the losses, and how often a step was traced after the second one."""
    traces = []

    def loss(labels, logits):
        traces.append(len(losses))
        return LOSS(labels, logits)

    losses: list[float] = []
    model = network(seed=grace.rank(), sizes=(16, 24, 10))  # start values differ between ranks
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=momentum_for(spec)), compressor=spec)
    x, y = samples(64, grace.rank())
    if way.startswith("fit"):
        model.compile(optimizer, loss, run_eagerly=way.endswith("eagerly"))
        record = keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        callbacks = [grace.tensorflow.BroadcastCallback(), record]
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    else:
        grace.tensorflow.broadcast_variables(model.variables)

        def step(inputs, labels):
            with tf.GradientTape() as tape:
                value = loss(labels, model(inputs, training=True))
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
            return value

        run = tf.function(step) if way == "tf.function" else step
        for number in range(8):
            rows = slice(16 * (number % 4), 16 * (number % 4) + 16)
            losses.append(float(run(tf.constant(x[rows]), tf.constant(y[rows]))))
    late = 0 if "eager" in way else sum(done >= 2 for done in traces)
    return digest(model.trainable_variables), losses, late


def everything(cases):
    return {case: train(*case) for case in cases}


@functools.cache
def results(engine):
    return launched(engine, 2, "tensorflow").run(everything, CASES[engine])


@pytest.mark.every
@pytest.mark.parametrize(("engine", "spec", "way"), EVERY)
def test_ranks_end_with_the_same_bits_and_trace_once(engine, spec, way):
    (first, losses, late), (second, _, _) = (rank[spec, way] for rank in results(engine))
    assert first == second
    assert late == 0
    assert np.isfinite(losses).all()
    assert np.mean(losses[4:]) < np.mean(losses[:4])


@pytest.mark.every
@pytest.mark.parametrize(("engine", "spec"), [case[:2] for case in EVERY if case[2] == "eager loop"])
def test_graphs_and_loops_follow_the_same_curve(engine, spec):
    for rank in results(engine):
        custom = rank[spec, "eager loop"][1]
        np.testing.assert_allclose(rank[spec, "tf.function"][1], custom, rtol=2e-3, err_msg="tf.function")
