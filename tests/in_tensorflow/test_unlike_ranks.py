"""Ranks that differ in what TensorFlow gives them: gradients on some ranks only, models that one rank alone restored."""

# ruff: noqa: E402 - what is imported after TensorFlow needs it

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from pools import launched

import grace

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(params=["horovodrun-gloo", "mpirun-mpi"], scope="module")
def two(request):
    return launched(request.param, 2, "tensorflow")


def on_one_rank(graph):
    """The gradients of three variables: on both ranks, on rank 1 only, on none; and what becomes of the third later."""
    variables = [tf.Variable([1.0], name=name) for name in "abc"]
    exchange = grace.tensorflow.GradientExchange()

    def step(wanted):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * 2.0)
            if grace.rank() == 1:
                loss += tf.reduce_sum(variables[wanted] * 4.0)
        tape = grace.tensorflow.DistributedGradientTape(tape, exchange=exchange)
        gradients = tape.gradient(loss, variables)
        seen.append([gradient is not None for gradient in gradients])
        return [tf.constant([-1.0]) if gradient is None else gradient for gradient in gradients]

    seen = []
    run = tf.function(step, autograph=False) if graph else step
    found = [np.array(gradient).tolist() for gradient in run(1)]
    try:
        later = [np.array(gradient).tolist() for gradient in run(2)]
    except Exception as error:  # TensorFlow makes another of it
        later = str(error)
    return seen[0], found, later


def test_a_tape_gives_the_mean_where_only_another_rank_has_a_gradient(two):
    for graph in (False, True):
        first, second = two.run(on_one_rank, graph)
        for seen, found, _ in (first, second):
            assert seen == [True, True, False]
            assert found == [[2], [2], [-1]]
        if graph:
            assert "'c' is None in this graph" in first[2]
        else:
            assert first[2] == second[2] == [[2], [-1], [2]]
