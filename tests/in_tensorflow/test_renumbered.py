"""Saved models and states whose variables have other names when they come back, because Keras numbers layers anew."""

import warnings

import keras
import numpy as np

import grace
from tests.support.tensorflow_training import on_mpi


def built(kind, options, name=None):
    inner = keras.Sequential([keras.layers.Dense(6), keras.layers.Dense(6)], name=name)
    if kind == "functional":
        x = keras.layers.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(inner(x)))
    else:
        model = keras.Sequential([inner, keras.layers.Dense(1)])
        model.build((None, 4))
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.5), **options)
    model.compile(optimizer, "mse", run_eagerly=True)  # to trace a graph takes longer than all steps
    return model


def train(model):
    generator = np.random.default_rng(grace.rank())
    x, y = generator.standard_normal((8, 4)).astype("f"), generator.standard_normal((8, 1)).astype("f")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(v) for v in model.trainable_variables]).tobytes()


@on_mpi
def test_models_in_models_go_on_from_their_files_bit_for_bit(tmp_path):
    for kind, options in (
        ("functional", {"compressor": "topk(ratio=0.3)"}),
        ("sequential", {"compressor": "qsgd(levels=3)"}),
        ("functional", {"strategy": "partitioned_ps(compressor=topk)"}),
    ):
        model = built(kind, options, "inner" if kind == "functional" else None)
        train(model)
        model.save(f"{tmp_path}/{grace.rank()}.keras")
        whole = train(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert train(grace.tensorflow.load_model(f"{tmp_path}/{grace.rank()}.keras")) == whole
        (said,) = [str(w.message) for w in caught if "matched by position" in str(w.message)]
        assert "'inner/dense" in said or "'sequential" in said


@on_mpi
def test_a_second_model_of_a_program_takes_the_state_of_the_first_and_both_go_on_alike():
    first, later = (built("sequential", {"compressor": "qsgd(levels=3)"}) for _ in range(2))
    train(first)
    later.set_weights(first.get_weights())
    later.optimizer.build(later.trainable_variables)
    for mine, other in zip(later.optimizer.variables, first.optimizer.variables, strict=True):
        mine.assign(other)
    later.optimizer.load_state(first.optimizer.state())
    assert train(first) == train(later)
