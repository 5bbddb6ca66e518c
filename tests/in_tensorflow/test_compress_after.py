"""Steps that are exchanged uncompressed first, eagerly and in graphs; session/test_compress_after.py has torch's."""

import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import both_ways, on_both, traced

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
BEGIN = 3


@both_ways
@on_both
def test_means_are_plain_first(graph):
    w = tf.Variable(tf.zeros([400]))
    exchange = grace.tensorflow.GradientExchange("topk(ratio=0.1)", compress_after=BEGIN)
    call = traced(lambda gradient: exchange.exchange([gradient], [w])[0].value, graph)
    nonzeros = []
    for step in range(BEGIN + 2):
        gradient = np.random.default_rng((step, grace.rank())).standard_normal(400).astype(np.float32)
        nonzeros.append(int(np.count_nonzero(call(tf.constant(gradient)))))
    assert nonzeros[:BEGIN] == [400] * BEGIN
    assert all(count <= 80 for count in nonzeros[BEGIN:])
    exchange.close()
