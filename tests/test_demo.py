"""``grace demo``, run as a user does, and ``grace bench all``, of which it is the quick preset."""

import os
import re
import subprocess
import sys

import pytest

from grace.bench import all as all_command
from grace.bench.common import results as record
from grace.bench.link.emulation import possible
from tests.support.limits import HANGS

pytestmark = pytest.mark.ranks

METHODS = ("none", "block(bits=4)")
FEWER = f"""
from functools import partial
from grace.bench import all as everything
from grace.bench.step import step_settings as step
from grace.bench.workloads.torch_tasks import DigitsCNN
everything.AllSettings = partial(everything.AllSettings, model="mlp")
step.QUICK_METHODS = {METHODS}
step.QUICK_ROUNDS = 1
DigitsCNN.quick_epochs = 3
from grace.cli.main import main
main()
"""
"""``grace`` with a small model, few methods, rounds and epochs: the whole demo takes minutes of both cores."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demo at 80 columns: (stdout, stderr, folder)."""
    out = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-c", FEWER, "demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, out


def test_the_demo_answers_three_questions_and_ends_with_a_verdict_and_a_report(shown):
    out, err, folder = shown
    assert err == ""
    questions = re.findall(r"^(\d)\. (.*\?)", out, re.MULTILINE)
    assert [number for number, _ in questions] == ["1", "2", "3"]
    _, conclusion = out.split("\nIn short\n")
    assert re.search(r"With 2 ranks .*: (Do not compress|Compress): ", " ".join(conclusion.split()))
    assert f"is {folder / 'report.html'} (" in conclusion.splitlines()[-1]
    wide = [line for line in out.splitlines() if len(line) > 80 and str(folder) not in line]
    assert wide == []


def test_the_demo_keeps_the_results_of_its_parts(shown):
    *_, folder = shown
    kinds = {name: record.load(folder / name) for name in ("kernels", "step", "train")}
    assert all(results.kind == name and results.complete for name, results in kinds.items())
    methods = {row["method"] for row in kinds["step"].rows} - {None}
    assert methods == set(METHODS)
    (rate,) = {row["bandwidth"] for row in kinds["step"].rows}
    assert rate == (None if possible() else 1e9)
    assert max(row["quality"] for row in kinds["train"].rows) < 1.0  # 2.3 at first
    assert kinds["step"].settings["shortfalls"] == {row["method"]: row["shortfall"] for row in kinds["train"].rows}
    text = (folder / "report.html").read_text()
    assert text.count("<img") >= 4
    for name in (*METHODS, "captured"):
        assert name in text


def test_where_no_link_can_be_emulated_the_demo_says_so_and_uses_the_loopback(monkeypatch):
    monkeypatch.setattr(all_command, "possible", lambda: "it needs root")
    rates, note = all_command._bandwidths(None, quick=True)
    assert rates == [None]
    assert "cannot be emulated here: it needs root" in note
    assert all_command._bandwidths([1e9], quick=True) == ([1e9], "")  # what was asked for is not replaced


def trained(**shortfalls):
    """Results of methods that were trained with two optimizers; each shortfall is that under the second one."""
    rows = [{"method": name, "shortfall": 0.01} for name in shortfalls]
    return record.Results("train", {}, rows + [{"method": name, "shortfall": s} for name, s in shortfalls.items()])


def test_the_verdict_counts_the_optimizer_under_which_a_method_learns_least():
    assert all_command._shortfalls(trained(none=0.0, topk=0.4, qsgd=None)) == {"none": 0.01, "topk": 0.4, "qsgd": 0.01}
    assert all_command._shortfalls(trained(topk=0.4)) is None  # there is nothing to compare with


def test_an_interrupted_run_of_all_keeps_the_parts_that_are_finished(tmp_path):
    command = [sys.executable, "-c", FEWER, "bench", "all", "--quick", "--bandwidth", "none", "--methods", "none"]
    command += ["--model", "mlp", "--task", "digits", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for beginning in ("2. ", "measuring 2 ranks"):  # of the steps
        next(line for line in process.stdout if line.startswith(beginning))
    process.terminate()
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert err.startswith("grace bench all: interrupted")
    assert [record.load(tmp_path / name).complete for name in ("train", "step")] == [True, False]
    assert not (tmp_path / "kernels").exists()
    assert "interrupted" in (tmp_path / "report.html").read_text()
