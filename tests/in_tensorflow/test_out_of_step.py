"""Ranks that go different ways under TensorFlow: noticed by all ranks in the next exchange, eagerly and in graphs."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import both_ways, on_both, on_mpi, traced

WRONG_AT = 2
FAULTS = {
    "step": "rank 1 is at step 1, rank 0 is at step 2: rank 1 left out a training step (optimizer.apply)",
    "learning rate": "rank 0 has the learning rate 0.5, rank 1 has the learning rate 0.25",
}


@both_ways
@on_both
def test_a_rank_that_goes_its_own_way_is_named(graph):
    """No variable changes in the step in which all ranks notice it."""
    for fault, compressor in itertools.product(FAULTS, ("none", "topk(ratio=0.1)")):
        w = tf.Variable(np.ones(64, np.float32))
        optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.5), compressor=compressor)
        optimizer.build([w])
        apply = traced(lambda g, optimizer=optimizer, w=w: optimizer.apply([g], [w]), graph)
        for step in range(WRONG_AT):
            apply(tf.fill([64], 1.0 + step))
        before = w.numpy()
        if grace.rank() == 1 and fault == "step":  # the update failed after the exchange, and the program went on
            optimizer.iterations.assign_sub(1)
        elif grace.rank() == 1:
            optimizer.learning_rate.assign(0.25)
        with pytest.raises(Exception) as caught:  # noqa: PT011 # TensorFlow makes another of it
            apply(tf.fill([64], 1.0 + WRONG_AT))
        assert FAULTS[fault] in str(caught.value)
        assert (w.numpy() == before).all()


@on_mpi
def test_other_hyperparameters_are_refused_before_anything_is_exchanged():
    w = tf.Variable(np.ones(4, np.float32))
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5 + 0.4 * grace.rank()))
    with pytest.raises(grace.RankError, match=r"optimizer SGD, momentum 0\.5, rank 1 has"):
        optimizer.apply([tf.ones(4)], [w])
