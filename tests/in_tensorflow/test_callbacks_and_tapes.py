"""Callbacks, tapes, XLA, and many steps in one call of a graph, over 2 real ranks of two engines."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import (
    LOSS,
    apply_steps,
    both_ways,
    compiled,
    digest,
    fit,
    network,
    on_both,
    on_horovod,
    on_mpi,
    samples,
    sgd,
    state_of,
    traced,
)

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@on_mpi
def test_the_callbacks_broadcast_all_weights_and_average_all_metrics():
    model = network(seed=grace.rank())
    model.add(keras.layers.BatchNormalization())
    model.build((None, 16))
    model.layers[-1].moving_mean.assign(tf.fill([10], float(grace.rank())))
    model.compile(sgd(lr=0.01), LOSS, metrics=["accuracy"])
    x, y = samples(32, grace.rank())
    started, own = {}, []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            started.setdefault("weights", [np.array(v).tolist() for v in model.variables])

        def on_epoch_end(self, epoch, logs=None):
            own.append(dict(logs))

    before = [Look(), grace.tensorflow.BroadcastCallback(), grace.tensorflow.MetricAverageCallback()]
    history = model.fit(x, y, validation_data=(x, y), epochs=2, batch_size=32, verbose=0, callbacks=before).history
    for epoch, ranks in enumerate(zip(*grace.allgather_object(own), strict=True)):
        for name in ("loss", "accuracy", "val_loss"):
            mean = (ranks[0][name] + ranks[1][name]) / 2
            assert history[name][epoch] == pytest.approx(mean, rel=1e-6)
        assert ranks[0]["loss"] != ranks[1]["loss"]
    return started["weights"], history


@on_horovod
def test_a_callback_that_one_rank_lacks_is_refused_by_its_name():
    model = compiled(sgd(lr=0.01), run_eagerly=True)
    callbacks = [grace.tensorflow.BroadcastCallback()] if grace.rank() == 0 else []
    with pytest.raises(grace.RankError, match=r"rank 0 is in BroadcastCallback\.on_train_begin\(\)"):
        fit(model, range(1), callbacks)


@on_horovod
def test_evaluations_and_checkpoints_have_what_ranks_share_that_train_alone(tmp_path):
    found = {"batch": [], "test": [], "epoch": []}
    model = network()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = grace.DistributedOptimizer(optimizer, outer="nesterov(lr=0.7, momentum=0.6)", period=3)
    model.compile(optimizer, LOSS)

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found["batch"].append(digest(model.get_weights()))

        def on_test_begin(self, logs=None):
            found["test"].append(digest(model.get_weights()))

        def on_epoch_end(self, epoch, logs=None):
            found["epoch"].append(digest(model.get_weights()))

        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                assert digest(model.get_weights()) == found["batch"][-1]  # training goes on from its own

    x, y = samples(32, grace.rank())
    path = f"{tmp_path}/rank{grace.rank()}.weights.h5"
    saver = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    callbacks = [grace.tensorflow.AnchorCallback(), Look(), saver]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="save_weights leaves out")
        model.fit(x, y, validation_data=(x, y), epochs=2, batch_size=8, verbose=0, callbacks=callbacks)
    last = digest(model.get_weights())
    model.load_weights(path)
    mine, others = grace.allgather_object(found["batch"])
    assert len(mine) == 8
    assert mine[2] == others[2]  # the first round
    assert all(mine[i] != others[i] for i in (0, 1, 3, 4))
    assert found["test"] == found["epoch"]
    assert len({*found["epoch"]}) == 2
    assert last not in found["epoch"]
    assert digest(model.get_weights()) == found["epoch"][-1]
    return found["epoch"], last


def averaging(graph=False):
    """A model of ranks that train alone, whose optimizer keeps moving averages."""
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    return compiled(grace.DistributedOptimizer(optimizer, outer="none", period=3), run_eagerly=not graph)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_mpi
def test_a_fit_with_anchors_ends_with_the_mean_of_the_ranks_averages(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        model = averaging(graph=dtype == "float32")
    finally:
        keras.config.set_dtype_policy("float32")
    averages = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            averages[:] = [average.numpy() for average in model.optimizer._model_variables_moving_average]

    fit(model, range(2), [grace.tensorflow.AnchorCallback(), Look()])
    for got, a, b in zip(model.trainable_variables, *grace.allgather_object(averages), strict=True):
        mean = (a.astype(np.float64) + b) / 2
        np.testing.assert_array_equal(got.numpy(), mean.astype(a.dtype))
        assert not np.array_equal(a, b)
    return digest(model.trainable_variables)


@pytest.mark.parametrize("first", [True, False])
@on_mpi
def test_callbacks_that_exchange_weights_are_refused_beside_anchors(first):
    callbacks = [grace.tensorflow.AnchorCallback(), keras.callbacks.SwapEMAWeights()]
    with pytest.raises(grace.ConfigError, match="was changed while the model had the variables that all ranks share"):
        fit(averaging(), range(2), callbacks if first else callbacks[::-1], validation_data=samples(16, 0))


def test_what_is_no_backend_is_refused_by_callbacks():
    model = compiled(keras.optimizers.SGD(0.1), run_eagerly=True)
    with pytest.raises(grace.ConfigError, match=r"takes a Backend, .* not 'mpi'"):
        fit(model, range(1), [grace.tensorflow.MetricAverageCallback("mpi")])


WRONG_VARIABLES = {
    "not an object SGD: give its .variables": keras.optimizers.SGD(0.1),
    "not an object list that holds an object int": [1],
    "not an object ResourceVariable": tf.Variable([1.0]),
}


@pytest.mark.parametrize("said", WRONG_VARIABLES)
def test_what_is_no_list_of_variables_is_not_broadcast(said):
    """Other ranks were said to have failed."""
    grace.init("local")
    with pytest.raises(grace.ConfigError, match=re.escape(said)):
        grace.tensorflow.broadcast_variables(WRONG_VARIABLES[said])
    grace.shutdown()


@on_mpi
def test_variables_that_one_rank_cannot_broadcast_are_refused_on_all():
    own = [tf.Variable([1.0])]
    given = keras.optimizers.SGD(0.1) if grace.rank() == 1 else own
    error, said = (grace.ConfigError, "give its") if grace.rank() == 1 else (grace.RankError, "which it refused")
    with pytest.raises(error, match=said):
        grace.tensorflow.broadcast_variables(given)
    grace.tensorflow.broadcast_variables(own)


def test_anchors_want_a_distributed_optimizer():
    model = network()
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    with pytest.raises(grace.ConfigError, match=r"AnchorCallback gives .* call their anchor\(\) and flush"):
        model.fit(*samples(8, 0), verbose=0, callbacks=[grace.tensorflow.AnchorCallback()])


@pytest.mark.parametrize("outer_first", [True, False])
@on_mpi
def test_the_traffic_of_optimizers_with_and_without_outer_rounds_is_logged_together(outer_first):
    alone = sgd("topk(ratio=0.1)", 0.1, outer="none", period=3)
    in_step = sgd("topk(ratio=0.1)", 0.1)
    default, of_kernels = (alone, in_step) if outer_first else (in_step, alone)
    optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, {".*kernel": of_kernels}))
    logs = fit(compiled(optimizer), range(1), [grace.tensorflow.TrafficCallback()])
    assert logs["grace_bytes_sent"][0] == alone.traffic.sent_bytes + in_step.traffic.sent_bytes > 0
    assert logs["grace_drift_norm"][0] == alone.metrics()["drift_norm"] > 0


@on_mpi
def test_means_over_uneven_ranks_are_those_over_all_examples():
    """Losses and accuracies over ranks with 8 and 24 examples, then 20 and 4, and over all of them in one process."""
    model = compiled(sgd(lr=0.0), metrics=["accuracy"], run_eagerly=True)
    data = [samples(32, rank) for rank in range(2)]
    (trained, tested), mine = ((8, 24), (20, 4)), grace.rank()

    def cut(counts, rank):
        return tuple(each[: counts[rank]] for each in data[rank])

    def of_all(counts):
        return model.evaluate(
            *(np.concatenate(both) for both in zip(cut(counts, 0), cut(counts, 1), strict=True)),
            verbose=0, return_dict=True,
        )  # fmt: skip

    evaluated = {}
    look = keras.callbacks.LambdaCallback(on_test_end=evaluated.update)
    average = [grace.tensorflow.MetricAverageCallback(), look]
    every = {"batch_size": trained[mine] // 4, "epochs": 2, "validation_freq": 2, "verbose": 0, "callbacks": average}
    history = model.fit(*cut(trained, mine), validation_data=cut(tested, mine), **every).history
    model.evaluate(*cut(tested, mine), verbose=0, callbacks=average)
    trained, tested = of_all(trained), of_all(tested)
    for name in ("loss", "accuracy"):
        assert history[name] == pytest.approx([trained[name]] * 2, rel=1e-5)
        assert history[f"val_{name}"] == pytest.approx([tested[name]], rel=1e-5)
        assert evaluated[name] == pytest.approx(tested[name], rel=1e-5)


@on_mpi
def test_xla_is_refused_by_name():
    made = [(sgd(lr=0.01), [grace.tensorflow.BroadcastCallback()])]
    made += [(keras.optimizers.LossScaleOptimizer(sgd(lr=0.01)), [])]
    for optimizer, callbacks in made:
        model = compiled(optimizer, jit_compile=True)
        with pytest.raises(grace.ConfigError, match="jit_compile=False"):
            fit(model, range(1), callbacks, rows=16)
    w = tf.Variable([1.0])

    @tf.function(jit_compile=True, autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * w)
        return grace.tensorflow.DistributedGradientTape(tape).gradient(loss, w)

    with pytest.raises(grace.ConfigError, match="jit_compile=True at your own"):
        step()


@both_ways
@on_both
def test_tapes_go_on_from_one_another(graph):
    """A tape a step, with nothing made before the loop: what was left out must come in the next step."""
    w = tf.Variable([0.0, 0.0, 0.0])

    def step(factors):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * factors)
        tape = grace.tensorflow.DistributedGradientTape(tape, "topk(ratio=0.3)", memory="residual")
        return tape.gradient(loss, {"w": w})["w"]

    run = traced(step, graph)
    seen = [np.array(run(tf.constant([4.0, 3.0, 1.0]))).tolist() for _ in range(3)]
    assert seen == [[4, 0, 0], [0, 6, 0], [8, 0, 0]]


@both_ways
@on_mpi
def test_a_tape_takes_no_sources_and_one_twice_as_tensorflows_does(graph):
    w = tf.Variable([1.0])

    def step():
        with grace.tensorflow.DistributedGradientTape(tf.GradientTape(persistent=True), "topk(ratio=1.0)") as tape:
            loss = tf.reduce_sum(w * (1.0 + 2 * grace.rank()))
        return tape.gradient(loss, []), tape.gradient(loss, [w, w])

    nothing, both = traced(step, graph)()
    assert nothing == []
    assert [mean.numpy().tolist() for mean in both] == [[2.0], [2.0]]


def test_a_variable_that_gradients_overwrite_is_refused_by_a_tape(local):
    scale = keras.Variable([2.0], name="scale")
    scale.overwrite_with_gradient = True
    with grace.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(scale.value)
    with pytest.raises(grace.ConfigError, match=r"'scale' becomes what its gradient is.*grace\.DistributedOptimizer"):
        tape.gradient(loss, [scale])


TAPE, OPTIMIZER = tf.GradientTape, keras.optimizers.SGD
WRONG_TAPES = {
    "takes a tf.GradientTape, not <tf.Variable": (lambda: tf.Variable([1.0]), {}),
    "an optimizer is for grace.DistributedOptimizer": (OPTIMIZER, {}),
    "make a tape of it": (lambda: TAPE, {}),
    "by its name: DistributedGradientTape(tape, exchange=": (TAPE, {"compressor": lambda: exchange_of("topk")}),
    "exchange= takes a grace.tensorflow.GradientExchange, not 'topk'": (TAPE, {"exchange": lambda: "topk"}),
    "outer= is for grace.DistributedOptimizer": (TAPE, {"outer": lambda: "nesterov"}),
    "num_groups= is Horovod's": (TAPE, {"num_groups": lambda: 2}),
    "DistributedGradientTape() got an unexpected keyword argument 'foo'": (TAPE, {"foo": lambda: 2}),
}
"""Texts of errors, and functions that make the tape and the options."""


def exchange_of(*args, **options):
    return grace.tensorflow.GradientExchange(*args, **options)


@pytest.mark.parametrize("said", WRONG_TAPES)
def test_a_tape_refuses_other_objects_and_options_when_it_is_made(said, local):
    """A variable or an optimizer became a tape, and options were refused in the first step."""
    made, options = WRONG_TAPES[said]
    with pytest.raises((grace.ConfigError, TypeError), match=re.escape(said)):
        grace.tensorflow.DistributedGradientTape(made(), **{name: value() for name, value in options.items()})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outer": "nesterov"}, "outer= is for grace.DistributedOptimizer"),
        ({"period": 3}, "period= is for grace.DistributedOptimizer"),
        ({"num_groups": 2}, "num_groups= is Horovod's"),
        ({"compression": "fp16"}, "compression= is Horovod's"),
        ({"backend": "mpi"}, r"as grace\.init\('mpi'\) returns one, not 'mpi'"),
    ],
)
def test_an_exchange_refuses_what_only_optimizers_have(options, said, local):
    with pytest.raises(grace.ConfigError, match=said):
        exchange_of("topk", **options)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ("a", "2 none, where there was 'b'"),
        ("abc", "3 'c', where there was none"),
        ("ba", "1 'b', where there was 'a'"),
    ],
)
def test_other_variables_in_a_later_step_are_refused_by_name(later, said, local):
    exchange, variables = exchange_of("topk"), {name: tf.Variable([1.0], name=name) for name in "abc"}

    def step(names):
        with grace.tensorflow.DistributedGradientTape(tf.GradientTape(), exchange=exchange) as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in variables.values()])
        return tape.gradient(loss, [variables[name] for name in names])

    step("ab")
    with pytest.raises(grace.ConfigError, match=f"as number {said}.*others need a GradientExchange of their own"):
        step(later)
    assert [mean.numpy().tolist() for mean in step("ab")] == [[1.0], [1.0]]


def test_a_jacobian_is_refused(local):
    """TensorFlow would run its exchanges side by side, which ends Horovod."""
    w = tf.Variable([1.0, 2.0])
    with grace.tensorflow.DistributedGradientTape(tf.GradientTape()) as tape:
        y = w * w
    for jacobian in (tape.jacobian, tape.batch_jacobian):
        with pytest.raises(grace.ConfigError, match="take it of a tape of its own"):
            jacobian(y, w)


@both_ways
@on_both
def test_a_gradient_of_exchanged_gradients_is_refused_and_one_through_plain_ones_is_exchanged(graph):
    """MAML and gradient penalties nest tapes so: the outer one found no gradient, or TensorFlow's graph none that is a
    tensor."""
    w, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))
    wrap = grace.tensorflow.DistributedGradientTape

    def step(inside, outside):
        with outside(tf.GradientTape()) as outer:
            with inside(tf.GradientTape()) as inner:
                loss = tf.reduce_sum(w**3 * (1.0 + grace.rank())) + tf.reduce_sum(tf.gather(table, [0, 0, 2]) ** 2)
            first, rows = inner.gradient(loss, [w, table])
            penalty = tf.reduce_sum(first)
        return outer.gradient(penalty, [w])[0], rows.values

    def plain(tape):
        return tape

    with pytest.raises(grace.ConfigError, match="make the outer one distributed"):
        traced(lambda: step(wrap, plain), graph)()
    second, rows = traced(lambda: step(plain, wrap), graph)()
    assert (second.numpy().tolist(), rows.shape) == ([9.0, 18.0], (3, 2))


@on_horovod
def test_many_steps_in_one_call_of_a_graph():
    found = []
    for at_once in (1, 4):
        model = compiled(sgd("topk(ratio=0.1)", lr=0.05), steps_per_execution=at_once)
        fit(model, range(2), rows=128)
        found.append((digest(model.trainable_variables), model.optimizer.traffic.steps))
    assert found[0] == found[1]
    assert found[0][1] == 16


@on_both
def test_steps_in_a_loop_of_a_graph_stay_in_order():
    """Steps whose gradients depend on nothing must not overtake each other."""
    optimizer, w = sgd("topk(ratio=0.5)"), tf.Variable([0.0, 0.0])
    optimizer.build([w])

    @tf.function
    def loop():
        for _ in tf.range(20):
            optimizer.apply_gradients([(tf.constant([4.0, 3.0]), w)])

    loop()
    sent, kept = [0.0, 0.0], [0.0, 0.0]
    for _ in range(20):
        total = [kept[0] + 4, kept[1] + 3]
        largest = int(total[1] > total[0])
        sent[largest] -= total[largest]
        kept = [0.0 if i == largest else total[i] for i in range(2)]
    assert (np.array(w).tolist(), optimizer.traffic.steps) == (sent, 20)


# -- metrics -----------------------------------------------------------------------------------------------


@both_ways
@on_both
def test_metrics_are_what_was_counted_and_kept(graph):
    """Before the first exchange, after 3 steps and after none, of an optimizer and of a tape's exchange."""
    start, gradient = np.zeros(1000, np.float32), tf.constant(np.linspace(-1, 2, 1000, dtype=np.float32))
    optimizer = sgd("topk(ratio=0.1)")
    before = optimizer.metrics()
    apply_steps(optimizer, [tf.Variable(start)], [[gradient * (1.0 + grace.rank())]] * 3, graph)
    exchange, w = grace.tensorflow.GradientExchange("topk(ratio=0.1)"), tf.Variable(start)

    def step():
        with grace.tensorflow.DistributedGradientTape(tf.GradientTape(), exchange=exchange) as tape:
            loss = tf.reduce_sum(w * gradient)
        return tape.gradient(loss, [w])

    run = traced(step, graph)
    for _ in range(3):
        run()
    norms = []
    for each in (optimizer._grace, exchange):
        (residual,) = state_of(each)["memory"].values()
        numbers = each.metrics()
        norms.append(numbers["residual_norm"])
        assert numbers["bytes_sent"] == each.traffic.sent_bytes > 0
        assert numbers["bytes_dense"] == 3 * 4000
        assert numbers["residual_norm"] == pytest.approx(float(np.linalg.norm(residual)), rel=1e-6)
        assert numbers["seconds_encode"] > 0
        assert np.isnan(numbers["seconds_wait"]) == (grace.init().name == "horovod")
    after = optimizer.metrics()
    assert list(after) == list(before)
    for numbers in (before, after):
        assert numbers["bytes_sent"] == numbers["bytes_dense"] == 0
        assert np.isnan(numbers["ratio"])
    assert before["residual_norm"] == 0
    assert after["residual_norm"] == norms[0] > 0
