"""``python -m benchmarks.planner_learning``: what is trained, and what is known already."""

import json
import sys

import pytest

from benchmarks import planner_learning


def told(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["planner_learning", *words])
    planner_learning.main()


def test_a_run_that_was_stopped_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    trained, out = [], tmp_path / "rows.json"

    def run(settings, results, watch):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append((settings.task, settings.optimizers))
        for method, quality in (("none", 1.0), ("auto", 1.1)):
            run = {"method": method, "seed": 4, "quality": quality, "curve": [[0, 0, 0.0, 3.0]]}
            watch(None, {"run": run})
            results.rows.append({"method": method, "quality": quality, "runs": [run]})

    monkeypatch.setattr(planner_learning.train_command, "train", run)
    words = "--tasks", "Lora", "--seeds", "4", "--epochs", "1", "--out", str(out)
    with pytest.raises(KeyboardInterrupt):
        told(monkeypatch, *words)
    assert len(json.loads(out.read_text())) == 2
    said = capsys.readouterr()
    assert "| Lora | SGD | 1 | 1.1 | 5.0% |" in said.out
    assert "Lora, SGD, auto, seed 4: 1.1" in said.err
    assert "2 of 3 trained; the rest will take about" in said.err
    trained.clear()
    told(monkeypatch, *words)
    assert trained == [("benchmarks.planner_learning:Lora", ["adamw"])]
    assert capsys.readouterr().out.count("| Lora |") == 3
