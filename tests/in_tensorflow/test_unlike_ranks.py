"""Ranks that differ: gradients on some of them only, models that one of them alone has restored."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import both_ways, digest, on_both, on_horovod, on_mpi, traced


@both_ways
@on_both
def test_a_tape_gives_the_mean_where_only_another_rank_has_a_gradient(graph):
    """The gradients of three variables: on both ranks, on rank 1 only, on none; and what becomes of the third later."""
    variables, seen = [tf.Variable([1.0], name=name) for name in "abc"], []
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

    run = traced(step, graph)
    found = [np.array(gradient).tolist() for gradient in run(1)]
    try:
        later = [np.array(gradient).tolist() for gradient in run(2)]
    except Exception as error:  # TensorFlow makes another of it
        later = str(error)
    assert seen[0] == [True, True, False]
    assert found == [[2], [2], [-1]]
    if not graph:
        assert later == [[2], [-1], [2]]
    elif grace.rank() == 0:
        assert "'c' is None in this graph" in later


@on_mpi
def test_one_rank_restores_a_model_and_the_others_take_it(tmp_path):
    """Rank 0 goes on from a file, the others make new models, and number their layers otherwise; then none is built."""
    rank = grace.rank()
    generator = np.random.default_rng(rank)
    x, y = generator.standard_normal((32, 4)).astype("f"), generator.standard_normal((32, 1)).astype("f")

    def made(width=3, build=True):
        inner = keras.Sequential([keras.layers.Dense(width), keras.layers.BatchNormalization()])
        model = keras.Sequential([inner, keras.layers.Dense(1)])
        if build:
            model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
        return model

    def train(model):
        grace.DistributedOptimizer(model.optimizer, "topk(ratio=0.5)")
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[grace.tensorflow.BroadcastCallback()])
        return digest([*model.trainable_variables, *model.optimizer.variables]), int(model.optimizer.iterations)

    if rank == 0:
        model = made()
        model.fit(x, y, batch_size=8, verbose=0)
        model.save(f"{tmp_path}/model.keras")
    found = train(keras.saving.load_model(f"{tmp_path}/model.keras") if rank == 0 else made())
    assert found[1] == 8
    with pytest.raises(grace.RankError) as caught:
        train(made(width=3 + rank))
    for words in ("rank 0 has the variable", "/kernel float32(4, 3), rank 1 has the variable"):
        assert words in str(caught.value)
    assert "/kernel float32(4, 4). Make the same model" in str(caught.value)
    with pytest.raises(grace.RankError) as caught:
        train(made(build=rank == 0))
    assert "/kernel float32(4, 3), rank 1 has nothing more" in str(caught.value)
    return found


@pytest.mark.parametrize("callback", [False, True])
@on_horovod
def test_a_model_that_its_first_batch_builds_starts_equal(callback):
    """Start values differ, and a graph runs. Without the callback variables that do not train stay apart."""
    generator = np.random.default_rng(grace.rank())
    x, y = generator.standard_normal((16, 4)).astype("f"), generator.standard_normal((16, 1)).astype("f")
    keras.utils.set_random_seed(grace.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[grace.tensorflow.BroadcastCallback()] if callback else [])
    return digest(model.variables if callback else model.trainable_variables)


OTHERS = {"op": "sum", "gradient_predivide_factor": 2.0, "group_bytes": 100, "sparse_as_dense": True, "seed": 5}


@on_mpi
def test_ranks_of_other_settings_are_told_of_the_first():
    """Rank 1 alone was given another argument, for each of them."""
    for name, value in OTHERS.items():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        options = {name: value} if grace.rank() == 1 else {}
        model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk", **options), "mse", run_eagerly=True)
        with pytest.raises(grace.RankError, match=f"{name} {value}"):
            model.train_on_batch(np.ones((2, 4), "f"), np.ones((2, 1), "f"))
