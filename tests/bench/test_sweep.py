"""``grace bench plan`` and ``pipeline``: their common life cycle, on given numbers."""

import json

import pytest

from grace.bench.common.ending import WorkerError
from grace.bench.common.results import load
from grace.bench.ranks import sweep
from grace.bench.report import pipeline_table, plan_table
from tests.bench.test_pipeline import CUTS
from tests.bench.test_plan import PLAIN, plan
from tests.support.command import grace_command

SETTLED = {"settled": 56, "uncompressed": 12, "planning": 0.5, "missing": {"zip": "cannot serve"}}
PLANS = [PLAIN, plan("fp16", 50.0, 60.0, chosen=True)]
FOUND = {
    "plan": {**SETTLED, "plans": PLANS, **plan_table.judge(PLANS)},
    "pipeline": {"missing": {}, "cuts": CUTS, **pipeline_table.judge(CUTS)},
}
KINDS = pytest.mark.parametrize("kind", FOUND)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in place of whose ranks a function stands, at 80 columns."""

    def call(kind, *args, ranks=None):
        monkeypatch.setattr(sweep, "run_scenario", ranks or (lambda *given: FOUND[kind]))
        return grace_command("bench", kind, "--models", "mlp", "-n", "2", "--bandwidth", *args, folder=tmp_path)

    return call


@KINDS
def test_every_scenario_is_a_row(kind, run, tmp_path):
    code, out, err = run(kind, "1gbit,none")
    assert (code, err) == (0, "")
    saved = load(tmp_path / "out" / kind)
    assert (saved.kind, saved.complete) == (kind, True)
    assert [(row["model"], row["bandwidth"]) for row in saved.rows] == [("mlp", 1e9), ("mlp", None)]
    assert saved.rows[0].items() >= FOUND[kind].items()
    assert {path.name for path in (tmp_path / "out" / kind).iterdir()} == {"results.json", "results.csv", "report.html"}
    assert "mlp, 2 ranks at 1gbit" in (tmp_path / "out" / kind / "report.html").read_text()
    assert f"Wrote results.json, results.csv and report.html to out/{kind}" in out
    assert ("Left out: zip: cannot serve" in out) == (kind == "plan")


@KINDS
def test_a_run_that_is_resumed_measures_what_is_new(kind, run, tmp_path):
    assert run(kind, "1gbit", "--out", "kept")[0] == 0
    _, out, _ = run(kind, "1gbit,none", "--out", "kept", "--resume")
    assert "2 ranks at 1gbit (" not in out
    assert "2 ranks on loopback" in out.replace("\n", " ")
    assert [row["bandwidth"] for row in load(tmp_path / "kept").rows] == [1e9, None]
    run(kind, "none", "--out", "kept")  # without --resume it replaces the earlier run's
    assert [row["bandwidth"] for row in load(tmp_path / "kept").rows] == [None]


@KINDS
@pytest.mark.parametrize(("failure", "ends"), [(WorkerError("the ranks failed"), 1), (KeyboardInterrupt(), 130)])
def test_what_is_finished_stays(kind, failure, ends, run, tmp_path):
    def fail(program, settings, others, ranks, rate, on_event):
        if rate is None:
            raise failure
        return FOUND[kind]

    before = run(kind, "10gbit", "--out", "kept")
    assert run(kind, "none,1gbit", "--out", "kept", ranks=fail)[0] == ends
    assert [row["bandwidth"] for row in load(tmp_path / "kept").rows] == [1e10], before  # nothing was measured
    code, out, err = run(kind, "1gbit,none", "--out", "kept", ranks=fail)
    assert code == ends
    assert "what is finished is in kept" in err
    assert "2 ranks at 1gbit" in out
    saved = load(tmp_path / "kept")
    assert ([row["bandwidth"] for row in saved.rows], saved.complete) == ([1e9], False)


@KINDS
def test_two_runs_are_compared(kind, run, tmp_path):
    run(kind, "1gbit", "--out", "a")
    slower = {**FOUND[kind], "step_ms": 2 * FOUND[kind]["step_ms"]}
    run(kind, "1gbit", "--out", "b", ranks=lambda *given: slower)
    code, out, err = grace_command("bench", "compare", "a", "b", "--fail-if-slower", "50", folder=tmp_path)
    assert code == 1
    assert "slower by 100.0 %: mlp (2 ranks, 1 Gbit/s" in err
    assert "1 slower" in out


def test_results_of_another_benchmark_are_not_resumed(run, tmp_path):
    run("plan", "1gbit", "--out", "kept")
    code, _, err = run("pipeline", "1gbit", "--out", "kept", "--resume")
    assert (code, "kept has results of plan, not of pipeline" in err.replace("\n", " ")) == (2, True)
    file = tmp_path / "kept" / "results.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "rows": [{"model": "mlp", "ranks": 2, "bandwidth": None}]}))
    code, _, err = run("plan", "1gbit", "--out", "kept", "--resume")
    assert (code, "is damaged, or of another kind" in err) == (2, True)


def test_what_a_user_gives_counts_with_quick_too(run):
    seen = []

    def ranks(program, settings, *given):
        seen.append(settings)
        return FOUND["pipeline"]

    run("pipeline", "1gbit", "--quick", "--rounds", "5", ranks=ranks)
    assert (seen[0].rounds, seen[0].blocks, seen[0].bandwidths, seen[0].stages) == (5, 4, [1e9], 2)
