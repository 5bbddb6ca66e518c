"""Training that is stopped, saved and resumed in new processes equals training that never stopped."""

import copy
import pickle
import shutil
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.session import state_schema
from grace.tensorflow.optimizer_state import decode, encode
from tests.support.pools import on_ranks
from tests.support.tensorflow_training import StopBefore, compiled, digest, on_mpi, sgd, state_of
from tests.support.tensorflow_training import fit as fit_rows
from tests.support.training import momentum_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TOPK = "topk(ratio=0.1)"
CASES = [
    *((TOPK, "one file a rank"), ("powersgd(rank=2)", "one file for all"), ("signum", "loss scale")),
    ("dgc(ratio=0.1)", "tf.train.Checkpoint"),
]
"""Methods that remember different things, each saved in another way."""


def fit(model, epochs, callbacks=()):
    """Train some epochs of two steps each."""
    return fit_rows(model, epochs, callbacks, rows=32)


def optimizer_for(spec, way):
    alone = {"outer": "nesterov", "period": 3} if way == "outer" else {}
    optimizer = sgd(spec, lr=0.02, momentum=momentum_for(spec), **alone)
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if way == "loss scale" else optimizer


def new(spec, way):
    """A model that trains eagerly: to trace a graph takes longer than all steps."""
    return compiled(optimizer_for(spec, way), run_eagerly=True)


def path_of(folder, spec, way):
    whose = 0 if way == "one file for all" else grace.rank()
    return f"{folder}/{spec}-{way}-{whose}".replace(" ", "_")


def first_half(folder):
    """Two epochs, saved; then two more in the same process, as if nobody had stopped."""
    uninterrupted = {}
    for spec, way in CASES:
        model, path = new(spec, way), path_of(folder, spec, way)
        fit(model, range(2))
        if way == "one file for all":
            grace.tensorflow.save_model(model, f"{path}.keras")
        elif way == "tf.train.Checkpoint":
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(path)
        else:
            model.save(f"{path}.keras")
        fit(model, range(2, 4))
        uninterrupted[spec, way] = digest(model.variables)
    return uninterrupted


def second_half(folder):
    """Load saved models in a new process, train them for two epochs, and return hashes."""
    keras.Sequential([keras.layers.Dense(1)])  # so that Keras numbers models otherwise
    resumed = {}
    for spec, way in CASES:
        path = path_of(folder, spec, way)
        if way == "tf.train.Checkpoint":
            model = new(spec, way)
            model.optimizer.build(model.trainable_variables)
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path).assert_consumed()
        else:
            model = grace.tensorflow.load_model(f"{path}.keras")
        fit(model, range(2, 4))
        resumed[spec, way] = digest(model.variables)
    return resumed


def test_state_in_bfloat16_is_the_same_after_saving():
    """Files of arrays know no bfloat16. Such are the parameters of a bfloat16 model that ranks train alone."""
    saved = tf.constant([1.5, -3.0], tf.bfloat16)
    state = decode(encode({"state": [saved]}))
    assert state["state"][0].dtype == tf.bfloat16.as_numpy_dtype
    np.testing.assert_array_equal(state["state"][0], np.asarray(saved))


@pytest.fixture(scope="module")
def halves(mpi, horovod, tmp_path_factory):
    """Saved by processes over MPI, and gone on with by those over Horovod."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return mpi.run(first_half, folder), horovod.run(second_half, folder), folder


@pytest.fixture(scope="module")
def folder(halves):
    """Return the folder of saved models."""
    return halves[2]


@pytest.mark.parametrize(("spec", "way"), CASES)
def test_resumed_training_equals_training_that_never_stopped(halves, spec, way):
    uninterrupted, resumed, _ = halves
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert after[spec, way] == before[spec, way]


def test_memories_matter_in_this_test(mpi, halves):
    """Without them the resumed training would not be the same."""
    assert mpi.run(forgetful, halves[2]) != [ranks[TOPK, "one file a rank"] for ranks in halves[0]]


def forgetful(folder):
    path = path_of(folder, TOPK, "one file a rank")
    model = grace.tensorflow.load_model(f"{path}.keras", memory_state="reset")
    fit(model, range(2, 4))
    return digest(model.variables)


@on_mpi
def test_plain_keras_loads_the_same_file_with_the_optimizers_momenta(folder):
    """This program makes nothing distributed."""
    model = keras.saving.load_model(f"{path_of(folder, 'powersgd(rank=2)', 'one file for all')}.keras")
    assert type(model.optimizer).__name__ == "SGD"
    assert not hasattr(model.optimizer, "_grace")
    assert int(model.optimizer.iterations) == 4
    momenta = model.optimizer.variables[2:]
    assert len(momenta) == 4
    assert all(np.array(v).any() for v in momenta)


@on_mpi
def test_what_does_not_fit_is_refused(folder):
    rank = grace.rank()
    other = path_of(folder, TOPK, "one file a rank")[:-1] + str(1 - rank)
    model = grace.tensorflow.load_model(f"{other}.keras")
    with pytest.raises((grace.ConfigError, grace.RankError), match=r"Save one file per rank|rank 0 refused to start"):
        fit(model, range(2, 3))
    with pytest.raises(grace.ConfigError, match=r"model\.h5 does not end in \.keras"):
        grace.tensorflow.save_model(model, f"{folder}/model.h5")
    path = path_of(folder, TOPK, "one file a rank")
    model = grace.tensorflow.load_model(f"{path}.keras", compressor="qsgd")
    with pytest.raises(grace.ConfigError, match=r"was saved with .*topk.* this run uses .*qsgd"):
        fit(model, range(2, 3))
    plain = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    plain.save(f"{folder}/plain{rank}.keras")
    with pytest.raises(grace.ConfigError, match="saved with a plain optimizer"):
        grace.tensorflow.load_model(f"{folder}/plain{rank}.keras")
    with pytest.raises(grace.ConfigError, match=r"the model is not compiled; save it with model\.save"):
        grace.tensorflow.save_model(keras.Sequential([keras.layers.Dense(1)]), f"{folder}/model.keras")
    with pytest.raises(grace.ConfigError, match=r"not a distributed one.* in a tf\.train\.Checkpoint on every rank"):
        grace.tensorflow.save_model(plain, f"{folder}/plain.keras")


def fit_nothing(model):
    """Prepare the exchange without a step."""
    model.optimizer._grace._prepare(model.trainable_variables, [tf.zeros(v.shape) for v in model.trainable_variables])


@on_ranks(3, engine="mpirun-mpi", framework="tensorflow")
def test_one_file_for_all_loads_on_another_number_of_ranks(folder):
    model = grace.tensorflow.load_model(f"{folder}/powersgd(rank=2)-one_file_for_all-0.keras")
    session = model.optimizer._grace
    kept = session.saved[0]["ranks"]
    fit_nothing(model)
    assert state_of(session)["memory"]
    for name, value in state_of(session)["memory"].items():
        everyone = [np.array(rank["memory"][name]) for rank in kept]
        np.testing.assert_allclose(value, sum(everyone) / 2, rtol=1e-6)


@on_mpi
def test_a_state_is_checked_whole_and_kept_where_it_fits_and_copies_are_plain():
    """States that may be loaded, kept, and refused; what may be copied; what rank 0 is told."""
    rank = grace.rank()

    def warned(call, *args, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(*args, **options)
        return " ".join(str(w.message) for w in caught if "checkpoint remembers" in str(w.message) or "alone" in str(w))

    model = new(TOPK, "")
    fit(model, range(1))
    optimizer, own = model.optimizer, state_of(model.optimizer._grace)["memory"]
    told = [warned(optimizer.state), warned(optimizer.state)]
    assert ["full_state" in words for words in told] == [rank == 0 and grace.size() > 1, False]
    everyone, step = optimizer.full_state(), optimizer._grace.context.step
    anew = type(optimizer).from_config(optimizer.get_config())
    for copied in (copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(model).optimizer, anew):
        assert type(copied) is keras.optimizers.SGD
        assert copied.get_config() == optimizer.get_config()
    keras.models.clone_model(model)

    bent = {**everyone, "ranks": [{**one, "memory": dict(one["memory"])} for one in everyone["ranks"]]}
    name = next(iter(own))
    bent["ranks"][rank]["memory"][name] = np.zeros(3, np.float32)
    bent = state_schema.seal(bent)
    fit(model, range(1, 2))
    before = state_of(optimizer._grace)["memory"]
    with pytest.raises(
        grace.ConfigError, match=f"'{name}', which should have the shape .* and has .3.*memory_state='keep'"
    ):
        optimizer.load_state(bent)
    now = state_of(optimizer._grace)["memory"]
    assert all(np.array_equal(now[key], before[key]) for key in before)
    assert optimizer._grace.context.step == 2 * step

    said = warned(optimizer.load_state, bent, memory="keep")
    now = state_of(optimizer._grace)["memory"]
    assert name in said
    assert now.keys() == own.keys() - {name}
    assert all(np.array_equal(now[key], own[key]) for key in now)
    assert optimizer._grace.context.step == step

    other = new("onebit", "")  # another method: what was left out is kept, at the first exchange
    other.optimizer.load_state(everyone, memory="keep")
    fit_nothing(other)
    now = state_of(other.optimizer._grace)["memory"]
    assert now.keys() == own.keys()
    assert all(np.array_equal(now[key], own[key]) for key in now)
    fit(other, range(1))


@on_mpi
def test_a_tapes_exchange_is_saved_by_itself(tmp_path):
    """A custom loop saves its exchange beside its model."""
    w, seen = tf.Variable([0.0, 0.0]), []

    def run(exchange):
        with grace.tensorflow.DistributedGradientTape(tf.GradientTape(), exchange=exchange) as tape:
            loss = tf.reduce_sum(w * [4.0, 3.0])
        seen.append(np.array(tape.gradient(loss, w)).tolist())

    first = grace.tensorflow.GradientExchange("topk(ratio=0.5)")
    run(first)
    tf.train.Checkpoint(exchange=first.grace_state).write(f"{tmp_path}/tape{grace.rank()}")
    second = grace.tensorflow.GradientExchange("topk(ratio=0.5)")
    tf.train.Checkpoint(exchange=second.grace_state).read(f"{tmp_path}/tape{grace.rank()}").assert_consumed()
    run(second)
    assert seen == [[4, 0], [0, 6]]


@on_mpi
def test_accumulated_gradients_of_all_ranks_outlast_a_file_and_a_broadcast(tmp_path):
    """Ranks with gradients 2 and 4 stop between the two steps of an accumulation."""
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    model.compile(optimizer, "mse", run_eagerly=True)
    batch = np.float32([[1.0]]), np.float32([[1.0 + grace.rank()]])
    model.fit(*batch, verbose=0)
    path = f"{tmp_path}/model.keras"
    grace.tensorflow.save_model(model, path)
    grace.allgather_object("written")
    loaded = grace.tensorflow.load_model(path)
    after = []
    for each in (model, loaded):
        each.fit(*batch, verbose=0, callbacks=[grace.tensorflow.BroadcastCallback()])
        after.append(each.layers[0].kernel.numpy().tolist())
    assert after == [[[3.0]], [[3.0]]]


def test_options_that_are_not_given_again_are_as_they_were(local, tmp_path):
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk(ratio=0.5)", seed=7, op="sum"), "mse")
    model.save(tmp_path / "m.keras")
    same = grace.tensorflow.load_model(tmp_path / "m.keras").optimizer._grace.options()
    assert same == model.optimizer._grace.options()
    other = grace.tensorflow.load_model(tmp_path / "m.keras", compressor="onebit").optimizer._grace.options()
    assert (other["seed"], other["op"], other["compressor"]["name"]) == (7, "sum", "onebit")


@pytest.mark.parametrize("way", ["", "loss scale", "outer"])
@on_mpi
def test_backups_hold_memories(way, tmp_path):
    """Whole, interrupted and resumed training, backed up by Keras's own callback: anchors, if ranks train alone."""
    mine, others, ends = *(f"{tmp_path}/{rank}" for rank in (grace.rank(), 1 - grace.rank())), []
    for stops, backs_up in ((False, False), (True, True), (False, True)):
        model = new(TOPK, way)
        callbacks = [grace.tensorflow.AnchorCallback()]
        if backs_up:
            callbacks.append(keras.callbacks.BackupAndRestore(mine))
        if stops:
            with pytest.raises(KeyboardInterrupt):
                fit(model, range(2), [*callbacks, StopBefore(1)])
            grace.from_root(lambda: None)
            shutil.copytree(mine, f"{mine}-")
        else:
            fit(model, range(2), callbacks)
        ends.append(digest(model.variables))
    whole, interrupted, resumed = ends
    assert resumed == whole != interrupted
    if not way:
        wrong, backup = new(TOPK, ""), keras.callbacks.BackupAndRestore(f"{others}-", delete_checkpoint=False)
        with pytest.raises(ValueError, match="Save one file per rank"):
            fit(wrong, range(2), [backup])
