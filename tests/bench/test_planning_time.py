"""``python -m benchmarks.planning_time``."""

import sys

from benchmarks import planning_time


def test_a_line_says_how_long_each_model_takes(monkeypatch, capsys):
    words = ["--variables", "2", "5", "--ranks", "2", "--bandwidth", "10mbit", "--quality", "half"]
    monkeypatch.setattr(sys, "argv", ["planning_time", *words])
    planning_time.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["2 variables, 2 ranks", "5 variables, 2 ranks"]
    assert all(line.split("; ")[1].startswith("fp16") for line in lines)


def test_the_same_seed_plans_the_same():
    plans = [planning_time.timed(9, methods=["fp16", "topk"], seed=2)[1] for _ in range(2)]
    assert plans[0] == plans[1]
