"""Communicators that the user calls, eagerly and in a ``tf.function``."""

import pytest
import tensorflow as tf

import grace
from grace.communicators import Allgather
from grace.communicators.choice import build_communicator
from tests.support.drawing import THOROUGH
from tests.support.tensorflow_training import on_horovod, traced
from tests.support.training import KINDS, made_up

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHAPES = {"matrix": (20, 30), "vector": (700,)}
SPECS = KINDS if THOROUGH else ("bf16", "topk(ratio=0.1)", "powersgd(rank=2)")
"""test_engines.py traces the others for optimizers."""


@pytest.mark.parametrize("spec", SPECS)
@on_horovod
def test_graphs_give_what_eager_steps_do(spec):
    """The means of two steps, and how many there were."""
    found = []
    for graph in (False, True):
        grc = build_communicator(spec, None, None)
        grc.lr = 0.1
        run = traced(lambda a, b, grc=grc: (grc.step(a, "matrix"), *grc.step([b], ["vector"])), graph)
        for number in range(2):
            given = made_up(SHAPES, number, grace.rank())
            means = [mean.numpy().tolist() for mean in run(*map(tf.constant, given.values()))]
        assert grc.state_dict()["grace"]["step"] == 4
        found.append(means)
    assert found[0] == found[1]
    return found


@on_horovod
def test_communicators_are_taken_wherever_graces_scripts_put_them():
    """A step from weights of 0 is the same by each way to give a communicator."""
    for way in ({"communicator": True}, {"grace": True}, {}):
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
            assert w.numpy().tolist() == [0, 0, 0, 0, 0, 0, -9, -10.5]


def test_xla_is_refused(local):
    grc = grace.from_params({"compressor": "topk"})
    with pytest.raises(grace.ConfigError, match="XLA cannot compile an exchange"):
        tf.function(lambda x: grc.step(x, "w"), jit_compile=True, autograph=False)(tf.ones(3))
