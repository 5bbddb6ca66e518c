"""``strategy="auto"`` in Keras: what is tried and kept, in graphs that are traced once."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.planner import auto_planner, step_timer
from tests.support.drawing import THOROUGH
from tests.support.passing import passing, time_by_hand
from tests.support.planners import NONE_FASTEST, SHAPES, SLEEPS, TOPK, UNTIL_CHOSEN, Planning
from tests.support.pools import launched, on_ranks
from tests.support.tensorflow_training import compiled, digest, fit, on_mpi, sgd, traced
from tests.support.training import made_up

STEPS = UNTIL_CHOSEN + 3
PLANNING = auto_planner.AutoPlanner
"""The planner itself."""


def choosing(sleeps, graph):
    """Return the chosen plan and the weights, which are the same on all ranks all the time; a graph is traced once."""
    time_by_hand()
    auto_planner.AutoPlanner = Planning  # which the driver is made with
    variables = [keras.Variable(np.zeros(shape, "f"), name=name) for name, shape in SHAPES.items()]
    optimizer = sgd(strategy="auto")
    traces = []

    def step(gradients):
        traces.append(1)
        optimizer.apply(gradients, variables)

    run, backend = traced(step, graph), grace.init()
    for number in range(STEPS):
        given = made_up(SHAPES, number, grace.rank())
        auto = optimizer._grace.driver
        passing.sleep(sleeps[auto.current if auto else "none"])
        run([tf.constant(given[name]) for name in SHAPES])
        if number % 20 == 0:
            assert len(set(backend.allgather_object(digest(variables)))) == 1
    assert len(traces) == (1 if graph else STEPS)
    return optimizer._grace.driver.plan, [np.asarray(v) for v in variables]


WHERE = [("mpirun-mpi", False), ("horovodrun-gloo", True)]
if THOROUGH:  # steps of Horovod's that no graph holds are slow
    WHERE += [("mpirun-mpi", True), ("horovodrun-gloo", False)]


@pytest.mark.parametrize(("engine", "graph"), WHERE)
@on_ranks(framework="tensorflow")
def test_the_fastest_is_kept(engine, graph):
    plan, _ = choosing(SLEEPS, graph)
    assert plan == {"chosen": TOPK}


@on_mpi
def test_nothing_is_lost_by_trying():
    plan, got = choosing(NONE_FASTEST, True)
    assert plan == {"chosen": "none"}
    for value, name in zip(got, SHAPES, strict=True):
        wanted = -sum(made_up(SHAPES, step, rank)[name] for step in range(STEPS) for rank in range(2)) / 2
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-3)


def new():
    """A model under auto, whose planner is made up."""
    time_by_hand()
    auto_planner.AutoPlanner = Planning  # which the driver is made with
    return compiled(sgd(lr=0.02, momentum=0.9, strategy="auto"))


def fit_with_waits(model, epochs):
    """Epochs of four steps, each of which takes as long as its strategy says."""

    def wait(batch, logs):
        auto = model.optimizer._grace.driver
        passing.sleep(SLEEPS[auto.current if auto else "none"])

    fit(model, epochs, [keras.callbacks.LambdaCallback(on_train_batch_begin=wait)])


CHOSEN = -(-STEPS // 4)
"""Epochs until a choice was made and checked."""
WAYS = ["one file for all", "one file a rank"]


def path_of(folder, way):
    return f"{folder}/{0 if way == WAYS[0] else grace.rank()}-{WAYS.index(way)}.keras"


def saved_and_went_on(folder):
    model = new()
    fit_with_waits(model, range(CHOSEN))
    for way in WAYS:
        path = path_of(folder, way)
        grace.tensorflow.save_model(model, path) if way == WAYS[0] else model.save(path)
    fit_with_waits(model, range(CHOSEN, CHOSEN + 2))
    return digest(model.variables), model.optimizer._grace.driver.plan


def went_on(folder, way, epochs=2):
    """Weights, the plan, and with what the resumed run began and ended; and what it was warned of."""
    time_by_hand()
    auto_planner.AutoPlanner = Planning  # which the driver is made with
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = grace.tensorflow.load_model(path_of(folder, way))
        fit_with_waits(model, range(CHOSEN, CHOSEN + 1))
    began = model.optimizer._grace.driver.current
    fit_with_waits(model, range(CHOSEN + 1, CHOSEN + epochs))
    auto = model.optimizer._grace.driver
    said = " ".join(str(one.message) for one in caught)
    return digest(model.variables), auto.plan, began, auto.current, said


@pytest.fixture(scope="module")
def saved(mpi, tmp_path_factory):
    """A folder with files of two ranks, and how these went on without a stop."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, mpi.run(saved_and_went_on, folder)


def test_a_saved_plan_is_gone_on_with_bit_for_bit(horovod, saved):
    folder, wanted = saved
    for way in WAYS:
        found = horovod.run(went_on, folder, way)
        for (weights, plan), (resumed, other, began, ended, said) in zip(wanted, found, strict=True):
            assert plan == other == {"chosen": TOPK}, (other, began, ended, said)
            assert began == ended == TOPK
            assert resumed == weights
            assert "dropped" not in said


def test_another_number_of_ranks_plans_anew(saved):
    found = launched("mpirun-mpi", 3, "tensorflow").run(went_on, saved[0], WAYS[0], CHOSEN)
    assert len({weights for weights, *_ in found}) == 1
    for _, plan, began, ended, said in found:
        assert plan == {"chosen": TOPK}
        assert (began, ended) == ("none", TOPK)
        assert "dropped" not in said


@on_mpi
def test_the_planner_itself():
    """A network planned by the planner itself: what it prints, weights, and whether the plan is what is executed."""
    import time

    auto_planner.AutoPlanner, step_timer.time = PLANNING, time
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.01
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(64)])
    strategy = "auto(methods=['fp16', 'topk(ratio=0.01)'], quality='feedback', seed=1)"
    optimizer = grace.DistributedOptimizer(keras.optimizers.SGD(0.01), strategy=strategy)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(grace.rank()).standard_normal((120 * 8, 64)).astype("f")
    model.fit(x, x, batch_size=8, verbose=0)
    plan, methods = optimizer.plan, {part.compressor for each in optimizer.strategy.plans for part in each.parts}
    # on a busy machine all may have gone back to the sums that they began with
    assert optimizer.strategy.id == plan.chosen.strategy.id if plan.compresses else methods == {"none"}
    assert "measured" in str(plan)
    assert "fp16" in str(plan)
    return str(plan), digest(model.variables)
