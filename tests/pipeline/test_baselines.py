"""Plans of published profiles beside cuts by hand, and data parallelism."""

import contextlib
import itertools
from pathlib import Path

import pytest

from benchmarks.hand_cuts import BY_HAND, equal_time
from grace.errors import ConfigError
from grace.pipeline.planning.blocks import cut_at
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.predict import predict_data_parallel
from grace.pipeline.planning.search import SearchOptions, search, space_of
from grace.pipeline.planning.stage_costs import Space
from grace.planner.network import Links
from tests.pipeline.graphs import chain, plan

pytestmark = pytest.mark.slow

PROFILES = Path(__file__).parent / "profiles"
"""Profiles of PipeDream (Narayanan et al., SOSP 2019), of one batch on a V100: profiler/*/profiles/MODEL/graph.txt in
its repository, as graphs. Views keep no memory for backward, and other nodes their values."""


def longest(graph, cuts):
    """Seconds of the longest stage between cuts."""
    ends = [0, *(graph.index[name] + 1 for name in cuts), len(graph.nodes)]
    return max(sum(node.forward + node.backward for node in graph.nodes[a:b]) for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_equal_time_is_the_shortest_longest_stage(stages):
    graph = chain(9, forward=[1.0, 5.0, 2.0, 0.0, 3.0, 7.0, 1.0, 1.0, 4.0], backward=0.0)
    names = [node.name for node in graph.nodes[:-1]]
    best = min(longest(graph, cuts) for cuts in itertools.combinations(names, stages - 1))
    cuts = equal_time(graph, stages)
    assert len(cuts) == stages - 1
    assert longest(graph, cuts) == best


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_cuts_by_hand_are_as_many_as_asked(name):
    for path in sorted(PROFILES.glob("*.json")):
        graph = Graph.load(path)
        for stages in (2, 4, 8):
            cuts = BY_HAND[name](graph, stages)
            assert len(cuts) == len(set(cuts)) == stages - 1
            assert [graph.index[cut] for cut in cuts] == sorted(graph.index[cut] for cut in cuts)
            assert cuts[-1] != graph.nodes[-1].name


def cut_by_hand(space, how):
    """The best plan of a rule for cuts, with as many replicas of every stage; None if memory suffices for none."""
    found = []
    count, graph = space.devices.count, space.graph
    for stages in (s for s in range(2, min(count, len(graph.nodes)) + 1) if count % s == 0):
        options = SearchOptions(stages=stages, replicas=count // stages, layout="replicas")
        # the rule may cut nodes apart that must be together, or memory may not suffice
        with contextlib.suppress(ConfigError):
            made, facts = cut_at(graph, how(graph, stages)), (space.batch, space.limit, space.state, space.update)
            found.append(search(Space(graph, made, space.devices, space.exchanges, *facts), options))
    return min(found, key=lambda plan: plan.seconds, default=None)


@pytest.mark.parametrize(("name", "gbit"), [("vgg16", 1), ("vgg16", 10), ("gnmt", 1), ("gnmt", 10)])
def test_plans_are_never_slower_than_cuts_by_hand(name, gbit):
    graph = Graph.load(PROFILES / f"{name}.json")
    options = SearchOptions(memory=16e9, memory_margin=0.0)
    space = space_of(graph, 4, graph.rows * 4, Links(gbit * 1e9 / 8, 2e-5), options)
    found = search(space, SearchOptions())
    for how in BY_HAND.values():
        by_hand = cut_by_hand(space, how)
        assert by_hand is None or found.seconds <= by_hand.seconds * 1.03


def test_data_parallelism_hides_exchanges_and_needs_the_memory():
    graph = chain(4, parameters=1e8, kept=1e8, rows=8)
    alone = 8 / 2 * 4 * 3.0 / 8
    slow, fast = (space_of(graph, 2, 8, Links(bandwidth)) for bandwidth in (1e8, 1e12))
    assert predict_data_parallel(fast) == pytest.approx(alone, rel=0.2)
    assert alone < predict_data_parallel(slow) < alone + 4e8 / 1e8
    tight = SearchOptions(memory=1.36e9, memory_margin=0.0, optimizer_state=0.0)  # four micro-batches
    assert predict_data_parallel(space_of(graph, 2, 8, Links(1e12), tight)) == pytest.approx(alone, rel=0.2)
    too_tight = SearchOptions(memory=1e9, memory_margin=0.0)
    assert predict_data_parallel(space_of(graph, 2, 8, Links(1e9), too_tight)) is None


def test_too_many_stages_are_refused():
    with pytest.raises(ConfigError, match="cannot be cut"):
        BY_HAND["equal layers"](chain(3), 4)


def planned(name, gbit, **options):
    graph = Graph.load(PROFILES / f"{name}.json")
    return plan(graph, 8, graph.rows * 8, Links(gbit * 1e9 / 8, 20e-6), **options)


def test_finer_blocks_are_tried_too():
    coarse, finer, usual = (planned("gnmt", 1, **one) for one in ({"blocks": 16}, {"blocks": 128}, {}))
    assert finer.seconds < 0.9 * coarse.seconds
    assert usual.seconds == finer.seconds


def test_a_plan_may_use_fewer_devices():
    every, fewer = planned("alexnet", 10, blocks=32), planned("alexnet", 10, blocks=32, fewer=True)
    assert every.world_size == 8
    assert 4 <= fewer.world_size < 8
    assert fewer.seconds < every.seconds
