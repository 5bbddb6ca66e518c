"""Measurements whose rows are scenarios: what is kept, and what a second call measures, on given numbers."""

import json
import sys

import pytest

from benchmarks import auto_choices, pipeline_cuts, scenarios
from grace.bench.common.ending import WorkerError
from tests.bench.test_auto_choices import PLAIN, plan
from tests.bench.test_pipeline_cuts import CUTS

PLANS = [PLAIN, plan("fp16", 50.0, 60.0, chosen=True)]
SETTLED = {"settled": 56, "uncompressed": 12, "planning": 0.5, "missing": {"zip": "cannot serve"}}
FOUND = {
    auto_choices: {**SETTLED, "plans": PLANS, **auto_choices.judge(PLANS)},
    pipeline_cuts: {"missing": {}, "cuts": CUTS, **pipeline_cuts.judge(CUTS)},
}
SCRIPTS = pytest.mark.parametrize("script", FOUND, ids=lambda script: script.__name__)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script in place of whose ranks a function stands; return what it prints."""

    def call(script, bandwidth, ranks=None, more=()):
        words = ["--models", "mlp", "-n", "2", "--bandwidth", bandwidth, *more]
        words += ["--out", str(tmp_path / "new" / "rows.json")]
        monkeypatch.setattr(sys, "argv", ["script", *words])
        monkeypatch.setattr(scenarios, "run_scenario", ranks or (lambda *given: FOUND[script]))
        script.main()
        return capsys.readouterr().out

    return call


def rows(tmp_path):
    return json.loads((tmp_path / "new" / "rows.json").read_text())["rows"]


@SCRIPTS
def test_every_scenario_is_a_row_and_a_second_call_measures_what_is_new(script, run, tmp_path):
    out = run(script, "1gbit")
    assert "mlp, 2 ranks at 1gbit" in out
    assert ("Left out: zip: cannot serve" in out) == (script is auto_choices)
    measured = []

    def ranks(program, settings, others, count, rate, on_event):
        measured.append((program, others, count, rate))
        return FOUND[script]

    assert "rows.json has is not measured again." in run(script, "1gbit,none", ranks)
    others = ["mlp"] if script is auto_choices else ["mlp", "none"]
    assert measured == [(["-m", script.__name__], others, 2, None)]
    assert [(row["model"], row["bandwidth"]) for row in rows(tmp_path)] == [("mlp", 1e9), ("mlp", None)]
    assert rows(tmp_path)[0].items() >= FOUND[script].items()


@SCRIPTS
def test_rows_that_were_measured_otherwise_are_not_taken_for_those_of_this_call(script, run, tmp_path):
    run(script, "1gbit")
    with pytest.raises(SystemExit, match=r"was measured with --rounds 3, not 5: name another file by --out"):
        run(script, "1gbit", more=["--rounds", "5"])
    assert len(rows(tmp_path)) == 1


@SCRIPTS
def test_what_is_finished_stays(script, run, tmp_path):
    def fail(program, settings, others, count, rate, on_event):
        if rate is None:
            raise WorkerError("the ranks failed")
        return FOUND[script]

    with pytest.raises(SystemExit, match=r"mlp, 2 ranks on loopback.*: the ranks failed"):
        run(script, "1gbit,none", fail)
    assert [row["bandwidth"] for row in rows(tmp_path)] == [1e9]
