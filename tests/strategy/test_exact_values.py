"""Exact updated values of every way to synchronize, uncompressed, against NumPy."""

import numpy as np
import pytest

import grace
from grace.strategy import ShardPlan, Sync
from tests.support.strategies import Tables, cut, executed, reduced, sgd, strategy_of, weights, whole
from tests.support.training import digest

SHAPES = {"matrix": (13, 4), "vector": (7,), "scalar": (), "empty": (0, 3)}
TABLES = {"words": (9, 3), "items": (5, 2)}
COLLECTIVES = ("allreduce", "allgather", "broadcast", "scatter_reduce")
LAST = -1


def given(step, rank):
    """Whole numbers that are multiples of 2 and 3: means are exact. Some rows come twice, some on one rank only."""
    draws = np.random.default_rng((step, rank))

    def numbers(*shape):
        return 6.0 * draws.integers(-50, 50, shape).astype(np.float32)

    dense = {name: numbers(*shape) for name, shape in SHAPES.items()}
    rows = {"words": np.array([rank, 3, 3, 8 - rank]), "items": np.array([0, 4])[: 1 + rank % 2]}
    return dense | {name: (found, numbers(len(found), TABLES[name][1])) for name, found in rows.items()}


def gradient(name, value):
    """Return a gradient as a dense array of the whole variable."""
    if not isinstance(value, tuple):
        return value
    whole_one = np.zeros(TABLES[name.removesuffix(".weight")], np.float32)
    np.add.at(whole_one, *value)
    return whole_one


def mean_of(name, step, size):
    """The mean of all ranks' gradients."""
    return sum(gradient(name, given(step, rank)[name.removesuffix(".weight")]) for rank in range(size)) / size


def variable_names():
    return [*SHAPES, *(f"{name}.weight" for name in TABLES)]


def run(strategy, steps=2, lr=1.0):
    """Weights after each step of SGD from zeros."""
    model, after = Tables(SHAPES, TABLES), []
    optimizer = executed(model, strategy, lambda parameters: sgd(parameters, lr))
    for step in range(steps):
        optimizer.zero_grad()
        model.backward(given(step, grace.rank()))
        optimizer.step()
        after.append({name: value.numpy() for name, value in weights(model).items()})
    return after


def for_all(part):
    """Return a strategy with the same part for every variable."""
    plans = [whole(name, shape, part) for name, shape in SHAPES.items()]
    plans += [whole(f"{name}.weight", shape, part, sparse=True) for name, shape in TABLES.items()]
    return strategy_of(*plans)


def all_by(sync):
    if sync.destination == LAST:
        sync = Sync("reduce_broadcast", destination=grace.size() - 1)
    return run(for_all(ShardPlan(sync)))


def check_means(answers, size, steps=2):
    assert len(set(map(digest, map(str, answers)))) == 1
    for step in range(steps):
        for name in variable_names():
            wanted = -sum(mean_of(name, earlier, size) for earlier in range(step + 1))
            np.testing.assert_array_equal(answers[0][step][name], wanted, err_msg=f"{name}, step {step}")


SYNCS = [
    *(Sync(kind) for kind in COLLECTIVES),
    *(Sync("reduce_broadcast", destination=i) for i in (0, 1, LAST)),
    Sync("reduce_broadcast", destination=1, local_replication=True),
]


@pytest.mark.parametrize(
    "sync", SYNCS, ids=lambda sync: f"{sync.type}-{sync.destination}-{sync.options.get('local_replication')}"
)
def test_two_steps_subtract_the_mean_of_all_ranks_gradients(ranks, sync):
    check_means(ranks.run(all_by, sync), ranks.size)


def all_in_parts():
    """Several types within one variable, uneven sizes, along both axes."""
    last = grace.size() - 1
    several = [ShardPlan(Sync("allreduce")), reduced(last), ShardPlan(Sync("scatter_reduce", group=1), priority=-1)]
    others = [ShardPlan(Sync("allgather")), reduced(0), ShardPlan(Sync("broadcast"))]
    return run(
        strategy_of(
            cut("matrix", (13, 4), several, 0, (5, 1, 7)),
            cut("vector", (7,), [reduced(1), ShardPlan(), reduced(0)], 0, (1, 4, 2)),
            whole("scalar", (), reduced(last)),
            whole("empty", (0, 3), ShardPlan(Sync("scatter_reduce"))),
            cut("words.weight", (9, 3), [*others, reduced(last)], 0, (2, 2, 4, 1), sparse=True),
            cut("items.weight", (5, 2), [reduced(1), reduced(0)], 0, (4, 1), sparse=True),
        )
    )


def all_along_axis_1():
    four = [ShardPlan(), reduced(0), ShardPlan(Sync("allgather")), reduced(1)]
    return run(
        strategy_of(
            cut("matrix", (13, 4), four, 1, (1, 1, 1, 1)),
            whole("vector", (7,), ShardPlan()),
            whole("scalar", (), ShardPlan()),
            cut("empty", (0, 3), [ShardPlan(), reduced(1)], 1, (1, 2)),
            whole("words.weight", (9, 3), ShardPlan(Sync("scatter_reduce")), sparse=True),
            whole("items.weight", (5, 2), ShardPlan(), sparse=True),
        )
    )


@pytest.mark.parametrize("function", [all_in_parts, all_along_axis_1])
def test_parts_of_several_types_within_a_variable(ranks, function):
    check_means(ranks.run(function), ranks.size)


# -- none(period): ranks train on their own, and average now and then --------------------------------------


def alone(period):
    return run(for_all(ShardPlan(Sync("none", period=period))), steps=5)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_ranks_that_train_on_their_own_are_averaged_every_so_many_steps(ranks, period):
    answers, size = ranks.run(alone, period), ranks.size
    values = {name: [0.0] * size for name in variable_names()}
    for step in range(5):
        for name, at in values.items():
            at[:] = [v - gradient(name, given(step, rank)[name.removesuffix(".weight")]) for rank, v in enumerate(at)]
            if (step + 1) % period == 0:
                at[:] = [sum(at) / size] * size
            for rank in range(size):
                got = answers[rank][step][name]
                np.testing.assert_allclose(got, at[rank], rtol=1e-6, atol=1e-4, err_msg=f"{name}, step {step}")
        apart = len({digest(str(answer[step]["matrix"])) for answer in answers}) > 1
        assert apart == ((step + 1) % period != 0)


def partly_alone():
    own = ShardPlan(Sync("none", period=2))
    return run(
        strategy_of(
            cut("matrix", (13, 4), [own, ShardPlan(), own], 0, (5, 1, 7)),
            whole("vector", (7,), reduced(1)),
            whole("scalar", (), own),
            whole("empty", (0, 3), own),
            cut("words.weight", (9, 3), [own, reduced(1), own], 0, (2, 3, 4), sparse=True),
            cut("items.weight", (5, 2), [ShardPlan(), own], 0, (1, 4), sparse=True),
        ),
        steps=3,
    )


def test_a_variable_may_be_partly_synchronized_and_partly_averaged(ranks):
    answers, size = ranks.run(partly_alone), ranks.size
    own = {"matrix": [*range(5), *range(6, 13)], "words.weight": [0, 1, 5, 6, 7, 8], "items.weight": [1, 2, 3, 4]}
    for name, rows in own.items():
        at = [np.zeros_like(mean_of(name, 0, size))] * size
        for step in range(3):
            grads = [gradient(name, given(step, rank)[name.removesuffix(".weight")]) for rank in range(size)]
            moved = [mean_of(name, step, size).copy() for _ in range(size)]
            for rank in range(size):
                moved[rank][rows] = grads[rank][rows]
            at = [v - m for v, m in zip(at, moved, strict=True)]
            if step == 1:
                at = [sum(at) / size] * size
            for rank in range(size):
                got = answers[rank][step][name]
                np.testing.assert_allclose(got, at[rank], rtol=1e-6, atol=1e-4, err_msg=f"{name} {step} {rank}")
