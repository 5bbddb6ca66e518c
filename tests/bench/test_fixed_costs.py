"""``python -m benchmarks.fixed_costs``."""

import json
import sys

import pytest

import grace
from benchmarks import fixed_costs
from grace.bench.step.step_settings import BOUND

SETTINGS = {"methods": ["none", "topk(ratio=0.1)"], "rounds": 2, "steps": 2, "variables": 4, "elements": 50}


@pytest.mark.usefixtures("local")
def test_each_contestant_is_measured_in_each_case():
    rows = fixed_costs.measure(SETTINGS, grace.init())
    names = [BOUND, *SETTINGS["methods"]]
    cases = [(fixed_costs.SMALL, 19_450), (fixed_costs.MANY, 200), (fixed_costs.ONE, 200)]
    expected = [(case, elements, name) for case, elements in cases for name in names]
    assert [(row["case"], row["elements"], row["name"]) for row in rows[:-1]] == expected
    for row in rows[:-1]:
        assert ("codec_us" in row) is (row["name"] != BOUND)
        assert 0 < row["least_step_us"] <= row["step_us"]
        assert 0 < row["least_cpu_us"] <= row["cpu_us"]
        assert row.get("codec_us", 0) <= row["step_us"]
    assert rows[-1]["elements"] == 200


def test_what_exchange_costs_is_told_beside_the_step_without_one(monkeypatch, capsys, tmp_path):
    def row(case, name, step, cpu, **more):
        return {"case": case, "elements": 3000, "name": name, "step_us": step, "cpu_us": cpu, **more}

    rows = [
        row(fixed_costs.SMALL, BOUND, 210, 200), row(fixed_costs.SMALL, "none", 700, 500, codec_us=40),
        row(fixed_costs.MANY, BOUND, 3000, 3000), row(fixed_costs.MANY, "none", 9000, 8000, codec_us=600),
        row(fixed_costs.ONE, BOUND, 1000, 1000), row(fixed_costs.ONE, "none", 4500, 3000, codec_us=200),
        {"case": fixed_costs.COPY, "elements": 3000, "name": fixed_costs.COPY, "step_us": 10.0},
    ]  # fmt: skip
    asked = []
    monkeypatch.setattr(fixed_costs, "run", lambda settings: asked.append(settings) or rows)
    monkeypatch.setenv("COLUMNS", "120")
    words = ["--methods", "none", "--variables", "3", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["fixed_costs", *words])
    fixed_costs.main()
    out = capsys.readouterr().out
    cells = [line.replace("│", " ").replace(",", " ").split() for line in out.splitlines() if "│ none" in line]
    assert cells == [
        ["none", "700", "500", "300", "40"],
        ["none", "9.00", "4.50", "2.0", "5.00", "2.00", "2.5", "0.60", "0.20", "3.0"],
    ]
    assert (asked[0]["methods"], asked[0]["variables"], asked[0]["ranks"]) == (["none"], 3, 2)
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows


@pytest.mark.ranks
def test_ranks_are_started_and_measured_beside_ddp():
    rows = fixed_costs.run({**SETTINGS, "methods": ["none"], "rounds": 1, "ranks": 1})
    assert [row["name"] for row in rows[:3]] == [BOUND, "DDP", "none"]
