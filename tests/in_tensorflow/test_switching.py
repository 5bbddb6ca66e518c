"""Another strategy in the middle of training with Keras: memories go along, and former graphs are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.core.variable import Variable
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.tensorflow import Compressor, Traits
from grace.tensorflow.representation import Tensors
from tests.support.own_parts import registered
from tests.support.tensorflow_training import both_ways, compiled, digest, fit, on_both, on_horovod, on_mpi, sgd, traced
from tests.support.training import made_up

pytestmark = pytest.mark.slow

SHAPES = {"w": (12, 8), "v": (40, 6), "b": (5,)}
PLAIN, TOPK = "uniform", "uniform(compressor=topk(ratio=0.1))"
POWERSGD, HALVES = "uniform(compressor=powersgd(rank=1))", "uniform(compressor=halves)"


class Halves(Compressor):
    """Half of every value, written in TensorFlow; the memory keeps the other half."""

    name = "halves"
    traits = Traits(category="quantization", memory="residual")

    def compress(self, tensor, name):
        assert tf.is_tensor(tensor)
        return [0.5 * tensor], None

    def decompress(self, payload, ctx):
        return payload[0]


class Loop:
    """Variables of zeros that SGD steps by gradients that are made up."""

    def __init__(self, strategy, graph, lr=1.0, **options):
        self.variables = [keras.Variable(np.zeros(shape, "f"), name=name) for name, shape in SHAPES.items()]
        self.optimizer = sgd(lr=lr, strategy=strategy, **options)
        self.graph = graph
        self.trace()

    def trace(self):
        """Anew, if at all."""
        self.run = traced(lambda gradients: self.optimizer.apply(gradients, self.variables), self.graph)

    def steps(self, numbers):
        for number in numbers:
            given = made_up(SHAPES, number, grace.rank())
            self.run([tf.constant(given[name]) for name in SHAPES])

    def use(self, strategy):
        self.optimizer.use_strategy(strategy)
        self.trace()

    @property
    def values(self):
        return [np.asarray(variable).copy() for variable in self.variables]


def on_the_mean(count, size):
    given = [made_up(SHAPES, step, rank) for step in range(count) for rank in range(size)]
    return [-sum(one[name] for one in given) / size for name in SHAPES]


@pytest.mark.parametrize("between", [[TOPK], [TOPK, POWERSGD], [HALVES], [TOPK, HALVES, TOPK]], ids=str)
@both_ways
@on_both
def test_nothing_is_lost_on_the_way_back_to_plain_sums(graph, between):
    """Two steps by each strategy, of which the user's own computes with tensors."""
    strategies = [PLAIN, *between, PLAIN]
    with registered(Halves):
        loop = Loop(strategies[0], graph)
        for i, strategy in enumerate(strategies):
            if i:
                loop.use(strategy)
            loop.steps(range(2 * i, 2 * i + 2))
            assert type(loop.optimizer._grace.representation) is Tensors or strategy != HALVES
    assert loop.optimizer.traffic.steps == 2 * len(strategies)
    assert loop.optimizer.plan is None
    for got, wanted in zip(loop.values, on_the_mean(2 * len(strategies), 2), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "second"), [(PLAIN, TOPK), (TOPK, POWERSGD)])
@on_both
def test_a_graph_of_the_former_strategy_is_refused_and_changes_nothing(first, second):
    found = []
    for tries in (True, False):
        loop = Loop(first, True)
        loop.steps(range(2))
        before = loop.run
        loop.use(second)
        if tries:
            now, loop.run = loop.run, before
            with pytest.raises(Exception, match=r"make your tf\.function anew"):
                loop.steps([9])
            loop.run = now
        loop.steps(range(2, 4))
        found.append(digest(loop.values))
    assert found[0] == found[1]


class Switching(keras.callbacks.Callback):
    """Another strategy after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.optimizer.use_strategy(TOPK)
            self.model.make_train_function(force=True)


@on_horovod
def test_in_fit():
    """A model after three epochs, of which the first is plain: switched by a callback, and by hand."""
    ends = []
    for by_callback in (True, False):
        model = compiled(sgd(lr=0.05, strategy=PLAIN))
        if by_callback:
            fit(model, range(3), [Switching()])
        else:
            fit(model, range(1))
            model.optimizer.use_strategy(TOPK)
            with pytest.raises(Exception, match=r"make_train_function\(force=True\)"):
                fit(model, range(1))
            model.make_train_function(force=True)
            fit(model, range(2))
        assert {plan.parts[0].compressor for plan in model.optimizer.strategy.plans} == {"topk(ratio=0.1)"}
        assert model.optimizer.traffic.steps == 12
        ends.append(digest(model.trainable_variables))
    assert ends[0] == ends[1]
    return ends


@pytest.mark.parametrize("saved", ["after", "before"])
@both_ways
@on_mpi
def test_a_checkpoint_after_or_before_a_switch(graph, saved):
    """A run that was saved beside a switch is gone on with as if it had not been."""
    one = Loop(TOPK, graph, momentum=0.9)
    one.steps(range(2))
    if saved == "after":
        one.use(POWERSGD)
    one.steps(range(2, 4))
    state, momenta = one.optimizer.full_state(), [np.asarray(v) for v in one.optimizer.variables]
    two = Loop(POWERSGD if saved == "after" else TOPK, graph, momentum=0.9)
    two.optimizer.build(two.variables)
    for mine, theirs in zip([*two.variables, *two.optimizer.variables], [*one.values, *momenta], strict=True):
        mine.assign(theirs)
    two.optimizer.load_state(state)
    if saved == "before":
        one.use(POWERSGD)
        two.use(POWERSGD)
    one.steps(range(4, 6))
    two.steps(range(4, 6))
    assert digest(one.values) == digest(two.values)


@on_mpi
def test_what_is_refused_changes_nothing():
    """Training goes on by the graph that there is."""
    one, two = Loop(TOPK, True), Loop(TOPK, True)
    one.steps(range(3))
    two.steps(range(3))
    with pytest.raises(grace.GraceError) as caught:
        two.optimizer.use_strategy(TOPK if grace.rank() else "uniform(compressor=tokp)")
    assert ("rank 0" if grace.rank() else "did you mean 'topk'") in str(caught.value)
    assert isinstance(caught.value, grace.RankError) == bool(grace.rank())
    one.steps(range(3, 5))
    two.steps(range(3, 5))
    assert digest(one.values) == digest(two.values)


def test_before_the_first_exchange_it_is_the_choice(local):
    loop = Loop(None, True, compressor="qsgd")
    loop.optimizer.use_strategy(PLAIN)
    loop.steps(range(1))
    assert {plan.parts[0].compressor for plan in loop.optimizer.strategy.plans} == {"none"}
    with pytest.raises(grace.ConfigError, match="needs a strategy"):
        loop.optimizer.use_strategy(None)


def test_not_in_a_graph(local):
    loop = Loop(PLAIN, True)
    loop.steps(range(1))
    with pytest.raises(grace.ConfigError, match=r"outside of tf\.function"):
        tf.function(lambda: loop.optimizer.use_strategy(TOPK), autograph=False)()


def averaged():
    """Every variable averaged now and then, of the local run."""
    part = ShardPlan(Sync("none", period=2))
    return Strategy(tuple(VariablePlan(Variable(name, shape), (part,)) for name, shape in SHAPES.items()), 1, 1)


def test_a_choice_by_hand_ends_planning_and_graphs_go_on(local):
    loop = Loop("auto", True)
    loop.steps(range(5))
    graph, auto = loop.run, loop.optimizer._grace.driver
    assert auto.after_backward
    loop.optimizer.use_strategy(TOPK)
    assert not auto.after_backward
    assert auto.steps_left == 0
    loop.run = graph
    loop.steps(range(5, 30))
    assert {plan.parts[0].compressor for plan in loop.optimizer.strategy.plans} == {"topk(ratio=0.1)"}
    assert loop.optimizer.plan is None
    assert "plan" not in loop.optimizer.full_state()
    assert loop.optimizer._grace.options()["strategy"] == loop.optimizer.strategy.to_dict()


def test_what_graphs_have_around_an_exchange_is_not_left_out(local):
    loop = Loop("auto", True)
    loop.steps(range(2))
    loop.optimizer.use_strategy(averaged())
    with pytest.raises(Exception, match=r"make your tf\.function anew"):
        loop.steps([2])
    loop.trace()
    loop.steps([2])


def test_a_saved_plan_of_a_users_own_method_is_gone_on_with_by_tensors(local):
    """The exchange begins with sums, which compute with arrays."""
    one, two = Loop("auto", False), Loop("auto", False)
    with registered(Halves):
        for loop in (one, two):
            loop.steps(range(2))
        driver = one.optimizer._grace.driver
        driver.strategies["halves"] = uniform_strategy(one.optimizer._grace.runner.variables, 1, "halves")
        assert driver._switch_to("halves")
        one.steps(range(2, 4))
        two.optimizer.load_state(one.optimizer.state())
        kept = [value for part in two.optimizer._grace.runner.state().values() for value in part.values()]
        assert kept
        assert all(map(tf.is_tensor, kept))


def test_a_refused_strategy_does_not_end_a_period(local):
    loop = Loop(None, False, outer="nesterov(lr=0.5)", period=4)
    loop.steps(range(1))
    before = digest(loop.values)
    with pytest.raises(grace.ConfigError, match="did you mean 'topk'"):
        loop.optimizer.use_strategy("uniform(compressor=tokp)")
    assert digest(loop.values) == before
    loop.use(PLAIN)
    assert digest(loop.values) != before
