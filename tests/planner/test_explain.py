"""The choice of a candidate, its explanation, and its document, which says all of it."""

import json
from dataclasses import replace

import pytest

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.costs import DefaultCodecs
from grace.planner.error_budget import ErrorModel
from grace.planner.exchange_costs import Costs
from grace.planner.explain import MOST_ROWS, Plan, largest_share, plan_of
from grace.planner.greedy import Candidate, find_candidates
from grace.planner.network import Links
from grace.planner.problem import Problem
from grace.planner.step_simulation import Timeline
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.strategy.builder import OneNode

VARIABLES = [Variable(f"layer{i}.w", (256, 128)) for i in range(3)] + [
    Variable("head", (10, 128)),
    Variable("b", (10,)),
]
TIMELINE = Timeline({v.name: 1e-3 * i for i, v in enumerate(reversed(VARIABLES))}, 1e-3, 5e-3, 5e-4)


def problem_of(bandwidth=1e7, variables=VARIABLES, timeline=TIMELINE, ranks=4, **more):
    return Problem(variables, timeline, Costs(Links(bandwidth, 1e-5), DefaultCodecs()), OneNode(ranks), **more)


@pytest.fixture(scope="module")
def problem():
    return problem_of()


def candidate(problem, method, **more):
    strategy = uniform_strategy(problem.variables, problem.ranks, method)
    share = max(largest_share(problem, plan) for plan in strategy.plans)
    plain = method == "none"
    found = Candidate(method, strategy, problem.predict(strategy), share, baseline=plain, methods=(method,))
    return replace(found, **more)


def three(problem, **measured):
    return [candidate(problem, name, measured=measured.get(name)) for name in ("none", "fp16", "qsgd")]


def test_the_fastest_by_prediction_is_taken(problem):
    plan = plan_of(problem, three(problem))
    assert plan.chosen.name == min(three(problem), key=lambda one: one.prediction.step).name == "qsgd"
    assert plan.compresses
    assert plan.plain.name == "none"
    assert " expected against " in plan.why


def test_what_trials_chose_is_taken_and_measured_seconds_are_told(problem):
    plan = plan_of(problem, three(problem, none=0.020, fp16=0.015), chosen="fp16")
    assert plan.chosen.name == "fp16"
    assert plan.why.startswith("fp16: 15 ms measured against 20 ms uncompressed, 1.3x; its errors take at most ")
    plan = plan_of(problem, three(problem, none=0.100, fp16=0.098, qsgd=0.2), chosen="none")
    assert (plan.chosen.name, plan.compresses) == ("none", False)
    assert plan.why == "do not compress: nothing is 3 % faster than 100 ms by more than turns differ"


@pytest.mark.parametrize(("part", "taken"), [(0.98, "none"), (0.96, "fp16")])
def test_it_must_be_faster_by_the_margin(problem, part, taken):
    plain, fp16, _ = three(problem)
    fp16 = replace(fp16, prediction=replace(plain.prediction, step=part * plain.prediction.step))
    assert plan_of(problem, [plain, fp16]).chosen.name == taken


def test_what_loses_nothing_says_so(problem):
    exact = candidate(problem, "none", name="other", baseline=False, measured=0.01, share=0.0)
    plan = plan_of(problem, [*three(problem, none=0.02), exact], chosen="other")
    assert plan.why.endswith("2.0x; it loses nothing")


def test_a_plan_whose_method_no_variable_takes_is_explained():
    small = [Variable(f"{i}.weight", (16, 16)) for i in range(8)]
    problem = problem_of(variables=small, timeline=Timeline({v.name: 0.0 for v in small}))
    odd = candidate(problem, "powersgd(rank=8)", measured=0.0096)  # no variable shrinks by it
    plan = plan_of(problem, [candidate(problem, "none", measured=0.01), odd], chosen=odd.name)
    assert plan.chosen is odd
    assert "powersgd(rank=8): 9.6 ms measured" in str(plan)


def test_rows_are_all_variables_alike_ones_together(problem):
    plan = plan_of(problem, three(problem))
    assert (plan.rows[0].variables, plan.rows[0].count) == ("layer*.w", 3)
    assert sum(row.count for row in plan.rows) == len(VARIABLES)
    assert sum(row.elements for row in plan.rows) == sum(v.numel for v in VARIABLES)
    assert max(row.share for row in plan.rows) == plan.chosen.share


def test_a_row_saves_what_the_step_would_take_longer_without(problem):
    plan = plan_of(problem, three(problem))
    first, dense = plan.rows[0], ShardPlan(Sync("allreduce", group=0), "none", "none")
    plans = tuple(
        replace(one, parts=(replace(dense, sync=Sync("allreduce", group=one.parts[0].sync.group)),))
        if one.variable.name.startswith("layer")
        else one
        for one in plan.chosen.strategy.plans
    )
    without = problem.predict(replace(plan.chosen.strategy, plans=plans)).step
    assert first.why == f"saves {1e3 * (without - plan.chosen.prediction.step):.3g} ms"
    assert "saves" not in plan_of(problem, three(problem), chosen="none").rows[0].why


def test_why_variables_are_not_compressed(problem):
    strict = problem_of(errors=ErrorModel(reference="none"))
    assert plan_of(strict, [candidate(strict, "none")]).rows[0].why == "every method loses too much"
    assert plan_of(problem, [candidate(problem, "none")]).rows[0].why == "compressing them gains nothing"
    tiny = problem_of(variables=[Variable("s", ())], timeline=Timeline({"s": 0.0}), methods=["powersgd"])
    assert plan_of(tiny, [candidate(tiny, "none")]).rows[0].why == "no method makes them smaller"


def test_many_kinds_are_summed_up():
    names = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(MOST_ROWS + 6)]
    variables = [Variable(name, (64, 8 + i)) for i, name in enumerate(names)]
    problem = problem_of(variables=variables, timeline=Timeline(dict.fromkeys(names, 0.0)))
    rows = plan_of(problem, three(problem)).rows
    assert len(rows) == MOST_ROWS + 1
    assert (rows[-1].variables, rows[-1].count) == ("others", 6)
    assert rows[-1].elements == sum(v.numel for v in variables[:6])


def test_it_prints_as_a_table(problem):
    found = three(problem, none=0.020, fp16=0.015)
    plan = plan_of(problem, found, chosen="fp16", remarks=["not measured: topk: no time"])
    lines = str(plan).splitlines()
    assert lines[:2] == [plan.why, "not measured: topk: no time"]
    (taken,) = (line for line in lines if line.startswith("*"))
    assert taken.split()[1] == "fp16"
    assert "15 ms" in taken
    assert "layer*.w" in str(plan)
    assert lines[-1].endswith("(matrices: the error of powersgd(rank=4)); quality: feedback")


def every_kind():
    """A strategy of whole variables and parts, groups, destinations and hierarchies."""
    gathered = ShardPlan(Sync("allgather", group=3), "topk", "residual", 2)
    through = ShardPlan(Sync("reduce_broadcast", destination=1, local_replication=True), "none", "none")
    averaged, led = ShardPlan(Sync("none", period=4), "none", "none"), Sync("allreduce", group=1, hierarchical=True)
    plans = [
        VariablePlan(VARIABLES[0], (gathered, through), 0, (100, 156)),
        VariablePlan(VARIABLES[1], (gathered,)),
        VariablePlan(VARIABLES[2], (through,)),
        VariablePlan(VARIABLES[3], (averaged,)),
        VariablePlan(VARIABLES[4], (ShardPlan(led, "none", "none"),)),
    ]
    return Strategy(tuple(plans), 4, 2, {"name": "auto", "params": {}, "seed": 3})


def test_the_document_is_all_of_it(problem):
    plan = plan_of(problem, [*three(problem, none=0.02, fp16=0.01), *find_candidates(problem)[:1]], remarks=["so"])
    plan = replace(plan, candidates=(*plan.candidates, replace(plan.chosen, name="every kind", strategy=every_kind())))
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert str(again) == str(plan)
    assert again.chosen.strategy.id == plan.chosen.strategy.id


@pytest.mark.parametrize(
    "damage",
    [{"candidates": None}, {"number": 9}, {"rows": [{"variables": "w"}]}, {"more": 1}, {"candidates": [{}]}],
    ids=lambda damage: next(iter(damage)),
)
def test_a_damaged_document_is_refused(problem, damage):
    document = plan_of(problem, three(problem)).to_dict()
    with pytest.raises(ConfigError, match="no document of a plan"):
        Plan.from_dict({**document, **damage})


def test_a_document_with_another_sync_is_refused(problem):
    document = json.loads(json.dumps(plan_of(problem, three(problem)).to_dict()))
    sync = {"type": "ring", "group": 0}
    next(iter(document["candidates"][0]["strategy"]["variables"].values()))["sync"] = sync
    with pytest.raises(ConfigError, match="ring"):
        Plan.from_dict(document)
