"""What Keras training brings besides plain steps, over 2 real ranks of two engines."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.pairwise import pairwise
from tests.support.tensorflow_training import apply_steps, both_ways, digest, fit, sgd, state_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


# -- means, sums, accumulation, clipping ---------------------------------------------------------------


def means_and_sums(graph):
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
    return found


@both_ways
def test_the_result_is_the_mean_or_the_sum(two, graph):
    for found in two.run(means_and_sums, graph):
        assert found[:3] == [[-2, -6], [-4, -12], [-2, -6]]
        assert found[3:] == [[-1, -1], [-1, -1], [-3, -12], [-1.5, -6]]


def accumulate(graph):
    w = tf.Variable([0.0])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))
    values, steps = [], []

    def step(gradient):
        optimizer.apply_gradients([(gradient, w)])

    run = tf.function(step, autograph=False) if graph else step
    for number in range(6):
        run(tf.constant([float(number)]) * (1 + 2 * grace.rank()))
        values.append(float(w[0]))
        steps.append(optimizer.traffic.steps)
    return values, steps


@both_ways
def test_gradients_are_accumulated_and_exchanged_once(two, graph):
    for values, steps in two.run(accumulate, graph):
        assert values == [0, 0, -2, -2, -2, -10]
        assert steps == [0, 0, 1, 1, 1, 2]


def clip(graph):
    gradient = tf.constant([30.0 if grace.rank() else -10.0, 0.0])  # the mean has norm 10, and no rank's own has
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0, clipnorm=5.0))
    return apply_steps(optimizer, [tf.Variable([0.0, 0.0])], [[gradient]], graph)[0].tolist()


@both_ways
def test_means_are_clipped_not_what_goes_into_them(two, graph):
    assert two.run(clip, graph) == [[-5, 0], [-5, 0]]


def schedule():
    w = tf.Variable(tf.zeros(64))
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(rate), compressor="efsignsgd")
    seen = []
    for _ in range(4):
        optimizer.apply_gradients([(tf.ones(64), w)])
        seen.append(optimizer._grace.lr)
    return seen


def test_a_memory_that_follows_the_learning_rate_sees_the_schedules(mpi):
    for seen in mpi.run(schedule):
        assert seen == [1.0, 1.0, 0.5, 0.5]


# -- gradients that are odd ----------------------------------------------------------------------------


def with_none(graph):
    """The first variable has a gradient on rank 0 only, the second on no rank, the third on both."""
    variables = [tf.Variable([1.0]), tf.Variable([1.0]), tf.Variable([1.0])]
    optimizer = grace.DistributedOptimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    gradients = [tf.constant([4.0]) if grace.rank() == 0 else None, None, tf.constant([2.0])]
    return [float(v[0]) for v in apply_steps(optimizer, variables, [gradients] * 2, graph)]


def plain():
    variables = [tf.Variable([1.0]), tf.Variable([1.0]), tf.Variable([1.0])]
    gradients = [tf.constant([2.0]), None, tf.constant([2.0])]
    return [float(v[0]) for v in apply_steps(keras.optimizers.AdamW(0.1, weight_decay=0.5), variables, [gradients] * 2)]


@both_ways
def test_what_no_rank_has_a_gradient_for_is_left_alone(two, graph):
    expected = two.run(plain)[0]
    for found in two.run(with_none, graph):
        assert found[1] == 1.0
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def no_gradient_at_all():
    with pytest.raises(ValueError, match="No gradients provided"):
        apply_steps(sgd(), [tf.Variable([1.0])], [[None]])
    optimizer = sgd()
    optimizer.build([tf.Variable([1.0])])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply_gradients([(tf.constant([1.0]), tf.Variable([1.0], name="stranger"))])


def test_keras_errors_stay_keras_errors(mpi):
    mpi.run(no_gradient_at_all)


def odd_shapes(dtype, compressor, graph):
    shapes = [(), (0, 4), (1,), (65, 3)]
    variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in shapes]
    gradients = [tf.cast(tf.fill(shape, 1.0 + 2 * grace.rank()), dtype) for shape in shapes]
    after = apply_steps(sgd(compressor), variables, [gradients], graph)
    return [(str(a.dtype), a.shape, np.unique(a.astype(np.float32)).tolist()) for a in after]


DTYPES = ["float16", "bfloat16", "float32", "float64"]
METHODS = ["none", "fp16", "topk(ratio=1.0)", "qsgd(levels=1)"]


@pytest.mark.parametrize(("dtype", "compressor", "graph"), pairwise(DTYPES, METHODS, [False, True]))
def test_scalars_empty_and_narrow_variables(two, dtype, compressor, graph):
    for found in two.run(odd_shapes, dtype, compressor, graph):
        assert [shape for _, shape, _ in found] == [(), (0, 4), (1,), (65, 3)]
        assert [name for name, _, _ in found] == [dtype] * 4
        assert [values for _, _, values in found] == [[-2], [], [-2], [-2]]


def overflow(compressor, graph):
    """Rank 1's gradient overflows in the second of three steps."""
    optimizer = sgd(compressor)
    variables, means, states = [tf.Variable(tf.zeros([40]))], [], []

    def step(gradient):
        return [mean.value for mean in optimizer._grace([gradient], variables, 1.0)]

    run = tf.function(step, autograph=False) if graph else step
    for number in range(3):
        gradient = np.random.default_rng((number, grace.rank())).standard_normal(40).astype(np.float32)
        if number == 1 and grace.rank() == 1:
            gradient[3] = np.inf
        means.append(np.array(run(tf.constant(gradient))[0]))
        states.append(str(state_of(optimizer._grace)))
    return [bool(np.isfinite(mean).all()) for mean in means], states


@both_ways
@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "powersgd", "fp16", "onebit", "dgc(ratio=0.1)"])
def test_an_overflow_is_seen_by_all_ranks_and_leaves_no_trace(two, compressor, graph):
    for finite, states in two.run(overflow, compressor, graph):
        assert finite == [True, False, True]
        assert states[0] == states[1]
        assert "nan" not in states[2]
        assert "inf" not in states[2].replace("inference", "")


def used_twice(graph):
    w = tf.Variable([2.0])
    optimizer = sgd()

    def step(x):
        with tf.GradientTape() as tape:
            loss = w * w * x
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    (tf.function(step, autograph=False) if graph else step)(tf.constant([1.0 + grace.rank()]))
    return float(w[0])


@both_ways
def test_a_variable_used_twice(two, graph):
    assert two.run(used_twice, graph) == [-4.0, -4.0]  # 2 - 2 * 2 * mean(1, 2)


# -- loss scaling --------------------------------------------------------------------------------------


def scaled(side, graph):
    """Rank 1 overflows in the second step. The weights and the loss scale after each step."""
    scaler = keras.optimizers.LossScaleOptimizer
    if side == "inside":
        optimizer = grace.DistributedOptimizer(scaler(keras.optimizers.SGD(1.0), initial_scale=8.0), "topk(ratio=0.5)")
    else:
        optimizer = scaler(sgd("topk(ratio=0.5)"), initial_scale=8.0)
    w, seen = tf.Variable([0.0, 0.0]), []

    def step(gradient):
        scale = optimizer.dynamic_scale if optimizer.built else 8.0
        optimizer.apply_gradients([(gradient * scale, w)])

    run = tf.function(step, autograph=False) if graph else step
    optimizer.build([w])
    for number in range(3):
        gradient = [4.0, 2.5]
        if number == 1 and grace.rank() == 1:
            gradient[0] = np.inf
        run(tf.constant(gradient))
        seen.append((np.array(w).tolist(), float(optimizer.dynamic_scale)))
    return seen


@both_ways
@pytest.mark.parametrize("side", ["inside", "outside"])
def test_a_loss_scale_inside_or_outside_skips_a_step_on_all_ranks(two, side, graph):
    for seen in two.run(scaled, side, graph):
        assert seen[0] == ([-4, 0], 8)
        assert seen[1] == ([-4, 0], 4)  # skipped, and halved
        assert seen[2] == ([-4, -5], 4)  # what the first step left out, in the units of gradients


def mixed_precision():
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        model.compile(sgd("qsgd", lr=0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)  # compile() made it one
    model.optimizer.initial_scale = 2.0**20
    history = fit(model, range(6), [grace.tensorflow.BroadcastCallback()], rows=128)
    return digest(model.trainable_variables), history["loss"], float(model.optimizer.dynamic_scale)


def test_mixed_precision_trains(horovod):
    (first, losses, scale), (second, _, _) = horovod.run(mixed_precision)
    assert first == second
    assert losses[-1] < losses[0]
    assert scale < 2.0**20  # too large at first, and lowered on all ranks alike
