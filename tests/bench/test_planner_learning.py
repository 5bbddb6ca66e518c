"""``python -m benchmarks.planner_learning``: what is trained, and what is known already."""

import json
import sys

import pytest

from benchmarks import planner_learning
from grace.bench.lifecycle import BenchmarkRun


def told(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["planner_learning", *words])
    planner_learning.main()


def test_a_run_that_was_stopped_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    trained, out = [], tmp_path / "rows.json"

    def run(settings, out):
        running = BenchmarkRun("train", settings.about(), out)
        if len(trained) == 2:
            running.code, running.message = 130, "interrupted"
        trained.append((settings.task, settings.optimizers))
        for method, quality in (("none", 1.0), ("auto", 1.1)):
            run = {"method": method, "seed": 4, "quality": quality, "curve": [[0, 0, 0.0, 3.0]]}
            running.results.rows.append({"method": method, "quality": quality, "runs": [run]})
        return running

    monkeypatch.setattr(planner_learning.train_command, "run", run)
    words = "--tasks", "Lora", "--seeds", "4", "--epochs", "1", "--out", str(out)
    with pytest.raises(SystemExit, match="grace bench train: interrupted"):
        told(monkeypatch, *words)
    assert len(json.loads(out.read_text())) == 2
    said = capsys.readouterr()
    assert "| Lora | SGD | 1 | 1.1 | 5.0% |" in said.out
    assert "2 of 3 trained; the rest will take about" in said.err
    trained.clear()
    told(monkeypatch, *words)
    assert trained == [("benchmarks.planner_learning:Lora", ["adamw"])]
    assert capsys.readouterr().out.count("| Lora |") == 3
