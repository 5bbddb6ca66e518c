"""A user's own parts, written with TensorFlow's operations; and what the exchange computes with."""

import gc
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket
from grace.tensorflow import Allgather, Communicator, Compressor, Memory, Traits
from grace.tensorflow.representation import Arrays, Tensors, representation_for
from tests.support.tensorflow_training import both_ways, on_both, on_horovod, session_of, traced


class Int8(Compressor):
    name = "int8"
    traits = Traits(category="quantization", memory="residual")

    def compress(self, tensor, name):
        assert tf.is_tensor(tensor)
        scale = tf.reshape(tf.reduce_max(tf.abs(tensor)) / 127, [1])
        return [tf.cast(tf.round(tensor / scale), tf.int8), scale], None

    def decompress(self, payload, ctx):
        codes, scale = payload
        return tf.cast(codes, tf.float32) * scale


class Decaying(Memory):
    def compensate(self, tensor, name):
        return tensor + 0.5 * self.state.get(name, tf.zeros_like(tensor))

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = tensor - compressor.decompress(payload, ctx)


class Signs(Compressor):
    """Signs as in GRACE's TensorFlow code: a tensor of bools."""

    def compress(self, tensor, name):
        return [tf.math.greater_equal(tf.reshape(tensor, [-1]), 0)], tf.shape(tensor)

    def decompress(self, tensors, shape):
        (signs,) = tensors
        assert signs.dtype == tf.bool
        return tf.reshape(tf.cast(signs, tf.float32) * 2 - 1, shape)


class Gathering(Communicator):
    """GRACE's all-gather for TensorFlow: a collective of the engine's for each tensor, whatever it is of."""

    def send_receive(self, tensors, ctx):
        parts = [self.backend.allgather(tf.reshape(tensor, [-1])).wait() for tensor in tensors]
        decoded = [self.compressor.decompress(list(payload), ctx) for payload in zip(*parts, strict=True)]
        return self.compressor.aggregate(decoded) / self.world_size


def expected():
    total, kept = [], [np.zeros(40, np.float32)] * 2
    for step in range(3):
        decoded = []
        for rank in range(2):
            x = np.random.default_rng((step, rank)).standard_normal(40).astype(np.float32) + 0.5 * kept[rank]
            scale = np.abs(x).max() / 127
            decoded.append(np.round(x / scale) * scale)
            kept[rank] = x - decoded[rank]
        total.append(sum(decoded) / 2)
    return total


def gradients():
    """This rank's, of three steps."""
    return [np.random.default_rng((step, grace.rank())).standard_normal(40).astype(np.float32) for step in range(3)]


@both_ways
@on_both
def test_signs_travel_as_bools_by_graces_all_gather_and_by_one_of_ones_own(graph):
    given = [np.random.default_rng(rank).standard_normal((5, 8)).astype(np.float32) for rank in range(grace.size())]
    wanted = sum(np.sign(each) for each in given) / grace.size()
    for grc in (Allgather(Signs(), "none"), Gathering(Signs(), "none")):
        run = traced(lambda x, grc=grc: grc.step(x, "w"), graph)
        np.testing.assert_array_equal(run(tf.constant(given[grace.rank()])), wanted)


@both_ways
@pytest.mark.parametrize("communicator", [Allgather, Gathering])
@on_both
def test_parts_written_in_tensorflow_get_tensors(communicator, graph):
    """Also by a communicator of GRACE's contract, which is carried by an exchange and by hand."""
    w = tf.Variable(tf.zeros([40]))
    exchange = grace.tensorflow.GradientExchange(communicator=communicator(Int8(), Decaying()))
    by_hand = communicator(Int8(), Decaying())
    run = traced(lambda gradient: exchange.exchange([gradient], [w])[0].value, graph)
    for gradient, wanted in zip(gradients(), expected(), strict=True):
        np.testing.assert_allclose(run(tf.constant(gradient)), wanted, atol=1e-6)
        np.testing.assert_allclose(by_hand.step(tf.constant(gradient), "w"), wanted, atol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="Numba is not installed")
def test_graces_own_parts_compute_with_arrays_and_others_with_tensors():
    ours = grace.make("compressor", "topk | qsgd"), grace.make("memory", "residual")
    assert type(representation_for(ours)) is Arrays
    assert type(representation_for([ours[0], Decaying()])) is Tensors
    assert type(representation_for([Allgather(Int8())])) is Tensors


def test_memory_is_used_again_only_when_its_tensors_are_gone():
    arrays, bucket = Arrays(), Bucket(0, Allgather("none"), [Variable("w", (3, 4))])

    def lend(value):
        (out,) = arrays.outs(bucket)
        out[...] = value
        return arrays.to_tensor(out)

    first = lend(1.0)
    second = lend(2.0)
    assert np.unique(first.numpy()).tolist() == [1.0]
    address = arrays.memory["w"][0].ctypes.data
    del second
    gc.collect()
    third = lend(3.0)
    assert arrays.memory["w"][0].ctypes.data == address
    assert np.unique(first.numpy()).tolist() == [1.0]
    assert np.unique(third.numpy()).tolist() == [3.0]


def test_means_that_a_loop_keeps_stay_as_they_were(local):
    exchange, w = session_of("topk(ratio=0.5)"), tf.Variable(tf.zeros([200]))
    kept = [exchange.exchange([tf.fill([200], float(n))], [w])[0].value for n in range(1, 4)]
    sent = [np.flatnonzero(mean.numpy()) for mean in kept]
    assert [np.unique(mean.numpy()).tolist() for mean in kept] == [[0, 1], [0, 3], [0, 5]]
    assert (sent[0].tolist(), sent[1].tolist()) == (list(range(100)), list(range(100, 200)))


class Ported(Compressor):
    """Sends as many as are positive, and does not say so; a single tensor."""

    def compress(self, tensor, name):
        return tf.boolean_mask(tensor, tensor > 0), tensor.shape

    def decompress(self, payload, ctx):
        return tf.fill(ctx, tf.reduce_sum(payload[0]))


class TransactionalDict(Memory):
    def __init__(self):
        self.residuals = {}

    def compensate(self, tensor, name):
        self.residuals[name] = self.residuals[name] + tensor if name in self.residuals else tensor
        return self.residuals[name]


@on_horovod
def test_sizes_that_nobody_announced_are_compared_in_graphs():
    w = tf.Variable(tf.zeros([4]))
    exchange = grace.tensorflow.GradientExchange(communicator=Allgather(Ported(), TransactionalDict()))
    run = traced(lambda gradient: exchange.exchange([gradient], [w])[0].value)
    means = [run(tf.constant([1.0, -1.0, 1.0, -1.0])).numpy().tolist() for _ in range(2)]
    assert means == [[2.0] * 4, [4.0] * 4]
    with pytest.raises(tf.errors.OpError) as caught:
        run(tf.constant([5.0] * 4 if grace.rank() else [-5.0] * 4))
    assert "the payload of 'Variable' has" in str(caught.value)
    assert "fixed_size='by data'" in str(caught.value)
