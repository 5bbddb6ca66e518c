"""Steps that are exchanged uncompressed first, eagerly and in graphs; session/test_compress_after.py has torch's."""

import numpy as np
import pytest
import tensorflow as tf

import grace

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
BEGIN = 3


def counts_of_nonzeros(graph):
    """How many elements of each step's mean are not zero."""
    w = tf.Variable(tf.zeros([400]))
    exchange = grace.tensorflow.GradientExchange("topk(ratio=0.1)", compress_after=BEGIN)

    def mean_of(gradient):
        return exchange([gradient], [w])[0].value

    call, counts = tf.function(mean_of) if graph else mean_of, []
    for step in range(BEGIN + 2):
        gradient = np.random.default_rng((step, grace.rank())).standard_normal(400).astype(np.float32)
        counts.append(int(np.count_nonzero(np.array(call(tf.constant(gradient))))))
    exchange.close()
    return counts


@pytest.mark.parametrize("graph", [False, True])
def test_means_are_plain_first(two, graph):
    for counts in two.run(counts_of_nonzeros, graph):
        assert counts[:BEGIN] == [400] * BEGIN
        assert all(count <= 80 for count in counts[BEGIN:])
