"""Communicators that the user calls, eagerly and in a ``tf.function``."""

import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.communicators import Allgather
from grace.communicators.choice import build_communicator
from tests.support.drawing import THOROUGH
from tests.support.training import KINDS, made_up

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHAPES = {"matrix": (20, 30), "vector": (700,)}
SPECS = KINDS if THOROUGH else ("bf16", "topk(ratio=0.1)", "powersgd(rank=2)")
"""test_engines.py traces the others for optimizers."""


def both_ways(specs):
    """The means of two steps of each method, eagerly and in a graph, and what is remembered after them."""
    found = {}
    for spec in specs:
        for graph in (False, True):
            grc = build_communicator(spec, None, None)
            grc.lr = 0.1

            def step(a, b, grc=grc):
                return grc.step(a, "matrix"), *grc.step([b], ["vector"])

            run = tf.function(step, autograph=False) if graph else step
            for number in range(2):
                given = made_up(SHAPES, number, grace.rank())
                means = [mean.numpy() for mean in run(*map(tf.constant, given.values()))]
            found[spec, graph] = means, grc.state_dict()["grace"]["step"]
    return found


def test_graphs_give_what_eager_steps_do(horovod):
    first, second = horovod.run(both_ways, SPECS)
    for spec in SPECS:
        eager, graph = first[spec, False], first[spec, True]
        assert eager[1] == graph[1] == 4
        for mine, traced, others in zip(eager[0], graph[0], second[spec, True][0], strict=True):
            np.testing.assert_array_equal(mine, traced, err_msg=spec)
            np.testing.assert_array_equal(mine, others, err_msg=spec)


def as_graces_scripts_write_it():
    """What a step leaves of weights of 0, by each way to give a communicator."""
    left = {}
    for number, way in enumerate([{"communicator": True}, {"grace": True}, {}]):
        for tape in (False, True):
            given = [] if way else [Allgather("topk(ratio=0.25)", "residual", grace.size())]
            named = {key: Allgather("topk(ratio=0.25)", "residual", grace.size()) for key in way}
            optimizer, w = tf.keras.optimizers.SGD(1.0), tf.Variable(tf.zeros(8))
            with tf.GradientTape() as recorded:
                loss = tf.reduce_sum(w * tf.range(8, dtype=tf.float32) * (1.0 + grace.rank()))
            if tape:
                recorded = grace.tensorflow.DistributedGradientTape(recorded, *given, **named)
            else:
                optimizer = grace.DistributedOptimizer(optimizer, *given, **named)
            optimizer.apply_gradients([(recorded.gradient(loss, w), w)])
            left[number, tape] = w.numpy().tolist()
    return left


def test_communicators_are_taken_wherever_graces_scripts_put_them(horovod):
    for left in horovod.run(as_graces_scripts_write_it):
        assert len(left) == 6
        assert all(weights == [0, 0, 0, 0, 0, 0, -9, -10.5] for weights in left.values())


def test_xla_is_refused():
    grace.init("local")
    grc = grace.from_params({"compressor": "topk"})
    with pytest.raises(grace.ConfigError, match="XLA cannot compile an exchange"):
        tf.function(lambda x: grc.step(x, "w"), jit_compile=True, autograph=False)(tf.ones(3))
    grace.shutdown()
