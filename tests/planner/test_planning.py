"""What ``auto`` measures between two steps, in which order, and what it keeps; over ranks that are pretended."""

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner import planning
from grace.planner.calibration import Calibration, Key, default_path, read
from grace.planner.costs import Curve
from grace.planner.default_costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links, MeasuredNetwork
from grace.planner.planning import Planning, by_predicted_step, fitted
from grace.planner.problem import Problem, offers
from grace.planner.simulated_ranks import SimulatedRanks
from grace.planner.step import Timeline
from grace.planner.uniform import uniform_strategy
from grace.strategy.builder import OneNode
from grace.strategy.choices import Choices

VARIABLES = [Variable("w", (256, 128)), Variable("v", (64, 256)), Variable("b", (64,))]
TIMELINE = Timeline({"w": 2e-3, "v": 1e-3, "b": 0.0}, forward=1e-3, backward=2e-3)
OFFERED = [offer.spec for offer in offers() if not offer.tables_only]


@pytest.fixture
def gradients():
    draws = np.random.default_rng(0)
    return {v.name: draws.standard_normal(v.shape).astype(np.float32) for v in VARIABLES}


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Measured briefly, and kept in a file of the test's own."""
    monkeypatch.setattr(planning, "LINK_SECONDS", 0.05)
    monkeypatch.setattr(planning, "CODEC_SECONDS", 0.005)
    monkeypatch.setenv("GRACE_CALIBRATION", str(tmp_path / "calibration.json"))


def planning_of(strategy="auto", ranks=2, **options):
    names = [f"n{rank}" for rank in range(ranks)]
    request = Choices(strategy=strategy).auto_request()
    return Planning(request, SimulatedRanks(ranks), lambda: names, VARIABLES, "numpy", 1, **options)


def prepared(gradients, strategy="auto", plain=4e-3, **options):
    made = planning_of(strategy, **options)
    made.measure_links(plain)
    made.prepare(gradients, TIMELINE, plain)
    return made


def order(bandwidth):
    costs = Costs(Links(bandwidth, 1e-6), DefaultCodecs())
    problem = Problem(VARIABLES, TIMELINE, costs, OneNode(2))
    return [method.compressor for method in by_predicted_step(problem)]


def test_slow_links_want_few_bytes_and_fast_ones_little_computing():
    slow, fast = order(1e4), order(1e12)
    assert len(slow) == len(fast) == len(OFFERED)
    assert slow.index("topk") < slow.index("block(bits=4)") < slow.index("cast") < slow.index("none")
    assert set(fast[:2]) == {"none", "cast"}


def test_the_promising_methods_are_measured_first_and_none_is_dropped(quick, gradients):
    made = prepared(gradients)
    first = {key.split(", ")[1] for key in made.problem.costs.codecs}
    assert {"none", "powersgd(rank=4)"} < first
    assert len(first) <= 4
    assert len(made.candidates()) > 1
    while made.measure_next():
        pass
    assert {key.split(", ")[1] for key in made.problem.costs.codecs} == {
        "cast" if spec == "fp16" else "topk" if spec == "topk(ratio=0.01)" else spec for spec in OFFERED
    }
    assert made.left_out == {}
    names = {one.name: one.strategy.plans for one in made.found}
    for one in made.candidates():  # a plan keeps its name, and a name its plan
        assert names.get(one.name, one.strategy.plans) == one.strategy.plans


def test_rows_are_measured_by_the_all_gather_too_where_it_can_carry_a_method(quick, gradients):
    made = planning_of("auto(methods=['fp16', 'powersgd(rank=4)'])")
    made.variables = [*VARIABLES, Variable("rows", (500, 8), sparse=True)]
    made.measure_links(4e-3)
    made.prepare(gradients, replace(TIMELINE, ready={**TIMELINE.ready, "rows": 0.0}), 4e-3)
    while made.measure_next():
        pass
    assert {"allreduce, cast, none", "allgather, cast, none"} <= made.problem.costs.codecs.keys()
    assert not any(key.startswith("allgather, powersgd") for key in made.problem.costs.codecs)
    assert made.left_out == {}


def test_what_could_not_be_measured_is_told(quick, gradients):
    made = prepared(gradients, "auto(methods=['fp16', 'powersgd(rank=200)'])")
    while made.measure_next():
        pass
    made.candidates()
    made.learned({"none": 4e-3})
    plan, _ = made.explained("none", "")
    assert any("powersgd(rank=200)" in remark and "smaller" in remark for remark in plan["remarks"])


def test_ranks_that_compute_longer_are_told(quick, gradients):
    made = planning_of()
    made.measure_links(4e-3)
    made.prepare(gradients, replace(TIMELINE, forward=0.5), 0.5, skew=0.49)
    made.candidates()
    plan, _ = made.explained("none", "")
    assert any("the slowest rank computes 502 ms a step, the fastest 12" in remark for remark in plan["remarks"])
    assert made.found[0].prediction.step == pytest.approx(0.502, rel=0.05)  # waiting for it is no time of the network


def test_tables_are_told_by_their_rows(quick):
    gradients = {v.name: np.zeros(v.shape, np.float32) for v in VARIABLES}
    gradients["w"][::10] = 1.0
    gradients["v"][:] = np.random.default_rng(0).standard_normal((64, 256))
    made = prepared(gradients, adaptive=True)
    assert set(made.problem.errors.tables) == {"w"}
    assert made.problem.errors.adaptive


def curve(seconds_a_byte):
    return Curve.through([(n, 2e-5 + n * seconds_a_byte) for n in (1e3, 1e5, 1e7)])


@pytest.mark.parametrize("plain", [0.01, 0.03, 0.05, 0.5])
def test_collectives_are_scaled_so_that_a_plain_step_takes_what_it_took(plain):
    costs = Costs(MeasuredNetwork({"allreduce": curve(1e-7)}, 2), DefaultCodecs())
    problem = Problem(VARIABLES, TIMELINE, costs, OneNode(2))
    strategy = uniform_strategy(VARIABLES, 2)
    alone, found = problem.predict(strategy).step, fitted(problem, plain).predict(strategy).step
    assert abs(found - plain) <= abs(alone - plain) + 1e-12
    if 0.5 < plain / alone < 2:
        assert found == pytest.approx(plain, rel=0.05)


def test_what_an_earlier_run_measured_is_kept(quick, gradients):
    first = prepared(gradients)
    while first.measure_next():
        pass
    first.candidates()
    first.learned({})
    second = prepared(gradients, "auto(methods=['fp16'])")
    assert set(second.calibration.codecs) == set(first.calibration.codecs)
    assert {key.split(", ")[1] for key in second.problem.costs.codecs} == {"none", "cast", "powersgd(rank=4)"}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("damage", "said"), [("ranks", "is for another run: it has hosts"),
                                              ("old", "is 40 days old"), ("text", "is not JSON")])  # fmt: skip
def test_what_is_refused_is_told_and_the_users_file_left_alone(
    quick, monkeypatch, tmp_path, gradients, named, damage, said
):
    if not named:
        monkeypatch.delenv("GRACE_CALIBRATION")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = Key.of(SimulatedRanks(2), ["n0", "n1"], "numpy", 1)
    path = default_path(key)
    other = replace(key, ranks=3, hosts=(("a", 3),)) if damage == "ranks" else key
    Calibration(other, time.time() - 40 * 86400 * (damage == "old"), contention=3.0).write(path)
    if damage == "text":
        path.write_text("no calibration")
    before = path.read_text()
    with pytest.warns(UserWarning, match=f"auto does without it.*{re.escape(str(path))}.*{said}"):
        made = prepared(gradients, "auto(methods=['fp16'])")
    made.candidates()
    made.learned({"none": 4e-3})
    assert (path.read_text() == before) == named
    assert named or read(path, key).codecs


def test_the_reference_is_measured_where_it_is_not_wanted(quick, gradients):
    made = prepared(gradients, "auto(methods=['fp16'], reference='powersgd(rank=1)')")
    assert set(made.problem.errors.measured) == {"none", "cast", "powersgd"}
    assert [one.name for one in made.candidates() if "powersgd" in one.name] == []


@pytest.mark.parametrize("quality", ["exact", "half", "unbiased", "feedback"])
def test_every_quality_is_measured(quick, gradients, quality):
    """The reference is of the class feedback, and bounds the errors of methods of other classes too."""
    made = prepared(gradients, f"auto(quality={quality!r})")
    assert ("powersgd(rank=4)" in made.problem.errors.measured) == (quality != "exact")
    assert made.candidates()


def test_one_rank_has_nothing_to_exchange():
    with pytest.raises(ConfigError, match="there is one rank"):
        planning_of(ranks=1).measure_links(4e-3)


def test_what_trials_took_is_in_the_plan(quick, gradients):
    made = prepared(gradients)
    found = made.candidates()
    made.learned({one.name: 1e-3 * (i + 1) for i, one in enumerate(found)})
    plan, line = made.explained(found[0].name, "")
    assert plan["candidates"][0]["measured"] == 1e-3
    assert line.startswith(f"{found[0].name}: 1 ms measured") or found[0].baseline


def test_the_line_names_an_outer_plan_that_would_be_much_faster(quick, gradients):
    made = prepared(gradients)
    made.problem = replace(made.problem, costs=replace(made.problem.costs, network=Links(1e3, 1e-3)))
    found = made.candidates()
    plan, line = made.explained(found[0].name, "")
    (remark,) = (remark for remark in plan["remarks"] if "outer=" in remark)
    assert line.endswith(f"; {remark}")
    assert "it changes training, see docs/outer.md" in line
    assert not any("diloco" in one["name"] for one in plan["candidates"])
