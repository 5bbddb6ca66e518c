"""Ranks that go different ways under TensorFlow: noticed by all ranks in the next exchange, eagerly and in graphs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS, WRONG_AT = 5, 2
FAULTS = {
    "step": "rank 1 is at step 1, rank 0 is at step 2: rank 1 left out a training step (optimizer.apply)",
    "learning rate": "rank 0 has the learning rate 0.5, rank 1 has the learning rate 0.25",
}


def with_fault(fault: str, how: str, compressor: str) -> tuple[str, int, bool]:
    """The error, the step that it came in, and whether that changed a variable."""
    w = tf.Variable(np.ones(64, np.float32))
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.5), compressor=compressor)
    optimizer.build([w])
    apply = tf.function(lambda g: optimizer.apply([g], [w])) if how == "graph" else lambda g: optimizer.apply([g], [w])
    for step in range(STEPS):
        before = w.numpy()
        if step == WRONG_AT and grace.rank() == 1:
            if fault == "step":  # the update failed after the exchange, and the program went on
                optimizer.iterations.assign_sub(1)
            else:
                optimizer.learning_rate.assign(0.25)
        try:
            apply(tf.fill([64], 1.0 + step))
        except Exception as error:  # TensorFlow makes another of it
            return str(error), step, bool((w.numpy() != before).any())
    return "", STEPS, False


def all_faults(how: str) -> list[tuple[str, tuple[str, int, bool]]]:
    return [(fault, with_fault(fault, how, m)) for fault in FAULTS for m in ("none", "topk(ratio=0.1)")]


def test_a_rank_that_goes_its_own_way_is_named(two):
    for how in ("graph", "eager"):
        for answer in two.run(all_faults, how):
            for fault, (said, step, changed) in answer:
                assert FAULTS[fault] in said
                assert step == WRONG_AT
                assert not changed


def other_settings() -> str:
    w = tf.Variable(np.ones(4, np.float32))
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5 + 0.4 * grace.rank()))
    try:
        optimizer.apply([tf.ones(4)], [w])
    except grace.RankError as error:
        return str(error)
    return ""


def test_other_hyperparameters_are_refused_before_anything_is_exchanged(mpi):
    for said in mpi.run(other_settings):
        assert "optimizer SGD, momentum 0.5, rank 1 has" in said
