"""Outer plans are predicted, mentioned where they are much faster, and never taken."""

import dataclasses

import pytest

from grace.core.registry import make
from grace.core.variable import Variable
from grace.planner.costs import CodecCost, Cost, DefaultCodecs
from grace.planner.exchange_costs import DENSE, Costs
from grace.planner.explain import Plan, plan_of
from grace.planner.greedy import find_candidates
from grace.planner.network import Links
from grace.planner.outer_plans import PERIOD, outer_plans
from grace.planner.problem import Problem
from grace.planner.step_simulation import Timeline
from grace.strategy.builder import OneNode
from grace.strategy.execution import make_shards
from tests.support.strategies import sent_by_rank

MEGA = [Variable(f"w{i}", (1024, 1025)) for i in range(16)]
"""16.8 million parameters."""


def problem_of(bandwidth, variables=MEGA, methods=(), ranks=2):
    ready = {v.name: 0.01 * (len(variables) - i) / len(variables) for i, v in enumerate(variables)}
    costs = Costs(Links(bandwidth, 5e-5), DefaultCodecs())
    return Problem(variables, Timeline(ready, 0.05, 0.1), costs, OneNode(ranks), methods=methods)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_and_memory_of_outer_plans_are_those_of_their_strategies(ranks):
    problem = problem_of(1e8, [*MEGA[:2], Variable("table", (900, 16), sparse=True), Variable("b", (7,))], ranks=ranks)
    for (spec, prediction), bits in zip(outer_plans(problem).items(), (32, 4), strict=True):
        strategy = make("builder", spec).build(problem.variables, OneNode(ranks))
        assert {shard.period for shard in make_shards(strategy, strategy.variables)} == {PERIOD}
        sent = max(sent_by_rank(strategy))  # without headers
        assert sent < prediction.sent < sent * 1.01 + 64
        elements = sum(variable.numel for variable in problem.variables)
        assert prediction.memory > 8 * elements + elements * bits / 8


def test_the_figures_at_1_gbit_are_those_of_the_arithmetic():
    problem = problem_of(1e9 / 8)
    plain, block = outer_plans(problem).values()
    assert plain.step == pytest.approx(0.150 + 0.537 / PERIOD, rel=0.1)  # a step's exchange takes 537 ms
    assert block.step == pytest.approx(0.154, abs=0.006)
    assert block.step == pytest.approx(block.compute + block.codec + block.exposed)


def test_an_outer_plan_that_is_much_faster_is_mentioned_and_not_taken():
    problem = problem_of(1e9 / 8)
    plan = plan_of(problem, find_candidates(problem))
    (remark,) = plan.remarks
    assert "times less with outer= (diloco(compressor='block(bits=4)', period=20))" in remark
    assert "it changes training, see docs/outer.md" in remark
    assert remark in str(plan).splitlines()
    assert remark in Plan.from_dict(plan.to_dict()).remarks
    for candidate in plan.candidates:
        assert all(part.outer is None for each in candidate.strategy.plans for part in each.parts)


def test_nothing_is_said_of_outer_plans_over_a_fast_link():
    fast = problem_of(1e12 / 8)
    assert plan_of(fast, find_candidates(fast)).remarks == ()


def test_what_was_not_measured_takes_as_long_as_elsewhere():
    problem = problem_of(1e9 / 8)
    measured = {DENSE: CodecCost(start=Cost(1.0))}
    known = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, codecs=measured))
    plain, block = outer_plans(known).values()
    usual, usual_block = outer_plans(problem).values()
    assert plain.codec > usual.codec + 1 / PERIOD - 1e-9
    assert block.codec == usual_block.codec
