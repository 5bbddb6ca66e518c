"""Two optimizers, a tape and the user's own collectives beside each other, over engines that pair by order."""

import keras
import numpy as np
import tensorflow as tf

import grace
from tests.support.tensorflow_training import on_mpi


@on_mpi
def test_each_has_a_channel_of_its_own():
    from mpi4py import MPI

    rank, size = grace.rank(), grace.size()
    variables = [[tf.Variable(np.zeros(6, np.float32)) for _ in range(3)] for _ in range(3)]
    optimizers = [grace.DistributedOptimizer(keras.optimizers.SGD(1.0), group_bytes=24) for _ in range(2)]
    exchange = grace.tensorflow.GradientExchange(group_bytes=24)
    for step in range(3):
        for number in range(3):
            left_out = {0: 2, 1: 0}.get(number) if rank == 1 else None

            def value(i, other, step=step, number=number):
                return float(1 + step + 10 * other + 100 * number + 1000 * i)

            given = [None if i == left_out else tf.fill([6], value(i, rank)) for i in range(3)]
            if number < 2:
                before = [v.numpy() for v in variables[number]]
                optimizers[number].apply_gradients(zip(given, variables[number], strict=True))
                means = [b - v.numpy() for b, v in zip(before, variables[number], strict=True)]
            else:
                means = [mean.value for mean in exchange.exchange(given, variables[number])]
            for i, mean in enumerate(means):
                absent = {0: 2, 1: 0}.get(number) == i
                wanted = sum(value(i, other) for other in range(1 if absent else size)) / size
                np.testing.assert_allclose(mean, wanted, rtol=1e-4)
            assert MPI.COMM_WORLD.allreduce(rank + 1) == size * (size + 1) // 2
    channels = [session.runner.channel for session in (optimizers[0]._grace, optimizers[1]._grace, exchange)]
    assert len({id(channel) for channel in channels}) == 3
    assert grace.init() not in channels
