"""``grace bench pipeline``: what it says of given numbers, and a small run of it."""

import json

import pytest
import torch
import typer

from grace.bench.common.ending import WorkerError
from grace.bench.pipeline import pipeline_command
from grace.bench.pipeline.cut_verdicts import CHOSEN, judge, markdown, merged, verdict_words
from grace.bench.pipeline.pipeline_command import KNOWN, SWEEP, PipelineSettings
from grace.bench.ranks import sweep
from grace.bench.workloads.pipelines import MODELS, cuttable
from tests.support.command import grace_command


def cut(name, end, predicted, measured, replicas=(1, 1)):
    ends = [end] if end else []
    return {"name": name, "ends": ends, "replicas": list(replicas), "predicted_ms": predicted, "measured_ms": measured}


def scenario(*cuts):
    return {"model": "m", "ranks": 2, "bandwidth": 1e9, "compressor": "none", "cuts": list(cuts)}


SOME = scenario(
    cut(CHOSEN, "b", 9.0, 11.0), cut("after a", "a", 8.0, 8.0), cut("after b", "b", 9.0, 10.0),
    cut("equal layers", "c", 20.0, 25.0),
)  # fmt: skip


def test_a_cut_that_several_names_have_is_one():
    assert [one["names"] for one in merged(SOME["cuts"])] == [[CHOSEN, "after b"], ["after a"], ["equal layers"]]
    assert merged(SOME["cuts"])[0]["measured_ms"] == 10.0


def test_regret_is_beside_the_fastest():
    found = judge(SOME)
    assert found.planned == 10.0
    assert found.regret == pytest.approx(0.25)
    assert found.error == pytest.approx(-0.1)
    assert found.by_hand == {"equal layers": 25.0, "equal parameters": None, "equal time": None}
    assert "takes 25.0% longer than the fastest, after a" in verdict_words(SOME)
    assert "| 10.0 | -10% | 25.0% | 2.50 | - | - |" in markdown([SOME])


def test_other_shares_of_ranks_are_other_cuts():
    found = judge(scenario(cut(CHOSEN, "a", 1.0, 1.0), cut("2", None, 1.0, 2.0, (2,)), cut("1-1", "a", 1.0, 1.5)))
    assert found.regret == 0
    assert len(merged(scenario(cut("2", None, 1.0, 2.0, (2,)), cut("1-1", "a", 1.0, 1.5))["cuts"])) == 2


def test_a_file_goes_on_with_other_numbers_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "run_scenario", lambda *given: {"cuts": SOME["cuts"], "missing": {}})
    for ranks in (2, 4, 2):
        found = SWEEP.run(PipelineSettings(models=["mlp"], ranks=ranks), tmp_path / "found.jsonl", resume=True)
    assert [one["ranks"] for one in found] == [2, 4]


def test_a_file_stays_until_something_is_measured(tmp_path, monkeypatch):
    def fail(*given):
        raise WorkerError("the ranks failed")

    file, settings = tmp_path / "found.jsonl", PipelineSettings(models=["mlp"])
    monkeypatch.setattr(sweep, "run_scenario", lambda *given: {"cuts": SOME["cuts"], "missing": {}})
    SWEEP.run(settings, file)
    before = file.read_text()
    SWEEP.run(settings, file)
    assert len(file.read_text().splitlines()) == 1  # it replaces the earlier run's
    monkeypatch.setattr(sweep, "run_scenario", fail)
    with pytest.raises(typer.Exit):
        SWEEP.run(settings, file)
    assert json.loads(file.read_text())["cuts"] == json.loads(before)["cuts"]


def test_what_a_user_gives_counts_with_quick_too(monkeypatch):
    seen = []
    monkeypatch.setattr(sweep.Sweep, "run", lambda self, settings, *given: seen.append(settings))
    grace_command("bench", "pipeline", "--quick", "--rounds", "5", "--bandwidth", "1gbit")
    assert (seen[0].rounds, seen[0].blocks, seen[0].bandwidths, seen[0].stages) == (5, 4, [1e9], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_models_have_a_loss(name):
    assert set(KNOWN) == set(MODELS)
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


@pytest.mark.ranks
def test_a_small_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_command, "QUICK", {"rounds": 1, "blocks": 4, "seconds": 0.02})
    (tmp_path / "small.py").write_text(SMALL)
    args = ("bench", "pipeline", "--models", "small:net", "--quick", "--out", "found.jsonl")
    code, _, err = grace_command(*args, folder=tmp_path)
    assert code == 0, err
    found = json.loads((tmp_path / "found.jsonl").read_text())
    names = [one["name"] for one in found["cuts"]]
    assert names[0] == CHOSEN
    assert sum(name.startswith("after ") for name in names) == 3
    assert all(one["measured_ms"] > 0 and one["predicted_ms"] > 0 for one in found["cuts"])
    assert found["cuts"][0]["replicas"] == [1, 1]
    _, again, _ = grace_command(*args, "--resume", folder=tmp_path)
    assert "measuring" not in again
    assert "All 1 scenarios, 1 of them measured before" in again
    assert "| small:net | loopback | 2 | none |" in again
