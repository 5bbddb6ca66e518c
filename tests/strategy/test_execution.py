"""StrategyPlan strategies: whatever the builder, uncompressed training is plain all-reduce training."""

import functools

import pytest
import torch

import grace
from grace.strategy.builders.all_reduce import AllReduce
from tests.support import strategies
from tests.support.pools import ranks_of
from tests.support.strategies import BUILDERS, assert_close, executed, mixed, on_the_mean, spec_for
from tests.support.training import digest

pytestmark = pytest.mark.ranks

STEPS = range(4)
WITH_MORE = (
    "uneven_partitioned_ps(min_shard_bytes=0, local_replication=true)",
    "size_threshold(bytes=64, compressor=none, chunk_size=1)",
)


def trained(builder):
    """Weights after some steps."""
    model = mixed(seed=grace.rank())  # rank 0's count
    optimizer = executed(model, spec_for(builder, grace.size()))
    strategies.train(model, optimizer, STEPS)
    return strategies.weights(model)


@functools.cache
def expected(size):
    return on_the_mean(mixed(), size, STEPS)


@pytest.mark.parametrize("size", [1, 2, 3], ids=["1rank", "2ranks", "2+1ranks"])
@pytest.mark.parametrize("builder", [*BUILDERS, *WITH_MORE])
def test_every_builder_trains_like_plain_all_reduce(builder, size):
    answers = ranks_of(size).run(trained, builder)
    assert len(set(map(digest, answers))) == 1
    assert_close(answers[0], expected(size))


def late(spec):
    """What two steps changed, each by itself, and what a rank thinks the strategy is."""
    model = mixed()
    optimizer = executed(model, spec)
    before, changed, strategy = strategies.weights(model), [], optimizer.strategy
    for step in range(2):
        strategies.train(model, optimizer, range(step, step + 1))
        now = strategies.weights(model)
        changed.append({name.split(".")[0] for name in now if not torch.equal(now[name], before[name])})
        before = now
    optimizer.close()
    return changed, strategy.id


def test_a_builders_staleness_holds_for_what_it_sends_to_destinations(two_ranks):
    answers = two_ranks.run(late, "parallax(staleness=1, compressor=topk(ratio=0.9))")
    assert answers[0] == answers[1]
    first, second = answers[0][0]
    assert first == {"prime", "dense", "scale"}
    assert second == {"prime", "dense", "scale", "words"}


class Spy(AllReduce):
    """A builder that tells what cluster it was given."""

    seen: list[int]

    def build(self, variables, resources):
        self.seen = list(resources.ranks)
        return super().build(variables, resources)


def cluster_seen():
    spy = Spy()
    executed(mixed(), spy)
    return getattr(spy, "seen", None)


def test_builders_see_the_nodes_that_ranks_say_they_are_on(three_ranks):
    assert three_ranks.run(cluster_seen) == [[0, 0, 1], None, None]  # only rank 0 builds
