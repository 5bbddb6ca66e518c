"""Ranks that measure methods together, or share cores."""

import os

import numpy as np
import pytest

import grace
from grace.communicators.choice import build_communicator
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner import auto_planner
from grace.planner.codecs import MeasuredMethod
from grace.planner.costs import CodecCost, Cost
from grace.planner.exchange_costs import codec_key
from grace.planner.measure_network import cores, oversubscription
from grace.planner.step_simulation import Timeline
from grace.strategy.choices import Choices

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here")


def bound(nodes, shared=True):
    """The factor of ranks of these nodes that share one core; each with one of its own, if there are enough."""
    backend, mine = grace.init(), cores()
    os.sched_setaffinity(0, {mine[0 if shared else backend.rank % len(mine)]})
    try:
        return oversubscription(backend, nodes), len(mine)
    finally:
        os.sched_setaffinity(0, mine)


def test_ranks_for_a_core_are_counted_node_by_node(three_ranks):
    assert {found for found, _ in three_ranks.run(bound, ["a", "a", "a"])} == {3.0}
    assert {found for found, _ in three_ranks.run(bound, ["a", "b", "a"])} == {2.0}
    assert {found for found, _ in three_ranks.run(bound, ["a", "b", "c"])} == {1.0}
    for found, there in three_ranks.run(bound, ["a", "a", "a"], False):
        assert found == max(1.0, 3 / there)


def planned(node):
    """Return the number of methods that this rank has measured, and the measured time of fp16: alone it takes 1 ms on
    rank 0, 2 on rank 1."""
    backend, mine, seen = grace.init(), cores(), []
    names = [node.format(rank) for rank in range(backend.size)]

    def measure(choice, *ignored):
        seen.append(choice)
        call = 1e-3 * (1 + backend.rank)
        return MeasuredMethod(codec_key(choice), CodecCost(Cost(call=call), Cost(), Cost(element=1e-9)), {"w": 0.0})

    options = Choices(strategy="auto(methods=['fp16'])").auto_request()
    made = auto_planner.AutoPlanner(options, backend, lambda: names, [Variable("w", (64, 64))])
    former, auto_planner.measure, auto_planner.LINK_SECONDS = auto_planner.measure, measure, 0.05
    os.sched_setaffinity(0, {mine[0]})
    try:
        made.measure_links(1e-3)
        made.measure_methods({"w": np.ones((64, 64), np.float32)}, set(), Timeline({"w": 0.0}))
    finally:
        auto_planner.measure = former
        os.sched_setaffinity(0, mine)
    codec = made.problem.costs.codecs["allreduce, cast, none"]
    return len(seen), (codec.start.call, codec.finish.element)


def test_one_measures_alone_where_ranks_share_a_core_and_the_others_turns_are_added(two_ranks):
    (count, codec), other = two_ranks.run(planned, "here")
    assert count == 3
    assert codec == (2e-3, 2e-9)
    assert other == (0, codec)


def test_ranks_with_cores_of_their_own_measure_at_once_and_the_slowest_counts(two_ranks):
    one, other = two_ranks.run(planned, "node{}")
    assert one == other == (3, (2e-3, 1e-9))


def measured(late):
    """The exchanges of this rank while two methods are measured, one after the other, each by a rank that is late."""
    backend, seen = grace.init(), []

    def measure(choice, *ignored):
        seen.append(choice.compressor.spec)
        if backend.rank == late:
            raise ConfigError("too small")
        return MeasuredMethod(codec_key(choice), CodecCost(), {})

    former, auto_planner.measure = auto_planner.measure, measure
    gather, backend.allgather_object = backend.allgather_object, lambda value: seen.append("all meet") or gather(value)
    try:
        choices = [build_communicator(spec, None, None) for spec in ("fp16", "qsgd")]
        found, left_out = auto_planner.measure_methods(backend, choices, {}, 2, 0.01)
    finally:
        auto_planner.measure = former
        del backend.allgather_object
    return seen, list(found), set(left_out.values())


def test_the_ranks_meet_after_each_method(two_ranks):
    for seen, found, left_out in two_ranks.run(measured, None):
        assert seen == ["cast", "all meet", "qsgd", "all meet"]
        assert len(found) == 2
        assert not left_out


def test_a_method_that_one_rank_cannot_measure_is_left_out_by_all(two_ranks):
    for seen, found, left_out in two_ranks.run(measured, 1):
        assert seen == ["cast", "all meet", "qsgd", "all meet"]
        assert found == []
        assert left_out == {"too small"}
