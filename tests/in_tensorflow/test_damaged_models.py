"""Model files that are killed while they are written, damaged, or of different saves; and damaged states in Keras."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import grace
from grace.tensorflow.optimizer_state import BESIDE, encode
from tests.support.damaged_states import each, loads_or_changes_nothing, mutated, resealed
from tests.support.limits import HANGS

pytestmark = [pytest.mark.slow]

KILLED = """
import os, signal, sys, zipfile
sys.path[:0] = sys.argv[2:]
import grace
from tests.in_tensorflow.test_damaged_models import fit, model_of

grace.init("local")
model = model_of()
fit(model)
grace.tensorflow.save_model(model, sys.argv[1])
fit(model)
write = zipfile.ZipFile.writestr
zipfile.ZipFile.writestr = lambda *args: (write(*args), os.kill(os.getpid(), signal.SIGKILL))
grace.tensorflow.save_model(model, sys.argv[1])
"""


def model_of(spec="topk(ratio=0.2)", width=5):
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(width, name="a"), keras.layers.Dense(2, name="b")]
    )
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), spec), "mse", run_eagerly=True)
    return model


def fit(model, rank=0):
    generator = np.random.default_rng(rank)
    x, y = (generator.standard_normal((8, n)).astype(np.float32) for n in (6, 2))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False)


def test_kill_9_while_a_model_is_saved_leaves_the_last_good_file(tmp_path):
    file = tmp_path / "model.keras"
    root = Path(__file__).parents[2]
    program = [sys.executable, "-c", KILLED, file, root]
    ended = subprocess.run(list(map(str, program)), timeout=HANGS, check=False)
    assert ended.returncode == -signal.SIGKILL
    grace.init("local")
    model = grace.tensorflow.load_model(file)
    assert int(model.optimizer.iterations) == 2
    grace.tensorflow.save_model(model, file)
    grace.shutdown()
    assert os.listdir(tmp_path) == ["model.keras"]


def caught(call, *args, **options):
    """Return the error that a call raises, in words."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def damaged(folder):
    """Load files that are damaged on one rank or of another save, and from folders that are missing; return the
    errors."""
    rank, said = grace.rank(), {}
    model = model_of()
    fit(model, rank)
    good, later = f"{folder}/good.keras", f"{folder}/later.keras"
    grace.tensorflow.save_model(model, good)
    fit(model, rank)
    grace.tensorflow.save_model(model, later)
    own = f"{folder}/own{rank}.keras"
    good_bytes = Path(good).read_bytes()

    def load(what, of_rank_1):
        Path(own).write_bytes(of_rank_1 if rank == 1 else good_bytes)
        said[what] = caught(grace.tensorflow.load_model, own)

    load("right", good_bytes)
    load("cut", good_bytes[: len(good_bytes) // 2])
    load("empty", b"")
    middle = good_bytes.index(b"model.weights.h5") + 200
    load("flipped", good_bytes[:middle] + bytes([good_bytes[middle] ^ 1]) + good_bytes[middle + 1 :])
    load("later", Path(later).read_bytes())
    said["gone"] = caught(grace.tensorflow.load_model, good if rank == 0 else f"{folder}/gone.keras")
    said["folder"] = caught(grace.tensorflow.save_model, model, f"{folder}/gone/model.keras")
    fresh = model_of()
    if rank == 0:
        fresh.optimizer.load_state(model.optimizer._grace.state())
    said["one"] = caught(fit, fresh, rank)
    bent, state = model_of(), model.optimizer.state()
    bent.optimizer.load_state({**state, "step": -1, "pieces": 5} if rank == 1 else state)
    said["bent"] = caught(fit, bent, rank)
    return said


def test_what_is_damaged_on_one_rank_is_refused_on_all_by_name(mpi, tmp_path):
    first, second = mpi.run(damaged, str(tmp_path))
    assert first["right"] == second["right"] == ""
    for what in ("cut", "empty", "flipped"):
        assert second[what].startswith(f"ConfigError: {tmp_path}/own1.keras is damaged or not complete: "), what
        assert first[what] == f"RankError: rank 1 did not load its checkpoint: {second[what].partition(': ')[2]}"
    assert second["gone"] == f"ConfigError: there is no file {tmp_path}/gone.keras"
    assert "rank 1 did not load its checkpoint: there is no file" in first["gone"]
    assert first["later"] == second["later"]
    assert first["later"].startswith("RankError: rank 0 loads a checkpoint of step 2, rank 1 a checkpoint of step 4")
    assert first["folder"]
    assert second["folder"].startswith(f"RankError: rank 0 could not save {tmp_path}/gone/model.keras: ")
    assert first["one"] == second["one"]
    assert first["one"].startswith("RankError: rank 0 loads a checkpoint of step 4, rank 1 no checkpoint")
    assert second["bent"].startswith("ConfigError: the checkpoint's 'grace' entry is damaged: ")
    assert first["bent"] == f"RankError: rank 1 did not load its checkpoint: {second['bent'].partition(': ')[2]}"


class Run:
    """A Keras model after two steps, its state, and loading others into it."""

    def __init__(self):
        grace.init("local")
        self.model = model_of("efsignsgd")
        fit(self.model)
        self.session = self.model.optimizer._grace
        self.entry = self.session.state()

    def state(self):
        return self.session.runner.state()

    def bits(self):
        context = self.session.context
        variables = [np.asarray(v).tobytes() for v in self.model.optimizer.variables]
        return raw(self.state()), variables, context.step, context.loss_scale, self.session.runner.run_id

    def tried(self, entry, memory="strict"):
        load = partial(self.model.optimizer.load_state, memory=memory)
        if loads_or_changes_nothing(load, entry, self.bits, self.state):
            self.model.optimizer.load_state(self.entry)


def raw(value):
    if isinstance(value, dict):
        return {key: raw(item) for key, item in value.items()}
    return np.asarray(value).tobytes()


@pytest.fixture(scope="module")
def run():
    yield Run()
    grace.shutdown()


def test_no_place_of_a_state_may_hold_what_it_must_not(run):
    every = max(1, 320 // settings.default.max_examples)
    for i, entry in enumerate(each(run.entry)):
        if i % every == 0:
            run.tried(resealed(entry))


@pytest.mark.parametrize(
    ("beside", "message"), [({}, "'state' is missing"), ([1], "it should be a dict, and is a list")]
)
def test_a_backups_part_that_is_no_state_is_read_at_once_and_refused_by_name(run, beside, message, monkeypatch):
    reads, read = [], h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *args: reads.append(args) or read(*args))
    with h5py.File("backup", "w", driver="core", backing_store=False) as file:
        file[BESIDE] = np.frombuffer(encode(beside), np.uint8)
        with pytest.raises(grace.ConfigError, match=f"is damaged: {message}"):
            run.model.optimizer.grace_state.load_beside(SimpleNamespace(h5_file=file))
    assert len(reads) == 1


@given(data=st.data())
def test_what_is_damaged_is_refused_and_changes_nothing_or_loads_what_it_says(run, data):
    entry = data.draw(mutated(run.entry))
    run.tried(resealed(entry) if data.draw(st.booleans()) else entry, data.draw(st.sampled_from(("strict", "keep"))))


@pytest.mark.parametrize("spec", ["efsignsgd", "none"])
def test_a_checkpoint_of_other_shapes_changes_nothing_of_graces(run, tmp_path, spec):
    """A tf.train.Checkpoint fills values before it looks at shapes."""
    model, other = model_of(spec), model_of(spec, 7)
    for one in (model, other, other):
        fit(one)
    path = tf.train.Checkpoint(model=other, optimizer=other.optimizer).write(str(tmp_path / "other"))
    session = model.optimizer._grace
    before = raw(session.runner.state()), session.context.step
    with pytest.raises(grace.ConfigError, match="and in this run it has the shape"):
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)
    assert (raw(session.runner.state()), session.context.step) == before
