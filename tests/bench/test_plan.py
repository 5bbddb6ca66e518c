"""``grace bench plan``: what it says of given numbers, and a small run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grace.bench.common.kept import Kept
from grace.bench.common.options import bandwidths
from grace.bench.plan.command import validate
from grace.bench.plan.settings import LINKS, Settings
from grace.bench.plan.tables import markdown
from grace.bench.plan.verdicts import GOALS, corrected, judged, order, totals
from grace.errors import ConfigError
from grace.planner.corrections import Step
from tests.support.limits import HANGS

GRACE = str(Path(sys.executable).with_name("grace"))


def plan(name, predicted, measured, first=None, **said):
    """A row of a scenario, of which nothing is computed and a gather is waited for."""
    step = Step(name, 0.0, {}, {"allgather": predicted / 1e3}, measured / 1e3).to_dict()
    times = {"measured_ms": measured, "first_ms": first or measured}
    return {"name": name, "predicted_ms": predicted, "allowed": True, "tried": True, "chosen": False, "step": step,
            **times, **said}  # fmt: skip


def scenario(*plans, **about):
    return {"model": "m", "ranks": 2, "bandwidth": 1e9, "plans": list(plans), **about}


PLAIN = plan("none", 100.0, 110.0)


def test_pairs_that_hardly_differ_do_not_count():
    assert order([plan("a", 3.0, 10.0), plan("b", 2.0, 10.4)]) == (0, 0)
    assert order([plan("a", 3.0, 10.0), plan("b", 2.0, 10.6)]) == (0, 1)
    assert order([plan("a", 2.0, 10.0), plan("b", 2.0, 12.0)]) == (0, 1)  # a tie is no order
    assert order([plan("a", 2.0, 10.0), plan("b", 3.0, 12.0), plan("c", 4.0, 20.0)]) == (3, 3)


def test_regret_is_beside_the_best_that_could_be_taken():
    lossy = plan("lossy", 40.0, 40.0, allowed=False, tried=False)
    found = judged(scenario(PLAIN, lossy, plan("a", 50.0, 60.0, chosen=True), plan("b", 55.0, 50.0)))
    assert found.chosen == "a"
    assert found.regret == pytest.approx(0.2)
    assert found.measured == "b"
    assert found.regret_measured == 0
    assert found.worst == pytest.approx(50 / 60 - 1, abs=0.34)
    assert found.median == pytest.approx((10 / 110 + 0.1) / 2)


def test_what_is_taken_by_the_steps_of_trials_is_judged_by_all_steps():
    unlucky = plan("a", 50.0, 50.0, first=90.0)
    found = judged(scenario(PLAIN, unlucky, plan("b", 60.0, 75.0, first=70.0)))
    assert found.measured == "b"
    assert found.regret_measured == pytest.approx(0.5)


def test_plain_sums_are_kept_where_nothing_is_faster_by_enough():
    found = judged(scenario(PLAIN, plan("a", 99.0, 108.0)))
    assert (found.chosen, found.measured) == ("none", "none")
    assert found.regret == pytest.approx(110 / 108 - 1)


def test_corrections_come_from_other_steps_on_the_same_links():
    slow = [plan(f"p{i}", 50.0, 100.0) for i in range(30)]
    before, after = corrected([scenario(*slow)])
    assert before == pytest.approx([0.5] * 30)
    assert max(after) < 0.05
    one = scenario(plan("p", 50.0, 100.0))
    elsewhere = scenario(*slow, bandwidth=1e8)
    assert corrected([one, elsewhere])[1][0] == pytest.approx(0.5)  # its own step does not count


def test_totals_and_tables():
    given = [scenario(PLAIN, plan("planned: a (1)", 50.0, 60.0, chosen=True)), scenario(PLAIN, bandwidth=None)]
    found = totals(given)
    assert found.plans == 3
    assert found.order == 1.0
    assert found.median == pytest.approx(1 / 11)
    assert found.methods == pytest.approx({"none": -1 / 11, "planned": -1 / 6})
    assert found.holds("worst")
    assert all(found.holds(goal) for goal in GOALS)
    text = markdown(given, found)
    assert "| m | 1 Gbit/s | 2 | 2 | 13% | 17% | 1/1 | 0.0% | 0.0% | planned: a (1) |" in text
    assert "| m | loopback | 2 | 1 |" in text
    assert "(missed)" not in text
    assert "| planned | -17% |" in text


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"models": ["vgg"]}, "unknown model 'vgg'; known: transformer, "),
        ({"ranks": [1]}, "--ranks must be between 2 and 1000, not 1: one rank exchanges nothing"),
        ({"methods": ["topq"]}, "did you mean 'topk'"),
        ({"models": []}, "there are no models"),
        ({"rounds": 0}, "--rounds must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_is_refused(said, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**said)
    assert bandwidths(LINKS) == [None, 1e10, 1e9, 1e8]


def test_a_mistake_is_one_line_before_anything_starts(tmp_path):
    (tmp_path / "kept.jsonl").write_text("{}\n")
    args = ["bench", "plan", "--out", "kept.jsonl", "--resume"]
    done = subprocess.run([GRACE, *args], capture_output=True, text=True, timeout=HANGS, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "kept.jsonl, line 1, is no scenario of a benchmark" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.ranks
def test_a_scenario_of_real_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])))
    settings = Settings(["mlp"], [None], [2], ["fp16", "topk(ratio=0.01)"]).quick()
    file = tmp_path / "kept" / "plans.jsonl"
    found = validate(settings, file)
    (kept,) = Kept(file).read()
    plans = {plan["name"]: plan for plan in kept["plans"]}
    assert next(iter(plans)) == "none"
    named = {"fp16", "topk(ratio=0.01)", "qsgd, scatter_reduce", "size_threshold(compressor=topk(ratio=0.01))"}
    assert named < set(plans)
    assert kept["missing"] == {}
    for plan in plans.values():
        assert plan["predicted_ms"] > 0
        assert plan["measured_ms"] > 0
        assert plan["measured_bytes"] == pytest.approx(plan["predicted_bytes"], rel=0.02)
    assert sum(plan["chosen"] for plan in plans.values()) == 1
    assert found.plans == len(plans)
    before = file.read_text()
    assert validate(settings, file, resume=True) == found
    assert file.read_text() == before
    assert json.loads(before)["calibration"]["codecs"]
