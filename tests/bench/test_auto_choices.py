"""``python -m benchmarks.auto_choices``: what it says of given numbers, and a small run of it."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.auto_choices import judge, order, show_all
from tests.support.command import benchmark


def plan(name, predicted, measured, **said):
    """A row of a scenario."""
    times = {"predicted_ms": predicted, "measured_ms": measured, "turns_ms": [measured, measured]}
    return {"name": name, "allowed": True, "single": True, "chosen": False, **times, **said}


def scenario(*plans, **about):
    known = {"model": "m", "ranks": 2, "bandwidth": 1e9, "settled": 56, "uncompressed": 12, "planning": 0.5}
    return {**known, "missing": {}, "plans": list(plans), **about, **judge(plans)}


PLAIN = plan("none", 100.0, 110.0)


def test_pairs_that_hardly_differ_do_not_count():
    assert order([plan("a", 3.0, 10.0), plan("b", 2.0, 10.9)]) == (0, 0)
    assert order([plan("a", 3.0, 10.0), plan("b", 2.0, 11.1)]) == (0, 1)
    assert order([plan("a", 2.0, 10.0), plan("b", 2.0, 12.0)]) == (0, 1)  # a tie is no order
    assert order([plan("a", 2.0, 10.0), plan("b", 3.0, 12.0), plan("c", 4.0, 20.0)]) == (3, 3)


def test_regret_is_beside_the_best_that_could_be_taken():
    lossy = plan("lossy", 40.0, 40.0, allowed=False)
    mixed = plan("planned: b", 55.0, 48.0, single=False)
    found = judge([PLAIN, lossy, plan("a", 50.0, 60.0, chosen=True), plan("b", 55.0, 50.0), mixed])
    assert (found["chosen"], found["step_ms"]) == ("a", 60.0)
    assert found["regret"] == pytest.approx(60 / 48 - 1)
    assert found["to_plain"] == pytest.approx(60 / 110)
    assert found["to_single"] == pytest.approx(60 / 50)
    assert judge([PLAIN, plan("a", 99.0, 120.0)])["chosen"] == "none"


def test_noise_is_no_regret():
    """Two plans are equal, and another one of them is the faster one in each round."""
    chosen = plan("a", 50.0, 52.0, chosen=True, turns_ms=[50.0, 55.0, 50.0, 55.0])
    other = plan("b", 50.0, 50.0, turns_ms=[55.0, 50.0, 55.0, 50.0])
    assert judge([PLAIN, chosen, other])["regret"] == 0.0
    assert judge([PLAIN, chosen])["regret"] == 0.0


def test_turns_of_one_round_are_compared():
    chosen = plan("a", 50.0, 70.0, chosen=True, turns_ms=[50.0, 100.0, 50.0, 100.0])
    best = plan("b", 50.0, 60.0, turns_ms=[40.0, 80.0, 40.0, 80.0])
    assert judge([PLAIN, chosen, best])["regret"] == pytest.approx(0.25)


def test_a_table_has_all_scenarios_and_their_regret():
    given = [
        scenario(PLAIN, plan("planned: a", 50.0, 60.0, chosen=True, single=False)),
        scenario(PLAIN, plan("b", 90.0, 100.0), bandwidth=None, settled=70),
    ]
    console = Console(file=io.StringIO(), width=80)
    show_all(console, given)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "m, 2 ranks at 1gbit 1/1 0.0% 0.55 0.55 56 0.5 s" in lines
    assert "m, 2 ranks on loopback 0/0 10.0% 1.00 1.10 70 0.5 s" in lines
    assert "Regret: median 5.0%, worst 10.0%." in lines


SMALL = """
import torch
from grace.planner import auto_planner

def net():
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.01
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    return model, lambda model: model(torch.ones(8, 64)).square().mean(), 8
"""


@pytest.mark.ranks
def test_a_scenario_of_real_ranks(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    words = ["--models", "small:net", "-n", "2", "--methods", "fp16,topk(ratio=0.01)", "--rounds", "2"]
    out = benchmark("auto_choices", *words, "--seconds", "0.02", "--out", "new.json", folder=tmp_path)
    (kept,) = json.loads((tmp_path / "new.json").read_text())["rows"]
    assert "small:net, 2 ranks on loopback" in out
    plans = {plan["name"]: plan for plan in kept["plans"]}
    assert next(iter(plans)) == "none"
    assert {"fp16", "topk(ratio=0.01)"} < set(plans)
    assert kept["missing"] == {}
    for plan in plans.values():
        assert plan["predicted_ms"] > 0
        assert plan["measured_ms"] > 0
        assert len(plan["turns_ms"]) >= 2
    assert sum(plan["chosen"] for plan in plans.values()) == 1
    assert kept["settled"] <= 60  # steps
    assert kept["uncompressed"] <= 15
    assert kept["planning"] > 0
    assert "largest part of a variable's bound" in kept["plan"]
