"""The warm-up of learning rates, over 2 real ranks: numbers, velocities, what is refused, and stops in its middle."""

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.pools import on_ranks
from tests.support.tensorflow_training import StopBefore, compiled, digest, fit, on_mpi, sgd

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LR, WARMUP, STEPS = 0.4, 2, 4


def rates(ranks=2, epochs=3):
    """The formula."""
    batches = [(epoch + (batch + 1) / STEPS) / WARMUP for epoch in range(epochs) for batch in range(STEPS)]
    return [LR / ranks * (1 + (ranks - 1) * min(1, progress)) for progress in batches]


def callback(**options):
    return grace.tensorflow.LearningRateWarmupCallback(LR, **{"warmup_epochs": WARMUP, **options})


@pytest.mark.parametrize(
    ("kind", "engine"), [("topk", "horovodrun-gloo"), ("efsignsgd", "mpirun-mpi"), ("loss scale", "mpirun-mpi")]
)
@on_ranks(framework="tensorflow")
def test_the_rate_rises_by_the_formula_batch_by_batch_and_stays(kind, engine):
    """The optimizer and a memory see it in each batch, and it is logged and printed."""
    optimizer = keras.optimizers.SGD(0.01, momentum=0.0 if kind == "efsignsgd" else 0.9)
    if kind == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    spec = "efsignsgd" if kind == "efsignsgd" else "topk(ratio=0.1)"
    model = compiled(grace.DistributedOptimizer(optimizer, spec), run_eagerly=kind != "topk")
    seen, remembered = [], []
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def look(batch, logs):
        seen.append(float(np.asarray(optimizer.learning_rate)))
        remembered.append(inner._grace.lr)

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        average = grace.tensorflow.MetricAverageCallback()
        history = fit(model, range(3), [callback(verbose=1), average, looking])
    np.testing.assert_allclose(seen, rates(), rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], rates()[STEPS - 1 :: STEPS], rtol=1e-6)
    assert seen[STEPS * WARMUP :] == [np.float32(LR)] * STEPS
    assert remembered == seen or kind != "efsignsgd"  # its memory divides by the rate of the last step
    lines = [line for line in printed.getvalue().split("\n") if line]
    assert lines == ([] if grace.rank() else ["Epoch 2: the learning rate has warmed up to 0.4"])
    return digest(model.variables)


@pytest.mark.parametrize("kind", ["SGD", "Nesterov"])
@pytest.mark.parametrize("corrected", [True, False])
@on_mpi
def test_velocities_follow_the_rate(corrected, kind):
    """The loss is w + constant: each step's gradient is 1."""
    kinds = {"SGD": keras.optimizers.SGD, "Nesterov": lambda *a, **b: keras.optimizers.SGD(*a, nesterov=True, **b)}
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = grace.DistributedOptimizer(kinds[kind](0.3, momentum=0.5))
    model.compile(optimizer, lambda y, predicted: predicted, run_eagerly=not corrected)
    x = np.ones((STEPS, 1), "f")
    warmup = callback(momentum_correction=corrected)
    model.fit(x, x, batch_size=1, epochs=3, verbose=0, callbacks=[warmup])
    w = v = 0.0
    before = 0.3
    for rate in rates():
        v = 0.5 * v * (rate / before if corrected else 1) - rate
        w += 0.5 * v - rate if kind == "Nesterov" else v
        before = rate
    assert float(np.ravel(model.get_weights()[0])[0]) == pytest.approx(w, rel=1e-5)


@on_mpi
def test_several_steps_at_once_and_fractions_of_epochs_end_at_the_rate_too():
    """Rates at the end of epochs, with several steps in one execution, and where only half an epoch warms up."""
    for options, warmup, ends in (
        ({"steps_per_execution": 2}, {}, [LR / 2 * (1 + 3 / 8), LR]),
        ({"run_eagerly": True}, {"warmup_epochs": 0.5}, [LR, LR]),
    ):
        model = compiled(grace.DistributedOptimizer(keras.optimizers.Adam(0.01), "qsgd"), **options)
        found = fit(model, range(2), [callback(**warmup)])["learning_rate"]
        np.testing.assert_allclose(found, ends, rtol=1e-6)


@on_mpi
def test_what_cannot_be_warmed_up_is_refused_on_all_ranks_before_an_exchange():
    rank = grace.rank()
    decay = keras.optimizers.schedules.CosineDecay(0.1, 100)
    endless = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=tf.TensorSpec([None, 16]))
    broadcast = grace.tensorflow.BroadcastCallback()
    for rate, warmup, options, words in (
        (decay, callback(), {}, "learning rate is CosineDecay, which decides it at every step"),
        (
            0.1,
            grace.tensorflow.LearningRateWarmupCallback(0.1 * (1 + rank)),
            {},
            "rank 0 has initial_lr = 0.1, rank 1 has initial_lr = 0.2",
        ),
        (
            0.1,
            callback(),
            {"rows": 64 - 16 * rank},
            "rank 0 has steps_per_epoch = 4, rank 1 has steps_per_epoch = 3",
        ),
    ):
        model = compiled(sgd("topk(ratio=0.1)", lr=rate))
        with pytest.raises((grace.ConfigError, grace.RankError), match=words):
            fit(model, range(3), [warmup, broadcast], **options)
        assert model.optimizer._grace.runner is None
    model = compiled(sgd("topk(ratio=0.1)", lr=0.1))
    with pytest.raises(grace.ConfigError, match="pass steps_per_epoch="):
        model.fit(endless, verbose=0, callbacks=[callback()])


@pytest.mark.parametrize("options", [{"initial_lr": 0}, {"warmup_epochs": -1}, {"steps_per_epoch": 0}])
def test_numbers_that_cannot_be_are_refused(options):
    with pytest.raises(grace.ConfigError, match=next(iter(options))):
        grace.tensorflow.LearningRateWarmupCallback(**{"initial_lr": 0.1, **options})


@on_mpi
def test_training_that_was_stopped_in_the_middle_of_the_warmup_goes_on_as_if_it_had_not_been(tmp_path):
    """Keras's own backup does it, and so does a model that was saved."""
    found, make = [], lambda: compiled(sgd("topk(ratio=0.1)", lr=0.1, momentum=0.9), run_eagerly=True)
    backup = lambda: keras.callbacks.BackupAndRestore(f"{tmp_path}/{grace.rank()}", delete_checkpoint=False)  # noqa: E731
    for callbacks in ([], [backup(), StopBefore(1)], [backup()]):
        model = make()
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, range(3), [callback(warmup_epochs=1.5), *callbacks], rows=32)
        found.append(digest(model.variables))
    model = make()
    fit(model, range(1), [callback(warmup_epochs=1.5)], rows=32)
    grace.tensorflow.save_model(model, f"{tmp_path}/half.keras")
    model = grace.tensorflow.load_model(f"{tmp_path}/half.keras")
    fit(model, range(1, 3), [callback(warmup_epochs=1.5)], rows=32)
    whole, interrupted, resumed = found
    assert resumed == digest(model.variables) == whole != interrupted
