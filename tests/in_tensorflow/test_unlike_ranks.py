"""Ranks that differ: gradients on some of them only, models that one of them alone has restored."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import digest

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


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


def restored(folder):
    """Rank 0 goes on from a file, the others make new models, and number their layers otherwise; then none is built."""
    rank, said = grace.rank(), []
    generator = np.random.default_rng(rank)
    x, y = generator.standard_normal((32, 4)).astype("f"), generator.standard_normal((32, 1)).astype("f")

    def made(width=3, build=True):
        inner = keras.Sequential([keras.layers.Dense(width), keras.layers.BatchNormalization()])
        model = keras.Sequential([inner, keras.layers.Dense(1)])
        if build:
            model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    def train(model):
        grace.DistributedOptimizer(model.optimizer, "topk(ratio=0.5)")
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[grace.tensorflow.BroadcastCallback()])
        return digest([*model.trainable_variables, *model.optimizer.variables]), int(model.optimizer.iterations)

    if rank == 0:
        model = made()
        model.fit(x, y, batch_size=8, verbose=0)
        model.save(f"{folder}/model.keras")
    found = train(keras.saving.load_model(f"{folder}/model.keras") if rank == 0 else made())
    for others in ({"width": 3 + rank}, {"build": rank == 0}):
        with pytest.raises(grace.RankError) as caught:
            train(made(**others))
        said.append(str(caught.value))
    return found, said


def test_one_rank_restores_a_model_and_the_others_take_it(mpi, tmp_path):
    (found, said), (same, same_said) = mpi.run(restored, str(tmp_path))
    assert found == same
    assert found[1] == 8
    for width, build in (said, same_said):
        assert "rank 0 has the variable" in width
        assert "/kernel float32(4, 3), rank 1 has the variable" in width
        assert "/kernel float32(4, 4). Make the same model" in width
        assert "/kernel float32(4, 3), rank 1 has nothing more" in build


def built_late(callback):
    """A model that its first batch builds, in a graph, from start values that differ."""
    generator = np.random.default_rng(grace.rank())
    x, y = generator.standard_normal((16, 4)).astype("f"), generator.standard_normal((16, 1)).astype("f")
    keras.utils.set_random_seed(grace.rank())
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[grace.tensorflow.BroadcastCallback()] if callback else [])
    return digest(model.trainable_variables), digest(model.variables)


def test_a_model_that_its_first_batch_builds_starts_equal(horovod):
    (first, _), (second, _) = horovod.run(built_late, False)
    assert first == second
    first, second = horovod.run(built_late, True)
    assert first == second


OTHERS = {"op": "sum", "gradient_predivide_factor": 2.0, "group_bytes": 100, "sparse_as_dense": True, "seed": 5}


def unlike():
    """What every rank is told where rank 1 alone was given another argument, for each of them."""
    said = []
    for name, value in OTHERS.items():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        options = {name: value} if grace.rank() == 1 else {}
        model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk", **options), "mse", run_eagerly=True)
        with pytest.raises(grace.RankError) as caught:
            model.train_on_batch(np.ones((2, 4), "f"), np.ones((2, 1), "f"))
        said.append(str(caught.value))
    return said


def test_ranks_of_other_settings_are_told_of_the_first(mpi):
    for said in mpi.run(unlike):
        for (name, value), words in zip(OTHERS.items(), said, strict=True):
            assert f"{name} {value}" in words or f"the {name} {value}" in words
