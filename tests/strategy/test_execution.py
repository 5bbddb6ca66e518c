"""StrategyPlan strategies: whatever the builder, uncompressed training is plain all-reduce training."""

import functools

import pytest
import torch

import grace
from grace.strategy.builders.all_reduce import AllReduce
from tests.support import strategies
from tests.support.pools import on_ranks
from tests.support.strategies import BUILDERS, assert_close, executed, mixed, on_the_mean, spec_for
from tests.support.training import digest

STEPS = range(4)
WITH_MORE = (
    "uneven_partitioned_ps(min_shard_bytes=0, local_replication=true)",
    "size_threshold(bytes=64, compressor=none, chunk_size=1)",
)


@functools.cache
def expected(size):
    return on_the_mean(mixed(), size, STEPS)


@pytest.mark.parametrize("builder", [*BUILDERS, *WITH_MORE])
@on_ranks(1, 2, 3)
def test_every_builder_trains_like_plain_all_reduce(builder):
    """On 2 + 1 ranks of two nodes, too."""
    model = mixed(seed=grace.rank())  # rank 0's count
    strategies.train(model, executed(model, spec_for(builder, grace.size())), STEPS)
    found = strategies.weights(model)
    assert_close(found, expected(grace.size()))
    return digest(found)


@on_ranks()
def test_a_builders_staleness_holds_for_what_it_sends_to_destinations():
    """Each of two steps changes the variables that are expected."""
    model = mixed()
    optimizer = executed(model, "parallax(staleness=1, compressor=topk(ratio=0.9))")
    strategy, late = optimizer.strategy, {"words.weight"}
    for step in range(2):
        before = strategies.weights(model)
        strategies.train(model, optimizer, range(step, step + 1))
        changed = {name for name, value in strategies.weights(model).items() if not torch.equal(value, before[name])}
        assert changed == {"prime", "dense.weight", "dense.bias", "scale"} | (late if step else set())
    optimizer.close()
    return strategy.id


class Spy(AllReduce):
    """A builder that tells what cluster it was given."""

    seen: list[int]

    def build(self, variables, resources):
        self.seen = list(resources.ranks)
        return super().build(variables, resources)


@on_ranks(3)
def test_builders_see_the_nodes_that_ranks_say_they_are_on():
    spy = Spy()
    executed(mixed(), spy)
    assert getattr(spy, "seen", None) == (None if grace.rank() else [0, 0, 1])  # only rank 0 builds
