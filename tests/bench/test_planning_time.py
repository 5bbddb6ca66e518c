"""``python -m benchmarks.planning_time``."""

import sys

import pytest

from benchmarks import planning_time


def told(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["planning_time", *words])
    planning_time.main()


def test_a_line_says_how_long_each_model_takes(monkeypatch, capsys):
    told(monkeypatch, "--variables", "2", "5", "--ranks", "2", "--bandwidth", "10mbit", "--quality", "half")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["2 variables, 2 ranks", "5 variables, 2 ranks"]
    assert all(line.split("; ")[1].startswith("fp16") for line in lines)


def test_the_same_seed_plans_the_same():
    plans = [planning_time.timed(9, methods=["fp16", "topk"], seed=2)[1] for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("words", [["--variables", "0"], ["--ranks", "0"], ["--bandwidth", "slow"]], ids=str)
def test_mistakes_are_refused(monkeypatch, words, capsys):
    with pytest.raises(SystemExit):
        told(monkeypatch, *words)
    assert "error: " in capsys.readouterr().err
