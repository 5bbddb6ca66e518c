"""Recipes of docs/keras.md for data and files, over 2 real ranks, against one process and a run without a stop."""

import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import compiled, digest, fit, on_horovod, on_mpi, samples, sgd, state_of

ROWS, BATCH = 37, 4


def sparse_with_momentum(**options):
    return compiled(sgd("topk(ratio=0.1)", lr=0.05, momentum=0.9), **options)


@on_horovod
def test_shards_of_uneven_data_train_as_one_process_does_with_both():
    """37 rows over 2 ranks, none twice; and in one process, in batches of what both have."""
    x, y = samples(ROWS, 0)
    rank, size = grace.rank(), grace.size()
    steps = ROWS // (size * BATCH)
    mine = tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank)
    one = compiled(keras.optimizers.SGD(0.05), run_eagerly=True)
    rows = steps * size * BATCH
    one.fit(x[:rows], y[:rows], batch_size=size * BATCH, epochs=2, shuffle=False, verbose=0)
    for eagerly in (False, True):
        model = compiled(sgd("none", lr=0.05), run_eagerly=eagerly)
        model.fit(mine.batch(BATCH, drop_remainder=True).take(steps), epochs=2, verbose=0)
        assert model.optimizer.traffic.steps == 2 * steps == 8
        for weights, wanted in zip(model.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_allclose(weights, wanted, rtol=1e-4, atol=1e-6)

    model, seen = compiled(sgd("topk(ratio=0.1)", lr=0.05), run_eagerly=True), set()  # every row, some of them twice
    enough = -(-ROWS // (size * BATCH))
    for rows, _ in mine.repeat().batch(BATCH).take(enough):
        seen |= {row.tobytes() for row in rows.numpy()}
    model.fit(mine.repeat().batch(BATCH), steps_per_epoch=enough, epochs=2, verbose=0)
    assert model.optimizer.traffic.steps == 10
    assert len(set().union(*grace.allgather_object(seen))) == ROWS


@on_mpi
def test_rank_0_saves_for_all_checkpoints_of_each_rank_go_on_and_weights_alone_say_what_they_lack(tmp_path):
    """Rank 0 alone saves in every epoch, and Keras's ModelCheckpoint on each rank; its weights alone lack the
    memories."""
    here = tmp_path / str(grace.rank())
    here.mkdir()

    def save(epoch, logs):
        grace.tensorflow.save_model(model, tmp_path / f"epoch{epoch}.keras")

    model = sparse_with_momentum(run_eagerly=True)  # to trace a graph takes longer than all steps
    best = keras.callbacks.ModelCheckpoint(here / "best.keras", monitor="loss", save_best_only=True)
    alone = keras.callbacks.ModelCheckpoint(here / "alone.weights.h5", save_weights_only=True)
    average = grace.tensorflow.MetricAverageCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, range(2), [average, best, alone, keras.callbacks.LambdaCallback(on_epoch_end=save)], rows=32)
    said = [str(w.message) for w in caught if "save_weights leaves out" in str(w.message)]
    at_two = digest(model.variables)
    fit(model, range(2, 4), [average], rows=32)
    whole = digest(model.variables)

    for name in ("epoch1.keras", "best.keras"):
        if name == "epoch1.keras":  # which only rank 0 has read
            (here / name).write_bytes(grace.from_root(lambda name=name: (tmp_path / name).read_bytes()))
        model = grace.tensorflow.load_model(here / name)
        assert digest(model.variables) == at_two
        fit(model, range(2, 4), [average], rows=32)
        assert digest(model.variables) == whole

    shutil.copy(here / "alone.weights.h5", here / "copy.weights.h5")
    plain = sparse_with_momentum(run_eagerly=True)
    plain.load_weights(here / "copy.weights.h5")
    assert digest(plain.variables) == at_two
    fit(plain, range(2, 4), [average], rows=32)
    assert digest(plain.variables) != whole  # they lack memories, as is said, once
    assert len(said) == 1


@on_mpi
def test_a_backup_within_an_epoch_goes_on_from_there_with_its_memories(tmp_path):
    """Backed up every 2 batches, as Horovod's CommitStateCallback does; all that is remembered, before and after."""
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and len(seen) == 0:
                seen.append((digest(model.variables), str(state_of(model.optimizer._grace))))
            if batch == 2:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(f"{tmp_path}/{grace.rank()}", save_freq=2)
    model = sparse_with_momentum(run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, range(1), [backup, Stop()])

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(digest(model.variables)) if len(seen) == 1 else None

        def on_train_end(self, logs=None):
            seen.append(model.optimizer._grace.context.step)

    model = sparse_with_momentum(run_eagerly=True)
    fit(model, range(1), [backup, Look()])
    assert seen[0][0] == seen[1]
    assert seen[2] == 2 + 4  # the epoch is begun anew
