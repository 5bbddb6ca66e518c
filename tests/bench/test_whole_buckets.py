"""``python -m benchmarks.whole_buckets``."""

import sys

import pytest

from benchmarks import whole_buckets

pytest.importorskip("numba", reason="codecs of whole buckets are compiled")


def test_both_ways_are_measured_beside_a_copy(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(
        sys, "argv", ["", "--model", "2000", "--methods", "topk(ratio=0.1),qsgd/residual", "--rounds", "2"]
    )
    whole_buckets.main()
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [(row[0], row[1]) for row in rows] == [
        (method, way) for method in ("topk(ratio=0.1)", "qsgd/residual") for way in ("at", "apart")
    ]
    assert all(float(cell) >= 0 for row in rows for cell in row[-5:])


def test_steps_go_the_way_that_they_are_told():
    for at_once in (True, False):
        steps = whole_buckets.steps_of("topk(ratio=0.1)", [(300,), (20, 20)], at_once)
        for _ in range(2):
            assert min(whole_buckets.timed(steps)) > 0
        assert steps.at_once is at_once
