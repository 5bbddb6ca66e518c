"""``python -m benchmarks.pipeline_cuts``: what it says of given numbers, and a small run of it."""

import json
import sys

import pytest
import torch

from benchmarks import pipeline_cuts
from benchmarks.pipeline_cuts import CHOSEN, judge, merged, verdict
from benchmarks.pipeline_models import MODELS, cuttable
from tests.support.command import benchmark


def cut(name, end, predicted, measured, replicas=(1, 1)):
    ends = [end] if end else []
    return {"name": name, "ends": ends, "replicas": list(replicas), "predicted_ms": predicted, "measured_ms": measured}


CUTS = [
    cut(CHOSEN, "b", 9.0, 11.0), cut("after a", "a", 8.0, 8.0), cut("after b", "b", 9.0, 10.0),
    cut("equal layers", "c", 20.0, 25.0),
]  # fmt: skip


def test_a_cut_that_several_names_have_is_one():
    assert [one["names"] for one in merged(CUTS)] == [[CHOSEN, "after b"], ["after a"], ["equal layers"]]
    assert merged(CUTS)[0]["measured_ms"] == 10.0


def test_regret_is_beside_the_fastest():
    found = judge(CUTS)
    assert found["step_ms"] == 10.0
    assert found["regret"] == pytest.approx(0.25)
    assert found["error"] == pytest.approx(-0.1)
    assert found["by_hand"] == {"equal layers": 25.0, "equal parameters": None, "equal time": None}
    assert "takes 25.0% longer than the fastest, after a" in verdict(found)


def test_other_shares_of_ranks_are_other_cuts():
    others = [cut("2", None, 1.0, 2.0, (2,)), cut("1-1", "a", 1.0, 1.5)]
    assert judge([cut(CHOSEN, "a", 1.0, 1.0), *others])["regret"] == 0
    assert len(merged(others)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_have_a_loss(name):
    made = cuttable(name)
    inputs = made.inputs if isinstance(made.inputs, tuple) else (made.inputs,)
    with torch.no_grad():
        assert made.loss(made.model(*inputs), made.target).isfinite()


SMALL = """
import torch

def net():
    x = torch.ones(8, 16)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return torch.nn.Sequential(*layers), x, torch.zeros(8, 16), torch.nn.functional.mse_loss
"""


def test_stages_that_do_not_divide_the_ranks_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pipeline_cuts", "-n", "4", "--stages", "3"])
    with pytest.raises(SystemExit):
        pipeline_cuts.main()
    assert "error: --stages must divide the ranks, and 3 does not" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_small_run(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    words = ["--models", "small:net", "--rounds", "1", "--blocks", "4", "--seconds", "0.02", "--out", "new.json"]
    out = benchmark("pipeline_cuts", *words, folder=tmp_path)
    assert "small:net, 2 ranks on loopback, none" in out
    (found,) = json.loads((tmp_path / "new.json").read_text())["rows"]
    names = [one["name"] for one in found["cuts"]]
    assert names[0] == CHOSEN
    assert sum(name.startswith("after ") for name in names) == 3
    assert all(one["measured_ms"] > 0 and one["predicted_ms"] > 0 for one in found["cuts"])
    assert found["cuts"][0]["replicas"] == [1, 1]
