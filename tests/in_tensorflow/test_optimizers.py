"""Keras's optimizers, all of them, those that hand gradients on, and variables that gradients overwrite."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from tests.support.tensorflow_training import both_ways, on_both, on_mpi

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
NAMES = sorted(
    name
    for name, each in vars(keras.optimizers).items()
    if isinstance(each, type) and issubclass(each, keras.optimizers.Optimizer)
)
HAND_ON = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}


def net(seed, layers=1):
    keras.utils.set_random_seed(seed)
    dense = [keras.layers.Dense(3, name=f"dense{i}") for i in range(layers)]
    return keras.Sequential([keras.Input([4]), *dense])


def batch(step, rank):
    drawn = np.random.default_rng((step, rank))
    return drawn.standard_normal((8, 4)).astype("float32"), drawn.standard_normal((8, 3)).astype("float32")


def gradients(model, step, ranks):
    with tf.GradientTape() as tape:
        pairs = [batch(step, rank) for rank in ranks]
        loss = sum(tf.reduce_mean(tf.square(model(x) - y)) for x, y in pairs) / len(pairs)
    return zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)


def values(variables):
    return np.concatenate([np.ravel(variable) for variable in variables])


# -- all of Keras's, from ranks that start differently ------------------------------------------------------


@on_mpi
def test_every_optimizer_is_that_of_one_process_though_ranks_start_differently():
    """Models whose start values differ become what one process makes of rank 0's."""
    found = {}

    def drawn(variables, step, ranks):  # gradients that do not depend on the model
        streams = [np.random.default_rng((step, rank)) for rank in ranks]
        means = [np.mean([stream.standard_normal(v.shape) for stream in streams], 0) for v in variables]
        return [(tf.constant(mean, "float32"), v) for mean, v in zip(means, variables, strict=True)]

    names = [name for name in NAMES if name not in HAND_ON]
    assert {"SGD", "Adam", "Nadam"} <= set(names)
    for name in names:
        made = [getattr(keras.optimizers, name)(0.05, use_ema=True) for _ in range(2)]
        mine, of_one = ([keras.Variable(np.eye(2, dtype="float32") + start)] for start in (grace.rank(), 0))
        grace.DistributedOptimizer(made[0]).build(mine)
        for step in range(2):
            made[0].apply_gradients(drawn(mine, step, [grace.rank()]))
            made[1].apply_gradients(drawn(of_one, step, range(grace.size())))
        trained = [values(mine), values(of_one)]
        for optimizer, variables in zip(made, (mine, of_one), strict=True):
            optimizer.finalize_variable_values(variables)
        averaged = [values(mine), values(of_one)]
        for ours, alone in (trained, averaged):
            np.testing.assert_allclose(ours, alone, rtol=2e-4, atol=2e-5, err_msg=name)
        found[name] = trained[0].tolist(), averaged[0].tolist()
    return found


# -- those that hand gradients on ------------------------------------------------------------------------


class HandsOn(keras.optimizers.Optimizer):
    """Hands the gradients to another optimizer, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def apply(self, grads, trainable_variables=None):
        self.inner.apply(grads, trainable_variables)


class HandsPairsOn(HandsOn):
    def apply_gradients(self, grads_and_vars):
        self.inner.apply_gradients(grads_and_vars)


class InTwoParts(keras.optimizers.SGD):
    """Biases first, as optimizers with two learning rates do."""

    def apply(self, grads, trainable_variables=None):
        pairs = list(zip(grads, trainable_variables or self._trainable_variables, strict=True))
        for ndim in (1, 2):
            part = [pair for pair in pairs if len(pair[1].shape) == ndim]
            super().apply([g for g, _ in part], [v for _, v in part])


def multi(how=lambda optimizer: optimizer):
    first, second = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)
    chosen = keras.optimizers.OptimizerMap(how(first), {".*kernel": how(second)})
    return keras.optimizers.MultiOptimizer(chosen)


@both_ways
@on_mpi
def test_an_optimizer_that_hands_gradients_to_another_is_refused_by_its_method(graph):
    for kind, name in ((HandsOn, "HandsOn.apply()"), (HandsPairsOn, "HandsPairsOn.apply_gradients()")):
        model = net(0)
        optimizer = grace.DistributedOptimizer(kind(keras.optimizers.SGD(0.1)), "topk(ratio=0.5)")

        def step(model=model, optimizer=optimizer):
            optimizer.apply_gradients(gradients(model, 0, [grace.rank()]))

        with pytest.raises(grace.ConfigError) as error:
            (tf.function(step) if graph else step)()
        assert f"{name} hands gradients to its inner" in str(error.value)
        assert "grace.DistributedOptimizer(optimizer, ...)" in str(error.value)


@pytest.mark.parametrize("way", ["parts", "inside", "multi", "scaled"])
@on_mpi
def test_optimizers_inside_others_and_in_parts_are_those_of_one_process(way):
    def made(how):
        if way == "parts":
            return how(InTwoParts(0.05, momentum=0.9))
        if way == "inside":
            return HandsOn(how(keras.optimizers.SGD(0.05, momentum=0.9)))
        optimizer = multi(how)
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0) if way == "scaled" else optimizer

    model, plain, optimizer, alone = net(0), net(0), made(grace.DistributedOptimizer), made(lambda optimizer: optimizer)
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=way != "multi")
    alone.build(plain.trainable_variables)
    for step in range(3):
        model.train_on_batch(*batch(step, grace.rank()))
        scale = alone.dynamic_scale if way == "scaled" else 1.0
        alone.apply_gradients([(g * scale, v) for g, v in gradients(plain, step, range(grace.size()))])
    ours = values(model.trainable_variables)
    np.testing.assert_allclose(ours, values(plain.trainable_variables), rtol=1e-4, atol=1e-5)
    return ours.tolist()


@on_both
def test_a_loss_scale_around_several_distributed_optimizers_skips_a_step_on_all_ranks():
    """Rank 1 overflows in the first step: both ranks skip it, and halve the scale."""
    optimizer = keras.optimizers.LossScaleOptimizer(multi(grace.DistributedOptimizer), initial_scale=8.0)
    variables = [keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="bias")]
    seen = []
    for step in range(2):
        odd = step == 0 and grace.rank() == 1
        optimizer.apply_gradients([(tf.constant([np.inf if odd else 8.0]), v) for v in variables])
        seen.append([float(optimizer.dynamic_scale), *(float(v[0]) for v in variables)])
    assert seen[0] == [4, 1, 1]
    assert seen[1][0] == 4
    assert seen[1][1] < 1
    return seen


@on_mpi
def test_parts_are_refused_where_means_come_a_step_later():
    communicator = grace.tensorflow.ReduceBroadcast("none", staleness=1)
    optimizer = grace.DistributedOptimizer(InTwoParts(0.05), communicator=communicator)
    pairs = list(gradients(net(0), 0, [grace.rank()]))
    with pytest.raises(grace.ConfigError, match=r"InTwoParts.apply\(\) calls super\(\).apply\(\) with some"):
        optimizer.apply_gradients(pairs)


def test_keras_multi_optimizer_is_refused_when_it_is_made_distributed(local):
    with pytest.raises(grace.ConfigError, match="MultiOptimizer hands all gradients to the optimizers in it"):
        grace.DistributedOptimizer(multi())
    with pytest.raises(grace.ConfigError, match="each of these distributed"):
        grace.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(multi()))


# -- gradients that are the next values --------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [False, True], ids=["", "accumulated"])
@on_both
def test_scales_of_float8_are_alike_and_maxima_those_of_all_ranks(accumulated):
    model = net(grace.rank(), layers=2)
    model.layers[0].quantize("float8")
    settings = {"gradient_accumulation_steps": 2} if accumulated else {}
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.05, **settings), "topk(ratio=0.5)")
    model.compile(optimizer, "mse", jit_compile=False)
    for step in range(3):
        model.train_on_batch(*batch(step, grace.rank()))
    if not accumulated:
        history = np.array(model.layers[0].inputs_amax_history)
        largest = [max(float(np.abs(batch(step, rank)[0]).max()) for rank in range(2)) for step in range(3)]
        assert sorted(history[history > 0].tolist()) == pytest.approx(sorted(largest))
    return values(model.trainable_variables).tolist()


@on_both
def test_a_scale_that_a_rank_has_no_value_for_is_the_others_or_stays():
    """A variable that gradients overwrite, of which some ranks have none in a step."""
    w, scale, seen = keras.Variable([1.0], name="w"), keras.Variable([2.0, 3.0], name="scale"), []
    scale.overwrite_with_gradient = True
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([w, scale])
    for without in [(0, 1), (1,), ()]:
        own = None if grace.rank() in without else tf.constant([1.0, 4.0 + grace.rank()])
        optimizer.apply_gradients([(tf.constant([1.0]), w), (own, scale)])
        seen.append([float(w[0]), *np.array(scale)])
    assert seen == [[0, 2, 3], [-1, 1, 4], [-2, 1, 5]]


# -- classes of the user's, and errors ----------------------------------------------------------------------


def test_a_registered_class_is_loaded_by_its_name(local, tmp_path):
    @keras.saving.register_keras_serializable("tests_of_grace", "Renamed")
    class Own(keras.optimizers.SGD):
        """A user's optimizer."""

    for around in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(around(grace.DistributedOptimizer(Own(0.1), "topk")), "mse", jit_compile=False)
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        model.save(tmp_path / "model.keras")
        for load in (keras.saving.load_model, grace.tensorflow.load_model):
            optimizer = load(tmp_path / "model.keras").optimizer
            assert isinstance(getattr(optimizer, "inner_optimizer", optimizer), Own)
    assert keras.saving.get_registered_object("tests_of_grace>Renamed") is Own


def test_a_refusal_in_a_traced_function_is_the_error_itself(local):
    w = tf.Variable([1.0])
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), "dgc")

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.constant([1.0]), w)])

    with pytest.raises(grace.ConfigError, match="momentum"):
        step()
    for error in (grace.RankError, grace.ExchangeError, grace.errors.StepError, grace.errors.MissingExtraError):
        assert error.__init__ is Exception.__init__
    assert str(grace.ConfigError("x" * 10**6)).endswith("x" * 50)
    assert len(str(grace.ConfigError("x" * 10**6))) < 1000
