"""Strategies executed in TensorFlow, over Horovod's operations in graphs and over MPI."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.cli.inputs import model_variables
from grace.session.settings import Settings
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.strategy.choices import Choices
from grace.tensorflow.step_session import StepSession
from tests.support.drawing import THOROUGH
from tests.support.own_parts import InPieces, registered
from tests.support.pools import on_ranks
from tests.support.strategies import BUILDERS, spec_for
from tests.support.tensorflow_training import both_ways, digest, on_both, on_horovod, on_mpi, traced

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LR = 0.1
STEPS = 2
LATE = 5
"""Steps where means come two steps later."""


def mixed():
    """An embedding, a kernel with a prime number of rows, and a small layer."""
    generator = np.random.default_rng(0)
    layers = [keras.layers.Embedding(10, 6, name="words"), keras.layers.GlobalAveragePooling1D(name="pooled")]
    layers += [keras.layers.Dense(13, "tanh", name="prime"), keras.layers.Dense(4, name="head")]
    model = keras.Sequential([keras.layers.Input((2,), dtype="int32"), *layers])
    for variable in model.trainable_variables:
        variable.assign(0.5 * generator.standard_normal(variable.shape))
    return model


def data(step, rank):
    """A rank's words of a step: some come twice, and ranks have different ones."""
    generator = np.random.default_rng((step, rank))
    return generator.integers(0, 10, (3, 2)).astype(np.int32), generator.integers(0, 4, 3)


def gradients(model, words, labels):
    with tf.GradientTape() as tape:
        loss = keras.losses.sparse_categorical_crossentropy(labels, model(words), from_logits=True)
        loss = tf.reduce_mean(loss)
    return tape.gradient(loss, model.trainable_variables)


def trained(model, optimizer, steps, graph):
    def step(words, labels):
        optimizer.apply_gradients(zip(gradients(model, words, labels), model.trainable_variables, strict=True))

    run = tf.function(step) if graph else step
    history = []
    for number in steps:
        run(*map(tf.constant, data(number, grace.rank())))
        history.append([variable.numpy().copy() for variable in model.trainable_variables])
    return history


def on_the_mean(size, steps, staleness=0):
    """Plain SGD in one process on the mean of all ranks' gradients, each applied so many steps later."""
    model, means, history = mixed(), [], []
    for number in range(steps):
        everyone = [gradients(model, *data(number, rank)) for rank in range(size)]
        dense = [[tf.convert_to_tensor(g).numpy() for g in gradients] for gradients in everyone]
        means.append([sum(parts) / size for parts in zip(*dense, strict=True)])
        if number >= staleness:
            for variable, mean in zip(model.trainable_variables, means[number - staleness], strict=True):
                variable.assign_sub(LR * mean)
        history.append([variable.numpy().copy() for variable in model.trainable_variables])
    return history


def distributed(strategy=None, **options):
    uneven = grace.size() == 3 and grace.rank() == 2
    os.environ["GRACE_NODE"] = "b" if uneven else "a"
    return grace.DistributedOptimizer(keras.optimizers.SGD(LR), strategy=strategy, **options)


def check_close(got, wanted, said=""):
    for value, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=said)


@pytest.mark.parametrize(
    ("engine", "size", "graph", "builders"),
    [
        ("horovodrun-gloo", 2, True, BUILDERS[3::5]),
        *([("mpirun-mpi", 2, True, BUILDERS[4::5])] if THOROUGH else []),
        ("mpirun-mpi", 2, False, BUILDERS),
        ("mpirun-mpi", 3, False, ("ps_load_balancing(sorted=true)", "all_reduce(hierarchical=true, chunk_size=2)")),
    ],
)
@on_ranks(framework="tensorflow")
def test_whatever_the_builder_uncompressed_training_is_plain_training(engine, size, graph, builders):
    wanted, ends = on_the_mean(size, STEPS)[-1], {}
    for builder in builders:
        model = mixed()
        got = trained(model, distributed(spec_for(builder, size)), range(STEPS), graph)[-1]
        check_close(got, wanted, builder)
        ends[builder] = digest(got)
    return ends


COMPRESSED = ("topk(ratio=0.3)", "qsgd", "threshold(value=0.01)", "signsgd", "fp16")


@pytest.mark.parametrize(
    ("engine", "graph", "methods"),
    [
        ("horovodrun-gloo", True, COMPRESSED[2:3]),
        *([("mpirun-mpi", True, COMPRESSED[:1])] if THOROUGH else []),
        ("mpirun-mpi", False, COMPRESSED),
    ],
)
@on_ranks(framework="tensorflow")
def test_compressed_both_ways_all_ranks_have_the_same_bits(engine, graph, methods):
    ends = {}
    for method in methods:
        for builder in ("partitioned_ps(min_shard_bytes=0, compressor={!r})", "parallax(compressor={!r})"):
            model, options = mixed(), {"sparse_as_dense": method == "signsgd"}  # votes on rows are refused
            optimizer = distributed(builder.format(method), **options)
            got = trained(model, optimizer, range(STEPS), graph)[-1]
            assert all(np.isfinite(value).all() for value in got)
            ends[method, builder] = digest(got)
    return ends


@both_ways
@on_both
def test_the_mean_of_a_step_is_applied_later(graph):
    model = mixed()
    optimizer = distributed(communicator="reduce_broadcast(staleness=2, destination=1)")
    history = trained(model, optimizer, range(LATE), graph)
    optimizer.state()  # waits for what is on its way
    for got, expected in zip(history, on_the_mean(2, LATE, staleness=2), strict=True):
        check_close(got, expected)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@on_both
def test_ranks_train_on_their_own_and_meet_every_other_step(cut):
    """All variables are averaged, or the head's kernel in two parts, one of which never is."""
    model = mixed()
    part = ShardPlan(Sync("none", period=2))
    plans = [VariablePlan(v, (part,)) for v in model_variables(model)]
    if cut:
        other = ShardPlan(Sync("none", period=100))
        place = next(i for i, v in enumerate(model_variables(model)) if v.shape == (13, 4))
        plans[place] = VariablePlan(plans[place].variable, (part, other), 0, (6, 7))
    strategy = Strategy(tuple(plans), grace.size(), 1)
    optimizer = distributed(strategy)
    model.compile(optimizer, "mse")
    one, other = grace.allgather_object([stepped(model, step) for step in range(4)])
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for a, b in zip(mine, theirs, strict=True):
            a, b, apart = (a[:6], b[:6], (a[6:], b[6:])) if cut and a.shape == (13, 4) else (a, b, None)
            assert np.array_equal(a, b) == (step % 2 == 1), step
            assert apart is None or not np.array_equal(*apart)


def stepped(model, step):
    """The weights after Keras's own step on a batch."""
    model.train_on_batch(data(step, grace.rank())[0], np.ones((3, 4), np.float32))
    return [v.numpy().copy() for v in model.trainable_variables]


@on_both
def test_outer_rounds_of_keras_steps():
    """Rounds after every other step; the weights after each, those of the anchor, of the rank again, and the last."""
    model = mixed()
    optimizer = keras.optimizers.SGD(LR)
    optimizer = grace.DistributedOptimizer(optimizer, compressor="qsgd", outer="nesterov(lr=0.5)", period=2)
    model.compile(optimizer, "mse")
    found = [digest(stepped(model, step)) for step in range(5)]
    with optimizer.anchor():
        found.append(digest(model.trainable_variables))
    found.append(digest(model.trainable_variables))
    optimizer.flush()
    found.append(digest(model.trainable_variables))
    equal = [mine == theirs for mine, theirs in zip(*grace.allgather_object(found), strict=True)]
    assert equal == [False, True, False, True, False, True, False, True]
    assert found[3] == found[5]  # the anchor is that of the last round


@on_both
def test_rounds_come_after_the_step_that_ends_an_accumulation():
    """Every second micro-step ends a step, and every second step a round; often, since operations of a graph that are
    not ordered run in order most of the time."""
    w = tf.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = grace.DistributedOptimizer(optimizer, outer="none", period=2)
    step = tf.function(lambda g: optimizer.apply_gradients([(g, w)]), autograph=False)
    values = []
    for _ in range(96):
        step(tf.constant([1.0 + 2 * grace.rank()]))
        values.append(float(w[0]))
    assert values[3::4] == list(range(-4, -100, -4))


@both_ways
@on_mpi
def test_ranks_of_a_node_average_gradients_between_outer_rounds(graph):
    """All ranks are on one node, so they have equal weights after each step."""
    model = mixed()  # rows of an embedding are refused over nodes
    history = trained(
        model, distributed("diloco(period=2, optimizer=none, over=nodes)", sparse_as_dense=True), range(3), graph
    )
    for got, expected in zip(history, on_the_mean(2, 3), strict=True):
        check_close(got, expected)
    return [digest(values) for values in history]


@on_both
def test_moving_averages_of_ranks_that_train_alone_end_as_their_mean():
    """With a lossy compressor too, whose last round must not touch them; and again after more steps."""
    model = mixed()
    optimizer = keras.optimizers.SGD(LR, use_ema=True, ema_momentum=0.5)
    optimizer = grace.DistributedOptimizer(optimizer, compressor="topk(ratio=0.1)", outer="nesterov", period=2)
    model.compile(optimizer, "mse", run_eagerly=True)  # to trace a graph takes longer than all steps
    for _ in range(2):
        for step in range(3):
            stepped(model, step)
        mine = [average.numpy() for average in optimizer._model_variables_moving_average]
        one, other = grace.allgather_object(mine)
        assert digest(one) != digest(other)
        optimizer.finalize_variable_values(model.trainable_variables)
        optimizer.flush()
        for got, a, b in zip(model.trainable_variables, one, other, strict=True):
            np.testing.assert_allclose(got, (a + b) / 2, rtol=1e-6)
    return digest(model.trainable_variables), digest(optimizer._model_variables_moving_average)


@both_ways
@on_mpi
def test_a_step_under_the_anchor_is_refused_and_a_last_round_leaves_it(graph):
    w = tf.Variable([0.0])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0), outer="none", period=10)
    run = traced(lambda g: optimizer.apply_gradients([(g, w)]), graph)
    run(tf.constant([1.0 + 2 * grace.rank()]))
    with (
        optimizer.anchor(),
        pytest.raises((grace.ExchangeError, tf.errors.OpError), match=r"a step under .* would be undone"),
    ):
        run(tf.constant([1.0]))
    assert w.numpy() == [-1.0 - 2 * grace.rank()]
    with optimizer.anchor():
        assert w.numpy() == [0.0]
        optimizer.flush()
        assert w.numpy() == [-2.0]
    assert w.numpy() == [-2.0]


@both_ways
@on_both
def test_a_rank_that_was_not_finite_once_trains_on_from_the_anchor(graph):
    """With the moments and the average of its weights; the round is dropped on all ranks."""
    w = tf.Variable([1.0, 2.0])
    optimizer = keras.optimizers.Adam(LR, use_ema=True)
    optimizer = grace.DistributedOptimizer(optimizer, outer="none", period=2)
    run = traced(lambda g: optimizer.apply_gradients([(g, w)]), graph)
    seen = []
    for step in range(8):
        spoilt = step == 3 and grace.rank() == 1
        run(tf.constant([float("nan") if spoilt else 1.0, 1.0]))
        seen.append(w.numpy())
    assert np.isfinite([seen[3], seen[-1], *(slot for slot in optimizer.variables if slot.shape == (2,))]).all()
    assert not np.array_equal(seen[-1], seen[3])
    return seen[-1].tolist()


@on_mpi
def test_in_step_again_all_ranks_have_the_same_weights_and_momenta():
    """After iterations alone, and after a step of another strategy."""
    model = mixed()
    optimizer = grace.DistributedOptimizer(keras.optimizers.Adam(LR), outer="nesterov", period=4)
    model.compile(optimizer, "mse", run_eagerly=True)
    for step in range(2):
        stepped(model, step)
    optimizer.use_strategy("uniform")
    return digest(model.trainable_variables), digest(stepped(model, 3)), digest(optimizer.variables)


@pytest.mark.parametrize("eagerly", [False, True])
@on_mpi
def test_a_model_that_was_saved_in_the_middle_of_a_period_goes_on(tmp_path, eagerly):
    """The parameters after eleven steps, and after as many with a model that was saved, and loaded, in between: in a
    file of each rank, with the anchors, or in one of all, which has the accumulated gradients and moments of each."""

    def trained(saved):
        model = mixed()
        optimizer = keras.optimizers.Nadam(LR, gradient_accumulation_steps=2)  # has a scalar of its own
        optimizer = grace.DistributedOptimizer(optimizer, compressor="topk(ratio=0.3)", outer="nesterov", period=2)
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        for step in range(7):
            stepped(model, step)
        if saved == "by each rank":
            path = f"{tmp_path}/outer-{grace.rank()}.keras"
            with model.optimizer.anchor():
                model.save(path)
        elif saved == "in one file":
            path = f"{tmp_path}/outer.keras"
            grace.tensorflow.save_model(model, path)
        for _ in range(2 if saved == "in one file" else bool(saved)):  # what was loaded, and saved again, too
            model.optimizer.close()
            model = grace.tensorflow.load_model(path)
            if saved == "in one file":
                grace.tensorflow.save_model(model, path)
        ends = [stepped(model, step) for step in range(7, 11)][-1]
        model.optimizer.close()
        return ends

    uninterrupted = trained("")
    for saved in ("by each rank", "in one file"):
        for a, b in zip(uninterrupted, trained(saved), strict=True):
            np.testing.assert_array_equal(a, b)


def fitted(strategy, folder):
    """Two epochs of fit under a strategy; saved."""
    model = mixed()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distributed(strategy), loss, run_eagerly=True)
    words, labels = (np.concatenate(parts) for parts in zip(*(data(i, grace.rank()) for i in range(4)), strict=True))
    model.fit(words, labels, batch_size=3, epochs=2, shuffle=False, verbose=0)
    grace.tensorflow.save_model(model, f"{folder}/model.keras")
    kept = model.optimizer.state()["state"]
    memory, answers = ({k: np.array(v) for k, v in kept.get(kind, {}).items()} for kind in ("memory", "answer_memory"))
    return [v.numpy() for v in model.trainable_variables], memory, answers


def loaded(folder, strategy):
    """Load the file under another strategy, and return its memories."""
    os.environ["GRACE_NODE"] = "a"
    model = grace.tensorflow.load_model(f"{folder}/model.keras", strategy=strategy)
    model.optimizer.apply_gradients(  # the state is cut when the variables are known, before anything is exchanged
        [(tf.zeros_like(v) if v.shape.rank == 1 else None, v) for v in model.trainable_variables]
    )
    memory = model.optimizer.state()["state"]["memory"]
    return {k: np.array(v) for k, v in memory.items()}


def test_a_file_loads_in_plain_keras_and_under_another_strategy_with_memories_cut_anew(mpi, tmp_path):
    method = "compressor='topk(ratio=0.3)'"
    answers = mpi.run(fitted, f"partitioned_ps(min_shard_bytes=0, {method})", str(tmp_path))
    plain = keras.saving.load_model(Path(tmp_path, "model.keras"))
    assert type(plain.optimizer) is keras.optimizers.SGD
    for variable, value in zip(plain.trainable_variables, answers[0][0], strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    again = mpi.run(loaded, str(tmp_path), f"all_reduce({method})")
    left_out = {name: value for _, _, own in answers for name, value in own.items()}  # of means, on their destinations
    for (_, cut, _), whole in zip(answers, again, strict=True):
        kernels = [name for name, value in whole.items() if value.ndim == 2 and f"{name}/part_0" in cut]
        assert len(kernels) == 3  # the embedding too
        for name in kernels:
            count = sum(part.startswith(f"{name}/part_") for part in cut)
            parts = [cut[part] + left_out.get(part, 0) for part in (f"{name}/part_{i}" for i in range(count))]
            axis = next(i for i in (0, 1) if sum(part.shape[i] for part in parts) == whole[name].shape[i])
            np.testing.assert_array_equal(np.concatenate(parts, axis), whole[name])


def test_a_tape_knows_no_steps_to_average_after():
    variable = tf.Variable([1.0, 2.0], name="w")
    strategy = {"version": 1, "variables": {"w": {"shape": [2], "sync": {"type": "none", "period": 2}}}}
    session = StepSession(Choices(strategy=strategy), grace.init("local"), Settings())
    with pytest.raises(grace.ConfigError, match=r"none\(period\), come after the optimizer's step"):
        session.exchange([tf.ones(2)], [variable])
    grace.shutdown()


@on_horovod
def test_a_registered_communicator_carries_what_a_strategy_gives_it_in_a_graph():
    with registered(InPieces):
        model, InPieces.sent = mixed(), 0
        optimizer = distributed("uniform(communicator=in_pieces(most=50))")
        check_close(trained(model, optimizer, range(2), True)[-1], on_the_mean(2, 2)[-1])
        assert InPieces.sent > 10  # when it was traced


@on_horovod
def test_builders_get_the_resources_of_a_document():
    near, far = ({"address": str(bandwidth), "network_bandwidth": bandwidth} for bandwidth in (99, 1))
    resources = {"nodes": [{**far, "chief": True}, {**near, "ssh_config": "x"}], "ssh": {"x": {}}}
    optimizer = distributed("ps_load_balancing", resources=resources)
    os.environ["GRACE_NODE"] = "ab"[grace.rank()]
    trained(mixed(), optimizer, range(1), graph=False)
    assert {part.sync.destination for plan in optimizer.strategy.plans for part in plan.parts} == {1}


@pytest.mark.parametrize(
    "other", [{}, {"strategy": "ps"}, {"compressor": "fp16"}], ids=["as it was", "built", "method"]
)
def test_a_model_that_was_saved_before_it_trained_keeps_the_resources(local, tmp_path, other):
    document = {"nodes": [{"address": "localhost", "network_bandwidth": 5}]}
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(), strategy="ps", resources=document), "mse")
    model.save(tmp_path / "m.keras")
    optimizer = grace.tensorflow.load_model(tmp_path / "m.keras", **other).optimizer
    assert optimizer._grace.options().get("resources") == (None if other else document)
