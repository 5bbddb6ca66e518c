"""What ``auto`` measures between two steps, in which order, and for how long; over ranks that are pretended."""

import re
import time
from dataclasses import replace

import numpy as np
import pytest

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner import planning
from grace.planner.asked import asked
from grace.planner.calibration import Calibration, Key, default_path, read
from grace.planner.mirror import Mirror
from grace.planner.network import Links
from grace.planner.planning import USUAL, Planning, measured
from grace.planner.promise import by_promise
from grace.planner.step import Timeline
from grace.strategy.choices import Choices

VARIABLES = [Variable("w", (256, 128)), Variable("v", (64, 256)), Variable("b", (64,))]
TIMELINE = Timeline({"w": 2e-3, "v": 1e-3, "b": 0.0}, forward=1e-3, backward=2e-3)


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


def planning_of(strategy="auto"):
    return Planning(asked(Choices(strategy=strategy)), Mirror(2), lambda: ["a", "b"], VARIABLES, "numpy", 1)


def order(bandwidth, methods=USUAL, first=("none",), variables=VARIABLES):
    return by_promise(methods, variables, TIMELINE, Links(bandwidth, 1e-6), ["a", "b"], first)


def test_slow_links_want_few_bytes_and_fast_ones_little_computing():
    slow, fast = order(1e4), order(1e12)
    assert sorted(slow) == sorted(fast) == sorted(USUAL)
    assert slow.index("topk(ratio=0.001)") < slow.index("topk(ratio=0.05)") < slow.index("fp16")
    assert fast[:2] == ["none", "fp16"]


def test_some_come_first_whatever_they_promise():
    assert order(1e12, first=("none", "powersgd(rank=4)"))[:2] == ["none", "powersgd(rank=4)"]


def test_what_cannot_carry_rows_comes_last():
    rows = [Variable("words", (100, 8), sparse=True), *VARIABLES]
    line = Timeline({**TIMELINE.ready, "words": 0.0}, backward=2e-3)
    found = by_promise(["signsgd", "topk"], rows, line, Links(1e9, 1e-6), ["a", "b"])
    assert found == ["topk", "signsgd"]


def test_no_other_method_is_begun_when_time_is_up(gradients):
    choices = ["allreduce, none, none", "allgather, qsgd, none", "allgather, topk, residual"]
    codecs, errors, norms = measured(choices, gradients, 2, 0, limit=0.0)
    assert list(codecs) == ["allreduce, none, none"]
    assert list(errors) == ["none"]
    assert set(norms) == set(gradients)


@pytest.mark.parametrize(("limit", "known"), [(1e-9, 1), (60.0, len(USUAL))])
def test_a_plan_is_made_of_what_there_was_time_for(quick, monkeypatch, gradients, limit, known):
    monkeypatch.setattr(planning, "CODECS_SECONDS", limit)
    made = planning_of()
    made.measure(gradients, TIMELINE, 4e-3)
    assert len({key.partition(", ")[2] for key in made.calibration.codecs}) == known
    found = made.candidates()
    assert "none" in [one.name for one in found]
    names = {one.name for one in found}
    assert len(names) > 1 if known > 1 else names == {"none"}
    made.learned({one.name: 1e-3 * (i + 1) for i, one in enumerate(found)})
    plan, line = made.explained(found[0].name, "")
    assert plan
    assert line


def test_what_an_earlier_run_measured_is_known_still(quick, monkeypatch, gradients):
    first, second = planning_of(), planning_of()
    first.measure(gradients, TIMELINE, 4e-3)
    first.candidates()
    first.learned({})
    monkeypatch.setattr(planning, "CODECS_SECONDS", 1e-9)
    second.measure(gradients, TIMELINE, 4e-3)
    assert set(second.calibration.codecs) == set(first.calibration.codecs)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("damage", "said"), [("ranks", "is for another run: it has hosts"),
                                              ("old", "is 40 days old"), ("text", "is not JSON")])  # fmt: skip
def test_what_is_refused_is_told_and_the_users_file_left_alone(
    quick, monkeypatch, tmp_path, gradients, named, damage, said
):
    if not named:
        monkeypatch.delenv("GRACE_CALIBRATION")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = Key.of(Mirror(2), ["a", "b"], "numpy", 1)
    path = default_path(key)
    other = replace(key, ranks=3, hosts=(("a", 3),)) if damage == "ranks" else key
    Calibration(other, time.time() - 40 * 86400 * (damage == "old"), corrections={"allreduce": 3.0}).write(path)
    if damage == "text":
        path.write_text("no calibration")
    before = path.read_text()
    made = planning_of("auto(methods=['fp16'])")
    with pytest.warns(UserWarning, match=f"auto does without it.*{re.escape(str(path))}.*{said}"):
        made.measure(gradients, TIMELINE, 4e-3)
    assert made.calibration.corrections == {}
    made.candidates()
    made.learned({"none": 4e-3})
    assert (path.read_text() == before) == named
    assert named or read(path, key).steps


def test_the_reference_is_measured_where_it_is_not_wanted(quick, gradients):
    made = planning_of("auto(methods=['fp16'], reference='powersgd(rank=1)')")
    made.measure(gradients, TIMELINE, 4e-3)
    assert set(made.problem.errors) == {"none", "cast", "powersgd"}
    assert made.problem.budget == pytest.approx(sum(made.problem.errors["powersgd"].values()))


def test_what_it_takes_is_told():
    few = planning_of("auto(methods=['fp16'])")
    assert few.seconds == pytest.approx(planning.LINK_SECONDS + 6 * planning.CODEC_SECONDS + 0.53)
    longest = planning.LINK_SECONDS + planning.CODECS_SECONDS + planning.CODEC_SECONDS + 0.53
    assert few.seconds < planning_of().seconds == pytest.approx(longest)


def test_one_rank_has_nothing_to_exchange(gradients):
    made = Planning(asked(Choices(strategy="auto")), Mirror(1), lambda: ["a"], VARIABLES, "numpy", 1)
    with pytest.raises(ConfigError, match="there is one rank"):
        made.measure(gradients, TIMELINE, 4e-3)


def test_plans_of_the_same_methods_are_told_apart(quick, gradients):
    """What is tried, what its steps teach, and what is chosen go by names: those of plans that sum otherwise than the
    baseline does too."""
    made = planning_of("auto(quality='exact')")
    made.measure(gradients, TIMELINE, 4e-3)
    costs = replace(made.problem.costs, network=Links(1e9, 1e-3), step=0.0)  # few messages are better
    made.problem = replace(made.problem, costs=costs)
    found = made.candidates()
    names = [one.name for one in found]
    assert len(found) > 1
    assert len(set(names)) == len(names)
    assert next(one for one in found if one.name == "none").baseline
    made.learned({found[0].name: 1e-3})
    assert [one.name for one in made.found if one.measured is not None] == [found[0].name]
    assert len(made.calibration.steps) == 1
