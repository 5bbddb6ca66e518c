"""Ranks that share cores: what is measured of codecs then."""

import os

import numpy as np
import pytest

import grace
from grace.core.variable import Variable
from grace.planner import planning
from grace.planner.codecs import MeasuredMethod
from grace.planner.costs import CodecCost, Cost
from grace.planner.exchange_costs import codec_key
from grace.planner.links import cores, oversubscription
from grace.planner.step import Timeline
from grace.strategy.choices import Choices

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here"),
]


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
    """How many methods this rank has measured, and what rank 0 takes fp16 for, which takes 1 ms alone."""
    backend, mine, seen = grace.init(), cores(), []
    names = [node.format(rank) for rank in range(backend.size)]

    def measure(choice, *ignored):
        seen.append(choice)
        return MeasuredMethod(codec_key(choice), CodecCost(Cost(call=1e-3), Cost(), Cost(element=1e-9)), {"w": 0.0})

    options = Choices(strategy="auto(methods=['fp16'])").auto_request()
    made = planning.Planning(options, backend, lambda: names, [Variable("w", (64, 64))])
    former, planning.measure, planning.LINK_SECONDS = planning.measure, measure, 0.05
    os.sched_setaffinity(0, {mine[0]})
    try:
        made.measure_links(1e-3)
        if backend.rank == 0:
            made.candidates({"w": np.ones((64, 64), np.float32)}, Timeline({"w": 0.0}))
    finally:
        planning.measure = former
        os.sched_setaffinity(0, mine)
    if backend.rank != 0:
        return len(seen), None
    codec = made.problem.costs.codecs["allreduce, cast, none"]
    return len(seen), (codec.start.call, codec.finish.element)


def test_one_measures_alone_and_the_others_turns_are_added(two_ranks):
    (count, codec), other = two_ranks.run(planned, "here")
    assert count > 1
    assert codec == (2e-3, 2e-9)
    assert other == (0, None)


def test_ranks_with_cores_of_their_own_wait_for_no_other(two_ranks):
    (_, codec), other = two_ranks.run(planned, "node{}")
    assert codec == (1e-3, 1e-9)
    assert other == (0, None)
