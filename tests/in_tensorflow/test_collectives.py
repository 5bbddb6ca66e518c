"""Horovod's operations with ``grace`` in place of ``hvd`` on TensorFlow's tensors, eagerly and in graphs."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import on_both


@on_both
def test_operations_on_tensors_and_in_graphs():
    """Values and gradients of all of them; AutoGraph leaves them alone."""
    rank, said, start = grace.rank(), [], tf.Variable([1.0 + grace.rank()])
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    tf.get_logger().addHandler(listener)
    for wrap in (lambda f: f, tf.function):
        for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.uint8):
            x = tf.cast([1 + 2 * rank, 2], dtype)
            mean, total = wrap(lambda x: (grace.allreduce(x), grace.allreduce(x, op=grace.Sum, name="sum")))(x)
            assert mean.numpy().tolist() == [2, 2]
            assert total.numpy().tolist() == [4, 4]
            assert mean.dtype == total.dtype == dtype
            assert mean.shape == x.shape
        for dtype in (tf.float32, tf.int64, tf.bool):
            rows = tf.cast([[1, 0]] * rank, dtype) if rank else tf.zeros([0, 2], dtype)
            assert wrap(grace.allgather)(rows).numpy().tolist() == [[1, 0]]
            sent = wrap(lambda x: grace.broadcast(x, root_rank=1))(tf.cast([rank, 1], dtype))
            assert sent.numpy().tolist() == [1, 1]
        assert wrap(grace.allgather)(tf.constant(rank)).numpy().tolist() == [0, 1]
        wrap(lambda: grace.broadcast_variables([start], root_rank=1))()
        assert start.numpy().tolist() == [2]

        @wrap
        def gradients(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(grace.allreduce(x, op=grace.Sum)) + 2 * tf.reduce_sum(grace.allreduce(x))
                y += tf.reduce_sum(tf.constant([[1.0], [10.0]]) * grace.allgather(x[None]))
                y += tf.reduce_sum(grace.broadcast(x, root_rank=1))
            return tape.gradient(y, x)

        got = gradients(tf.constant([1.0, 2.0]))
        np.testing.assert_allclose(got, [2 + 2 + (10 if rank else 1) + rank] * 2)
    gathered = tf.function(grace.allgather, input_signature=[tf.TensorSpec([None], tf.float32)])
    first, second = tf.zeros([1 + rank]), tf.zeros([3 - 2 * rank])  # rows of ranks: 1 and 2, then 3 and 1
    with tf.GradientTape() as tape:
        tape.watch([first, second])
        y = tf.reduce_sum([1.0, 2.0, 3.0] * gathered(first)) + tf.reduce_sum([1.0, 2.0, 3.0, 4.0] * gathered(second))
    got = [gradient.numpy().tolist() for gradient in tape.gradient(y, [first, second])]
    assert got == ([[2, 3], [4]] if rank else [[1], [1, 2, 3]])
    tf.get_logger().removeHandler(listener)
    assert [text for text in said if "AutoGraph" in text] == []


@on_both
def test_start_values_and_tapes():
    """A model and an optimizer of rank 1's, by Horovod's lines; and what a script of its has in place of these."""
    keras.utils.set_random_seed(grace.rank())
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    made = keras.optimizers.SGD(0.1 * (grace.rank() + 1), momentum=0.9)
    made.build(model.trainable_variables)
    grace.broadcast_variables(model.variables, root_rank=1)
    grace.broadcast_parameters(model, root_rank=1)
    grace.broadcast_optimizer_state(made, root_rank=1)
    assert abs(float(made.learning_rate) - 0.2) < 1e-6
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones([1, 3])) * (grace.rank() + 1.0))
    tape = grace.DistributedGradientTape(tape, compression=grace.Compression.none)
    made.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
    with pytest.raises(grace.ConfigError, match=r"join\(\)"):
        grace.join()
    with pytest.raises(grace.ConfigError, match="holds strings"):
        grace.broadcast(tf.constant("a"), 0)
    with pytest.raises(grace.ConfigError, match="root_rank=2: the ranks are 0 to 1"):
        grace.broadcast_variables(model.variables, root_rank=2)
    return [value.numpy().tobytes() for value in model.variables]
