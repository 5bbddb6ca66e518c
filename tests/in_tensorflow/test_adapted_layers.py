"""Layers that each rank adapted to its own data, and traffic in Keras's logs."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import on_mpi

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@on_mpi
def test_layers_that_ranks_adapted_differently_compute_as_rank_0s_after_a_broadcast():
    rank, layers = grace.rank(), keras.layers
    rng = np.random.default_rng(rank)
    own, words = rng.standard_normal((50, 1)) + rank, tf.constant([["a"], ["b"], ["c"]][: 2 + rank][::-1] * 2)
    made = {
        "normalization": (layers.Normalization(), own, np.ones((1, 1), "float32")),
        "given": (layers.Normalization(mean=[float(rank)], variance=[1.0]), None, np.ones((1, 1), "float32")),
        "discretization": (layers.Discretization(num_bins=4), own, np.array([[0.5]])),
        "lookup": (layers.StringLookup(), words, tf.constant([["a"]])),
        "idf": (layers.StringLookup(output_mode="tf_idf", max_tokens=8, pad_to_max_tokens=True), words, [["a"]]),
        "integers": (layers.IntegerLookup(vocabulary=[7 + rank, 9]), None, np.array([[7]])),
        "text": (layers.TextVectorization(), words, tf.constant([["a b"]])),
    }
    found = {}
    for name, (layer, data, probe) in made.items():
        if data is not None:
            layer.adapt(data)
        model = keras.Sequential([layer])
        before = np.array(layer(tf.constant(probe))).tolist()
        grace.tensorflow.broadcast_variables(model)
        after = np.array(layer(tf.constant(probe))).tolist()
        assert (before == after) == (rank == 0), name
        found[name] = after
    return found


@on_mpi
def test_the_callbacks_reach_traced_functions_and_log_traffic(tmp_path):
    """A model whose layer each rank adapted, already traced, then trained with the callbacks."""
    keras.utils.set_random_seed(grace.rank())
    norm = keras.layers.Normalization()
    norm.adapt(np.random.default_rng(grace.rank()).standard_normal((50, 2)) + grace.rank())
    model = keras.Sequential([keras.Input([2]), norm, keras.layers.Dense(1)])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.01), compressor="topk(ratio=0.5)")
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = np.ones((32, 2), "float32"), np.ones((32, 1), "float32")
    model.predict(x, verbose=0)
    file = f"{tmp_path}/{grace.rank()}.csv"
    callbacks = [
        grace.tensorflow.BroadcastCallback(),
        grace.tensorflow.MetricAverageCallback(),
        grace.tensorflow.TrafficCallback(),
        keras.callbacks.CSVLogger(file),
    ]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history
    with open(file, newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert sum(history["grace_bytes_sent"]) == optimizer.traffic.sent_bytes > 0
    assert [float(row["grace_bytes_sent"]) for row in rows] == history["grace_bytes_sent"]
    dense = history["grace_bytes_dense"]
    assert history["grace_ratio"] == [a / b for a, b in zip(dense, history["grace_bytes_sent"], strict=True)]
    assert len(history["grace_residual_norm"]) == 2
    return model.predict(x, verbose=0).tolist()


def test_traffic_of_a_plain_optimizer_is_refused(local):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(grace.ConfigError, match="TrafficCallback logs the traffic of a distributed optimizer"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[grace.tensorflow.TrafficCallback()])
    with pytest.raises(grace.ConfigError, match=r"takes what has metrics\(\), .* not 'x'"):
        grace.tensorflow.TrafficCallback("x")
