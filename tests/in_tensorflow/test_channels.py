"""Optimizers, a tape and a user's own collectives beside each other, over engines that pair by order; process sets."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.pools import launched
from tests.support.tensorflow_training import on_mpi, traced


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


# -- process sets ---------------------------------------------------------------------------------------------------


def tapes_of_ranks_0_and_2(communicator):
    """Return what the tapes of ranks 0 and 2 give, eagerly and in a graph; the error of rank 1, which is not theirs."""
    import horovod.tensorflow as hvd

    members = hvd.add_process_set([0, 2])
    try:
        if not members.included():
            with pytest.raises(grace.ConfigError, match="this rank is not in the process set") as refused:
                grace.tensorflow.GradientExchange(process_set=members)
            return str(refused.value)
        return [_gradients(members, communicator, graph) for graph in (False, True)]
    finally:
        hvd.remove_process_set(members)  # which all ranks do together


def _gradients(members, communicator, graph):
    w = tf.Variable([0.0, 0.0, 0.0])
    options = {"memory": "residual", "communicator": communicator, "process_set": members}
    exchange = grace.tensorflow.GradientExchange("topk(ratio=0.3)", **options)

    def step(factors):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * factors) * (1.0 + grace.rank())
        return grace.tensorflow.DistributedGradientTape(tape, exchange=exchange).gradient(loss, w)

    run = traced(step, graph)
    return [np.array(run(tf.constant([4.0, 3.0, 1.0]))).tolist() for _ in range(3)]


@pytest.mark.ranks
@pytest.mark.slow
def test_tapes_exchange_among_the_ranks_of_a_process_set(monkeypatch):
    ranks = launched("horovodrun-gloo", 3, "tensorflow")
    ranks.stop()  # those that may not add process sets
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    try:
        for communicator in ("allgather", "reduce_broadcast(destination=1)"):  # rank 2 is the second of the set
            first, outsider, second = ranks.run(tapes_of_ranks_0_and_2, communicator)
            assert first == second == [[[8, 0, 0], [0, 12, 0], [16, 0, 0]]] * 2
            assert outsider.startswith("this rank is not in the process set")
    finally:
        ranks.stop()  # others are to start without the setting
