"""What docs/keras.md says of data and files, over 2 real ranks, beside one process and beside a run without a stop."""

# ruff: noqa: E402 - what is imported after TensorFlow needs it

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import grace
from tests.support.pools import launched

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
ROWS, BATCH = 37, 4


def two(engine="mpirun-mpi"):
    return launched(engine, 2, "tensorflow")


def compiled(spec, momentum=0.0, **options):
    import keras

    from tests.support.tensorflow_training import LOSS, network

    model = network()
    optimizer = keras.optimizers.SGD(0.05, momentum=momentum)
    model.compile(optimizer if spec is None else grace.DistributedOptimizer(optimizer, spec), LOSS, **options)
    return model


def sharded():
    """37 rows over 2 ranks, none twice; and in one process, in batches of what both have."""
    from tests.support.tensorflow_training import samples

    x, y = samples(ROWS, 0)
    rank, size = grace.rank(), grace.size()
    steps = ROWS // (size * BATCH)
    mine = tf.data.Dataset.from_tensor_slices((x, y)).shard(size, rank)
    found = []
    for options in ({}, {"run_eagerly": True}):
        model = compiled("none", **options)
        model.fit(mine.batch(BATCH, drop_remainder=True).take(steps), epochs=2, verbose=0)
        found.append([model.optimizer.traffic.steps, *model.get_weights()])
    one = compiled(None)
    rows = steps * size * BATCH
    one.fit(x[:rows], y[:rows], batch_size=size * BATCH, epochs=2, shuffle=False, verbose=0)
    found.append([2 * steps, *one.get_weights()])

    model, seen = compiled("topk(ratio=0.1)"), set()  # every row, some of them twice
    enough = -(-ROWS // (size * BATCH))
    for rows, _ in mine.repeat().batch(BATCH).take(enough):
        seen |= {row.tobytes() for row in rows.numpy()}
    model.fit(mine.repeat().batch(BATCH), steps_per_epoch=enough, epochs=2, verbose=0)
    return found, model.optimizer.traffic.steps, seen


@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi"])
def test_shards_of_uneven_data_train_as_one_process_does_with_both(engine):
    ranks = two(engine).run(sharded)
    for (graph, eager, one), steps, _ in ranks:
        assert steps == 10
        for (made, *weights), (wanted, *expected) in ((graph, one), (eager, one)):
            assert made == wanted == 8
            for mine, its in zip(weights, expected, strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert len(ranks[0][2] | ranks[1][2]) == ROWS


def saved(folder):
    """By rank 0 alone in every epoch, by Keras's ModelCheckpoint on each, and what its weights alone leave out."""
    import keras

    from tests.support.tensorflow_training import digest, samples

    here, rank = Path(folder, str(grace.rank())), grace.rank()
    here.mkdir()
    x, y = samples(64, rank)

    def fit(model, epochs, *callbacks):
        span = {"epochs": epochs[-1] + 1, "initial_epoch": epochs[0], "batch_size": 16, "shuffle": False, "verbose": 0}
        return model.fit(x, y, callbacks=list(callbacks), **span).history

    def save(epoch, logs):
        grace.tensorflow.save_model(model, f"{folder}/epoch{epoch}.keras")

    model = compiled("topk(ratio=0.1)", momentum=0.9)
    best = keras.callbacks.ModelCheckpoint(here / "best.keras", monitor="loss", save_best_only=True)
    alone = keras.callbacks.ModelCheckpoint(here / "alone.weights.h5", save_weights_only=True)
    average = grace.tensorflow.MetricAverageCallback()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, range(2), average, best, alone, keras.callbacks.LambdaCallback(on_epoch_end=save))
    said = [str(w.message) for w in caught if "save_weights leaves out" in str(w.message)]
    at_two = digest(model.variables)
    fit(model, range(2, 4), average)
    whole, resumed = digest(model.variables), []

    for name in ("epoch1.keras", "best.keras"):
        if name == "epoch1.keras":  # which only rank 0 has read
            (here / name).write_bytes(grace.from_root(lambda name=name: Path(folder, name).read_bytes()))
        model = grace.tensorflow.load_model(here / name)
        resumed.append(digest(model.variables) == at_two)
        fit(model, range(2, 4), average)
        resumed.append(digest(model.variables) == whole)

    shutil.copy(here / "alone.weights.h5", here / "copy.weights.h5")
    plain = compiled("topk(ratio=0.1)", momentum=0.9)
    plain.load_weights(here / "copy.weights.h5")
    resumed.append(digest(plain.variables) == at_two)
    fit(plain, range(2, 4), average)
    return resumed, said, digest(plain.variables) == whole


def test_rank_0_saves_and_loads_for_all_checkpoints_of_each_rank_go_on_and_weights_alone_say_what_they_lack(tmp_path):
    for resumed, said, without in two().run(saved, str(tmp_path)):
        assert resumed == [True] * 5
        assert not without  # they lack memories, as is said, once
        assert len(said) == 1


def stopped_within_an_epoch(folder):
    """Backed up every 2 batches, as Horovod's CommitStateCallback does; all that is remembered, before and after."""
    import keras

    from tests.support.tensorflow_training import digest, samples, state_of

    x, y = samples(64, grace.rank())
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and len(seen) == 0:
                seen.append((digest(model.variables), str(state_of(model.optimizer._grace))))
            if batch == 2:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(f"{folder}/{grace.rank()}", save_freq=2)
    model = compiled("topk(ratio=0.1)", momentum=0.9)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[backup, Stop()])

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(digest(model.variables)) if len(seen) == 1 else None

        def on_train_end(self, logs=None):
            seen.append(model.optimizer._grace.context.step)

    model = compiled("topk(ratio=0.1)", momentum=0.9)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[backup, Look()])
    return seen[0][0] == seen[1], seen[2]


def test_a_backup_within_an_epoch_goes_on_from_there_with_its_memories(tmp_path):
    for same, steps in two().run(stopped_within_an_epoch, str(tmp_path)):
        assert same
        assert steps == 2 + 4  # the epoch is begun anew
