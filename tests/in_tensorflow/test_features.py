"""Features of Keras training besides plain steps, over 2 real ranks of two engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.errors import ConfigError
from tests.support.pairwise import pairwise
from tests.support.tensorflow_training import (
    apply_steps,
    both_ways,
    digest,
    fit,
    on_both,
    on_horovod,
    on_mpi,
    sgd,
    state_of,
    traced,
)

# -- means, sums, accumulation, clipping ---------------------------------------------------------------


@both_ways
@on_both
def test_the_result_is_the_mean_or_the_sum(graph):
    gradient = tf.constant([1.0, 3.0]) * (1 + 2 * grace.rank())
    found = []
    for options in ({}, {"op": "sum"}, {"gradient_predivide_factor": 4.0}):
        found.append(apply_steps(sgd(**options), [tf.Variable([0.0, 0.0])], [[gradient]], graph)[0].tolist())
    for method in ("signsgd", "threshold(value=2.5)"):  # a vote is no sum, and thresholds are the gradient's
        for options in ({"op": "sum"}, {"gradient_predivide_factor": 4.0}):
            made = sgd(method, memory="none", **options)
            found.append(
                apply_steps(made, [tf.Variable([0.0] * 64)], [[tf.tile(gradient, [32])]], graph)[0][:2].tolist()
            )
    assert found[:3] == [[-2, -6], [-4, -12], [-2, -6]]
    assert found[3:] == [[-1, -1], [-1, -1], [-3, -12], [-1.5, -6]]


@both_ways
@on_both
def test_means_are_plain_before_compression_begins(graph):
    w = tf.Variable(tf.zeros([400]))
    exchange = grace.tensorflow.GradientExchange("topk(ratio=0.1)", compress_after=3)
    call = traced(lambda gradient: exchange.exchange([gradient], [w])[0].value, graph)
    nonzeros = []
    for step in range(5):
        gradient = np.random.default_rng((step, grace.rank())).standard_normal(400).astype(np.float32)
        nonzeros.append(int(np.count_nonzero(call(tf.constant(gradient)))))
    assert nonzeros[:3] == [400] * 3
    assert all(count <= 80 for count in nonzeros[3:])
    exchange.close()


@both_ways
@on_both
def test_gradients_are_accumulated_and_exchanged_once(graph):
    w = tf.Variable([0.0])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))
    values, steps = [], []
    run = traced(lambda gradient: optimizer.apply_gradients([(gradient, w)]), graph)
    for number in range(6):
        run(tf.constant([float(number)]) * (1 + 2 * grace.rank()))
        values.append(float(w[0]))
        steps.append(optimizer.traffic.steps)
    assert values == [0, 0, -2, -2, -2, -10]
    assert steps == [0, 0, 1, 1, 1, 2]


@both_ways
@on_both
def test_what_was_accumulated_counts_where_the_last_gradient_is_missing(graph):
    """Rank 0 has no gradient of v in the step that exchanges. No rank has one of u, and t is frozen by then: both are
    left alone."""
    t, u, v, w = (tf.Variable([0.0]) for _ in range(4))
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5, gradient_accumulation_steps=2)
    optimizer = grace.DistributedOptimizer(optimizer)
    u.assign([1.0])
    first = traced(lambda g: optimizer.apply_gradients([(g, t), (None, u), (g, v), (g, w)]), graph)
    last = traced(lambda g: optimizer.apply_gradients([(None, u), (g if grace.rank() else None, v), (g, w)]), graph)
    first(tf.constant([4.0 + 2 * grace.rank()]))
    last(tf.constant([10.0]))
    assert [float(x[0]) for x in (t, u, v, w)] == [0.0, 1.0, -5.0, -7.5]


@both_ways
@on_both
def test_variables_without_an_update_keep_values_that_their_constraints_refuse(graph):
    """Rank 0 alone has a gradient of the second variable, and no rank has one of the third, as of a frozen layer."""
    variables = [keras.Variable(np.float32([-5.0]), name=name) for name in "abc"]
    optimizer = sgd()
    optimizer.build(variables)
    for variable in variables:
        variable.constraint = keras.constraints.NonNeg()
    pairs = lambda g: [(g, variables[0])] + ([(g, variables[1])] if grace.rank() == 0 else [])  # noqa: E731
    traced(lambda g: optimizer.apply_gradients(pairs(g)), graph)(tf.constant([1.0]))
    assert [float(variable[0]) for variable in variables] == [0.0, 0.0, -5.0]


@both_ways
@on_both
def test_means_are_clipped_not_what_goes_into_them(graph):
    gradient = tf.constant([30.0 if grace.rank() else -10.0, 0.0])  # the mean has norm 10, and no rank's own has
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0, clipnorm=5.0))
    assert apply_steps(optimizer, [tf.Variable([0.0, 0.0])], [[gradient]], graph)[0].tolist() == [-5, 0]


@on_mpi
def test_a_memory_that_follows_the_learning_rate_sees_the_schedules():
    w = tf.Variable(tf.zeros(64))
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(rate), compressor="efsignsgd")
    seen = []
    for _ in range(4):
        optimizer.apply_gradients([(tf.ones(64), w)])
        seen.append(optimizer._grace.lr)
    assert seen == [1.0, 1.0, 0.5, 0.5]


# -- gradients that are odd ----------------------------------------------------------------------------


@both_ways
@on_both
def test_what_no_rank_has_a_gradient_for_is_left_alone(graph):
    """The first variable has a gradient on rank 0 only, the second on no rank, the third on both."""
    plain = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    distributed = grace.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    own = [tf.constant([4.0]) if grace.rank() == 0 else None, None, tf.constant([2.0])]
    mean = [tf.constant([2.0]), None, tf.constant([2.0])]
    wanted, found = (
        apply_steps(optimizer, [tf.Variable([1.0]) for _ in range(3)], [gradients] * 2, of_graph)
        for optimizer, gradients, of_graph in ((plain, mean, False), (distributed, own, graph))
    )
    assert found[1] == 1.0
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@both_ways
@on_both
def test_a_rank_without_any_gradient_takes_part(graph):
    """Rank 1, in all steps. No rank has a gradient of the second variable, whose constraint refuses its value."""
    variables = [keras.Variable(np.float32([-5.0]), name=name) for name in "ab"]
    optimizer = sgd()
    optimizer.build(variables)
    for variable in variables:
        variable.constraint = keras.constraints.NonNeg()
    own = lambda g: g if grace.rank() == 0 else None  # noqa: E731
    run = traced(lambda g: optimizer.apply_gradients([(own(g), variables[0]), (None, variables[1])]), graph)
    for _ in range(2):
        run(tf.constant([-4.0]))
    assert [float(variable[0]) for variable in variables] == [2.0, -5.0]
    assert int(optimizer.iterations) == 2


@on_mpi
def test_keras_errors_stay_keras_errors():
    with pytest.raises(ValueError, match="No gradients provided"):
        apply_steps(sgd(), [tf.Variable([1.0])], [[None]])
    optimizer = sgd()
    optimizer.build([tf.Variable([1.0])])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply_gradients([(tf.constant([1.0]), tf.Variable([1.0], name="stranger"))])


@on_mpi
def test_a_variable_with_two_gradients_is_refused():
    w = tf.Variable([0.0], name="w")
    with pytest.raises(ConfigError, match="two gradients of the variable 'w"):
        sgd().apply_gradients([(tf.constant([1.0]), w), (tf.constant([2.0]), w)])


@both_ways
@on_mpi
def test_a_gradient_of_another_shape_than_its_variable_is_refused(graph):
    """Kernels would read behind a smaller one. Variables stay, and training goes on."""
    for shape, given in [((4,), (1,)), ((4,), (5,)), ((4, 2), (2, 4)), ((2,), ())]:
        w = tf.Variable(tf.zeros(shape), name="w")
        optimizer = sgd("topk(ratio=1.0)")
        apply_steps(optimizer, [w], [[tf.ones(shape)]], graph)
        with pytest.raises(ConfigError, match=r"the gradient of 'w' has the shape \("):
            apply_steps(optimizer, [w], [[tf.ones(given)]], graph)
        (after,) = apply_steps(optimizer, [w], [[tf.ones(shape)]], graph)
        np.testing.assert_array_equal(after, np.full(shape, -2.0))


@on_mpi
def test_rows_of_another_shape_than_the_variables_are_refused():
    w = tf.Variable(tf.zeros([4, 2]), name="w")
    optimizer = sgd()
    rows, whole = tf.constant([1]), tf.constant([4, 2])
    apply_steps(optimizer, [w], [[tf.IndexedSlices(tf.ones([1, 2]), rows, whole)]])
    for wrong in (tf.IndexedSlices(tf.ones([1, 3]), rows, whole), tf.ones([2, 2])):
        with pytest.raises(ConfigError, match="the gradient of 'w' has the shape"):
            apply_steps(optimizer, [w], [[wrong]])


@on_mpi
def test_a_graph_that_knows_shapes_only_when_it_runs_refuses_a_wrong_one_then():
    w = tf.Variable(tf.zeros([4]))
    optimizer = sgd()
    step = tf.function(lambda g: optimizer.apply_gradients([(g, w)]), [tf.TensorSpec(None)], autograph=False)
    step(tf.ones([4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not compatible with expected shape"):
        step(tf.ones([1]))
    assert w.numpy().tolist() == [-1] * 4


DTYPES = ["float16", "bfloat16", "float32", "float64"]
METHODS = ["none", "fp16", "topk(ratio=1.0)", "qsgd(levels=1)"]


@pytest.mark.parametrize(("dtype", "compressor", "graph"), pairwise(DTYPES, METHODS, [False, True]))
@on_both
def test_scalars_empty_and_narrow_variables(dtype, compressor, graph):
    shapes = [(), (0, 4), (1,), (65, 3)]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in shapes]
    gradients = [tf.cast(tf.fill(shape, 1.0 + 2 * grace.rank()), dtype) for shape in shapes]
    after = apply_steps(sgd(compressor), variables, [gradients], graph)
    assert [(str(a.dtype), a.shape) for a in after] == [(dtype, shape) for shape in shapes]
    assert [np.unique(a.astype(np.float32)).tolist() for a in after] == [[-2], [], [-2], [-2]]


@both_ways
@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "powersgd", "fp16", "onebit", "dgc(ratio=0.1)"])
@on_both
def test_an_overflow_is_seen_by_all_ranks_and_leaves_no_trace(compressor, graph):
    """Rank 1's gradient overflows in the second of three steps."""
    optimizer = sgd(compressor)
    variables, finite, states = [tf.Variable(tf.zeros([40]))], [], []
    run = traced(lambda gradient: [mean.value for mean in optimizer._grace.exchange([gradient], variables, 1.0)], graph)
    for number in range(3):
        gradient = np.random.default_rng((number, grace.rank())).standard_normal(40).astype(np.float32)
        if number == 1 and grace.rank() == 1:
            gradient[3] = np.inf
        finite.append(bool(np.isfinite(run(tf.constant(gradient))[0]).all()))
        states.append(str(state_of(optimizer._grace)))
    assert finite == [True, False, True]
    assert states[0] == states[1]
    assert "nan" not in states[2]
    assert "inf" not in states[2].replace("inference", "")


@both_ways
@on_both
def test_a_variable_used_twice(graph):
    w = tf.Variable([2.0])
    optimizer = sgd()

    def step(x):
        with tf.GradientTape() as tape:
            loss = w * w * x
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    traced(step, graph)(tf.constant([1.0 + grace.rank()]))
    assert float(w[0]) == -4.0  # 2 - 2 * 2 * mean(1, 2)


# -- loss scaling --------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("side", ["inside", "outside"])
@on_both
def test_a_loss_scale_inside_or_outside_skips_a_step_on_all_ranks(side, graph):
    """Rank 1 overflows in the second step."""
    scaler = keras.optimizers.LossScaleOptimizer
    if side == "inside":
        optimizer = grace.DistributedOptimizer(scaler(keras.optimizers.SGD(1.0), initial_scale=8.0), "topk(ratio=0.5)")
    else:
        optimizer = scaler(sgd("topk(ratio=0.5)"), initial_scale=8.0)
    w, seen = tf.Variable([0.0, 0.0]), []

    def step(gradient):
        scale = optimizer.dynamic_scale if optimizer.built else 8.0
        optimizer.apply_gradients([(gradient * scale, w)])

    run = traced(step, graph)
    optimizer.build([w])
    for number in range(3):
        gradient = [4.0, 2.5]
        if number == 1 and grace.rank() == 1:
            gradient[0] = np.inf
        run(tf.constant(gradient))
        seen.append((np.array(w).tolist(), float(optimizer.dynamic_scale)))
    assert seen[0] == ([-4, 0], 8)
    assert seen[1] == ([-4, 0], 4)  # skipped, and halved
    assert seen[2] == ([-4, -5], 4)  # what the first step left out, in the units of gradients


@both_ways
@on_both
def test_a_loss_scale_skips_a_step_that_overflows_on_the_wire(graph):
    """The gradient of rank 1 in the second step is finite, and above what float16 holds."""
    plain = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(grace.DistributedOptimizer(plain, "fp16"), initial_scale=8.0)
    w, seen = tf.Variable([0.0, 0.0]), []
    run = traced(lambda gradient: optimizer.apply_gradients([(gradient * 8.0, w)]), graph)
    optimizer.build([w])
    for number in range(3):
        large = number == 1 and grace.rank() == 1
        run(tf.constant([70000.0 if large else 4.0, 2.0]))
        seen.append(np.array(w).tolist())
    assert seen == [[-4, -2], [-4, -2], [-6, -3]]


@on_horovod
def test_mixed_precision_trains():
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        model.compile(sgd("qsgd", lr=0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)  # compile() made it one
    model.optimizer.initial_scale = 2.0**20
    losses = fit(model, range(6), [grace.tensorflow.BroadcastCallback()], rows=128)["loss"]
    assert losses[-1] < losses[0]
    assert float(model.optimizer.dynamic_scale) < 2.0**20  # too large at first, and lowered on all ranks alike
    return digest(model.trainable_variables)
