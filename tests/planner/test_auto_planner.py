"""Measurements of ``auto`` between two steps, and its report of them; over ranks that are pretended."""

from dataclasses import replace

import numpy as np
import pytest

from grace.backends.simulated import SimulatedRanks
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner import auto_planner
from grace.planner.auto_planner import AutoPlanner
from grace.planner.codecs import is_table
from grace.planner.network import Links
from grace.planner.problem import offers
from grace.planner.step_simulation import Timeline
from grace.strategy.choices import Choices

VARIABLES = [Variable("w", (256, 128)), Variable("v", (64, 256)), Variable("b", (64,))]
TIMELINE = Timeline({"w": 2e-3, "v": 1e-3, "b": 0.0}, forward=1e-3, backward=2e-3)
OFFERED = [spec for spec, tables_only in offers().items() if not tables_only]


@pytest.fixture
def gradients():
    draws = np.random.default_rng(0)
    return {v.name: draws.standard_normal(v.shape).astype(np.float32) for v in VARIABLES}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Links and methods are measured briefly."""
    monkeypatch.setattr(auto_planner, "LINK_SECONDS", 0.05)
    monkeypatch.setattr(auto_planner, "CODEC_SECONDS", 0.005)


def planning_of(strategy="auto", ranks=2, variables=VARIABLES, **options):
    names = [f"n{rank}" for rank in range(ranks)]
    request = Choices(strategy=strategy).auto_request()
    return AutoPlanner(request, SimulatedRanks(ranks), lambda: names, variables, **options)


def planned(
    gradients, strategy="auto(methods=['fp16', 'topk(ratio=0.01)'])", timeline=TIMELINE, skew=0.0, links=None, **options
):
    """A planner that has found candidates; on these links, if any are given."""
    made = planning_of(strategy, **options)
    made.measure_links(4e-3)
    if links is not None:
        made.network = links
    made.measure_methods(gradients, {name for name, x in gradients.items() if is_table(x)}, timeline)
    made.find_candidates(skew)
    return made


def measured(made):
    return {key.split(", ")[1] for key in made.problem.costs.codecs}


def test_all_methods_are_measured_and_none_is_dropped(gradients):
    made = planned(gradients, "auto")
    assert measured(made) == {
        "cast" if spec == "fp16" else "topk" if spec == "topk(ratio=0.01)" else spec for spec in OFFERED
    }
    assert len(made.found) > 1
    assert made.remarks == []


def test_rows_are_measured_by_the_all_gather_too_where_it_can_carry_a_method(gradients):
    variables = [*VARIABLES, Variable("rows", (500, 8), sparse=True)]
    timeline = replace(TIMELINE, ready={**TIMELINE.ready, "rows": 0.0})
    made = planned(gradients, "auto(methods=['fp16', 'powersgd(rank=4)'])", timeline, variables=variables)
    assert {"allreduce, cast, none", "allgather, cast, none"} <= made.problem.costs.codecs.keys()
    assert not any(key.startswith("allgather, powersgd") for key in made.problem.costs.codecs)
    assert made.remarks == []


def test_what_could_not_be_measured_is_told(gradients):
    made = planned(gradients, "auto(methods=['fp16', 'powersgd(rank=200)'])")
    plan, _ = made.explained("none", {"none": 4e-3})
    assert any("powersgd(rank=200)" in remark and "smaller" in remark for remark in plan["remarks"])


def test_ranks_that_compute_longer_are_told(gradients):
    made = planned(gradients, timeline=replace(TIMELINE, forward=0.5), skew=0.49)
    plan, _ = made.explained("none", {})
    assert any("the slowest rank computes 502 ms a step, the fastest 12" in remark for remark in plan["remarks"])
    assert made.found[0].prediction.step == pytest.approx(0.502, rel=0.05)  # waiting for it is no time of the network


def test_tables_are_told_by_their_rows():
    gradients = {v.name: np.zeros(v.shape, np.float32) for v in VARIABLES}
    gradients["w"][::10] = 1.0
    gradients["v"][:] = np.random.default_rng(0).standard_normal((64, 256))
    made = planned(gradients, adaptive=True)
    assert set(made.problem.errors.tables) == {"w"}
    assert made.problem.errors.adaptive


def test_the_reference_is_measured_where_it_is_not_wanted(gradients):
    made = planned(gradients, "auto(methods=['fp16'], reference='powersgd(rank=1)')")
    assert set(made.problem.errors.measured) == {"none", "cast", "powersgd"}
    assert [one.name for one in made.found if "powersgd" in one.name] == []


@pytest.mark.parametrize("quality", ["exact", "half", "unbiased", "feedback"])
def test_every_quality_is_measured(gradients, quality):
    """The reference is of the class feedback, and bounds the errors of methods of other classes too."""
    made = planned(gradients, f"auto(quality={quality!r})")
    assert ("powersgd(rank=4)" in made.problem.errors.measured) == (quality != "exact")
    plans = [plan for one in made.found for plan in one.strategy.plans]
    used = {part.compressor for plan in plans for part in plan.parts}
    assert ("powersgd(rank=4)" in used) == (quality == "feedback")


def test_one_rank_has_nothing_to_exchange():
    with pytest.raises(ConfigError, match="there is one rank"):
        planning_of(ranks=1).measure_links(4e-3)


def test_what_trials_took_is_in_the_plan(gradients):
    made = planned(gradients)
    took = {one.name: 1e-3 * (i + 1) for i, one in enumerate(made.found)}
    plan, line = made.explained(made.found[0].name, took)
    assert [one["measured"] for one in plan["candidates"]] == list(took.values())
    assert line.startswith(f"{made.found[0].name}: 1 ms measured") or made.found[0].baseline


def test_the_line_names_an_outer_plan_that_would_be_much_faster(gradients):
    made = planned(gradients, links=Links(1e3, 1e-3))
    plan, line = made.explained(made.found[0].name, {})
    (remark,) = (remark for remark in plan["remarks"] if "outer=" in remark)
    assert line.endswith(f"; {remark}")
    assert "it changes training, see docs/outer.md" in line
    assert not any("diloco" in one["name"] for one in plan["candidates"])
