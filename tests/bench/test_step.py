"""``grace bench step``, run as a user does."""

import math
import re
import subprocess

import pytest
import torch

from grace.bench.common import results as record
from grace.bench.common.progress import ScenarioBars
from grace.bench.kernels import fidelity
from grace.bench.lifecycle import BenchmarkRun
from grace.bench.link.emulation import possible
from grace.bench.ranks import launchers
from grace.bench.step.step_rows import ScenarioRows, compare_with_plain, verdict_text
from grace.bench.step.step_settings import BOUND
from tests.support.bench_runs import interrupted_bench
from tests.support.command import grace_program
from tests.support.engine_pools import command

pytestmark = pytest.mark.ranks

REASON = possible()
linked = pytest.mark.skipif(bool(REASON), reason=f"no link can be emulated here: {REASON}")

WIDE = """
import torch
from grace.planner import auto_planner

def wide():  # 250,000 parameters that cost next to nothing to compute
    model = torch.nn.Linear(1000, 250)
    return model, lambda model: model(torch.ones(2, 1000)).square().mean(), 2

def planned():
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.02
    return wide()

def rows():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    return model, lambda model: model(torch.tensor([[1, 2]])).square().mean()

"""
BYTES = 4 * 250_250


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model of one's own."""
    path = tmp_path_factory.mktemp("step")
    (path / "mine.py").write_text(WIDE)
    return path


def run(folder, *args, code=0, launcher=(), **variables):
    """Return stdout, stderr and the results of the command."""
    command = ["bench", "step", *args, "--out", "out"]
    out, err = grace_program(*command, code=code, cwd=folder, launcher=launcher, **variables)
    return out, err, record.load(folder / "out") if code == 0 else None


@pytest.fixture(scope="module")
def slow(folder):
    """Over links of 100 Mbit/s and 5 Gbit/s, with all baselines that there are."""
    if REASON:
        pytest.skip(f"no link can be emulated here: {REASON}")
    args = ["--model", "mine:wide", "--methods", "none,qsgd,topk", "--rounds", "2", "--bandwidth", "100mbit,5gbit"]
    return run(folder, *args)


@pytest.fixture(scope="module")
def rows(slow):
    """Rows of the slower link by name, of torch's ranks."""
    return {row["name"]: row for row in slow[2].rows if (row["engine"], row["bandwidth"]) == ("torch", 1e8)}


def check_fills_the_link(row):
    """Check that the least disturbed step takes as long as its bytes over the bandwidth; load makes steps longer only,
    and not twice as long, as bytes would be that wait for each other in both directions.
    """
    shortest, wire = min(row["times_ms"]), row["wire_ms"]
    assert 0.9 * wire < shortest < row["compute_ms"] + 1.8 * wire, row["name"]


@pytest.mark.alone
def test_a_step_is_as_long_as_its_bytes_over_the_bandwidth(rows):
    for name, ratio in (("DDP", 1), ("DDP fp16 hook", 2), ("none", 1)):
        row = rows[name]
        assert row["sent_bytes"] == pytest.approx(BYTES / ratio, rel=0.01)
        assert row["received_bytes"] == pytest.approx(BYTES / ratio, rel=0.01)
        assert row["wire_ms"] == pytest.approx(8e3 * BYTES / ratio / 1e8, rel=0.01)
        check_fills_the_link(row)


@pytest.mark.alone
def test_the_upper_bound_does_not_know_of_the_network(folder, rows):
    bound = rows[BOUND]
    assert bound["kind"] == "bound"
    assert bound["sent_bytes"] < 10_000
    assert bound["exposed_ms"] == 0
    assert bound["step_ms"] == bound["compute_ms"] < 0.1 * rows["DDP"]["step_ms"]
    assert bound["speedup"] == max(row["speedup"] for row in rows.values())


@pytest.mark.alone
def test_a_step_is_compute_and_codec_and_exposed_communication(rows):
    for row in rows.values():
        parts = row["compute_ms"] + (row["codec_ms"] or 0) + row["exposed_ms"]
        assert row["step_ms"] == pytest.approx(parts)
        assert row["step_low_ms"] <= row["step_ms"] <= row["step_high_ms"]
        assert row["samples_per_s"] == pytest.approx(2 * 2 * 1e3 / row["step_ms"])
        assert row["speedup"] == rows["DDP"]["step_ms"] / row["step_ms"]
        assert len(row["times_ms"]) == row["steps"] >= 2  # of each round
        assert (row["codec_ms"] is None) == (row["kind"] != "grace")


@pytest.mark.alone
def test_fewer_bytes_pay_on_a_slow_link_and_the_verdict_says_so(slow, rows):
    out, err, results = slow
    assert err == ""
    assert rows["qsgd"]["sent_bytes"] == pytest.approx(BYTES / 4, rel=0.02)
    assert rows["topk"]["pays"]
    assert rows["qsgd"]["pays"]
    assert rows["DDP"]["pays"] is None
    words = results.settings["verdict"]["2 ranks at 100mbit"]
    assert words.startswith("Compress: topk makes a step ")
    assert " ".join(words.split()) in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.alone
def test_what_the_engine_refuses_is_left_out_and_named(slow):
    out, _, results = slow
    ran = {row["name"] for row in results.rows}
    left_out = results.settings.get("skipped", {})
    assert {"DDP fp16 hook", "DDP bf16 hook", "DDP PowerSGD(4) hook"} <= ran | set(left_out)
    assert not ran & set(left_out)
    for name in left_out:
        assert f"Left out: {name}: " in out


@pytest.mark.alone
def test_horovods_baselines_are_measured_in_the_same_run(slow, rows):
    if not launchers.has_horovod():
        pytest.skip("Horovod is not installed (make horovod)")
    own = {row["name"]: row for row in slow[2].rows if (row["engine"], row["bandwidth"]) == ("horovod", 1e8)}
    assert set(own) == {BOUND, "Horovod", "Horovod fp16"}
    assert own["Horovod"]["sent_bytes"] == pytest.approx(BYTES, rel=0.02)
    check_fills_the_link(own["Horovod"])
    assert own["Horovod fp16"]["sent_bytes"] == pytest.approx(BYTES / 2, rel=0.02)


@pytest.mark.alone
def test_files_have_the_rows_and_how_they_were_made(slow, folder):
    *_, results = slow
    assert results.command.startswith("grace bench step --model mine:wide --methods none,qsgd,topk")
    assert results.complete
    assert results.settings["parameters"] == BYTES // 4
    lines = (folder / "out" / "results.csv").read_text().splitlines()
    assert len(lines) == 1 + len(results.rows)
    assert "mine:wide" in (folder / "out" / "report.html").read_text()


@linked
@pytest.mark.alone
@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_grace_over_other_engines(folder, engine):
    if engine == "horovod" and not launchers.has_horovod():
        pytest.skip("Horovod is not installed (make horovod)")
    if engine == "mpi" and launchers.mpirun() is None:
        pytest.skip("MPI is not installed")
    args = ["--model", "mine:wide", "--methods", "none,topk", "--engine", engine, "--rounds", "2"]
    *_, results = run(folder, *args, "--baselines", engine if engine == "horovod" else "none", "--bandwidth", "200mbit")
    rows = {row["name"]: row for row in results.rows}
    assert {row["engine"] for row in results.rows} == {engine}
    assert rows["none"]["sent_bytes"] == pytest.approx(BYTES, rel=0.02)
    check_fills_the_link(rows["none"])
    assert rows["topk"]["sent_bytes"] < 0.03 * BYTES
    assert rows["topk"]["pays"]
    assert ("Horovod" in rows) == (engine == "horovod")


def test_several_numbers_of_ranks_strategies_and_the_hook(folder):
    args = ["--model", "mine:wide", "--methods", "topk", "--strategy", "ps_load_balancing", "--ddp-hook", "-n", "1,3"]
    out, _, results = run(folder, *args, "--rounds", "1", "--baselines", "ddp")
    names = {ranks: [row["name"] for row in results.rows if row["ranks"] == ranks] for ranks in (1, 3)}
    own = ["topk", "strategy ps_load_balancing"]
    assert names[1] == [BOUND, *own]
    assert set(names[3]) > {BOUND, "DDP", *own, "topk in DDP's hook"}
    assert "nobody to send to" in results.settings["verdict"]["1 rank on loopback"]
    (sent,) = (row["sent_bytes"] for row in results.rows if row["name"] == "topk" and row["ranks"] == 3)
    payload = sum(fidelity.sent_bytes("topk", torch.randn(shape)) for shape in ((250, 1000), (250,)))
    assert sent == pytest.approx(2 * payload, rel=0.1)  # it gathers: each rank sends to every other
    assert "mine:wide, 3 ranks on loopback" in out


def test_sparse_gradients_are_exchanged_too_by_methods_that_take_them(folder):
    args = ["--model", "mine:rows", "--methods", "none,powersgd,topk", "--baselines", "none", "--rounds", "1"]
    out, _, results = run(folder, *args, OMP_NUM_THREADS="1,1")  # of nested regions, too
    assert [row["name"] for row in results.rows] == [BOUND, "none", "topk"]
    assert "is sparse, and powersgd exchanges a variable in several rounds" in results.settings["skipped"]["powersgd"]
    assert "Left out: powersgd: " in out


def test_steps_between_which_ranks_train_alone_are_averaged_over_whole_periods(folder):
    spec = "diloco(period=60, compressor=none, optimizer=none)"  # a block of other steps is shorter than a period
    args = ["--model", "mine:wide", "--methods", "", "--strategy", spec, "--baselines", "none", "--rounds", "2"]
    *_, results = run(folder, *args)
    (row,) = (row for row in results.rows if row["name"] == f"strategy {spec}")
    assert row["sent_bytes"] == pytest.approx(BYTES / 60, rel=0.05)
    assert row["steps"] == 2  # each the mean of a period, in which one step of sixty exchanges


@linked
def test_what_chooses_itself_is_timed_when_it_has_chosen(folder):
    args = ["--model", "mine:planned", "--methods", "", "--strategy", "auto(methods=[fp16])", "--baselines", "none"]
    *_, results = run(folder, *args, "--rounds", "1", "--bandwidth", "100mbit")
    (auto,) = (row for row in results.rows if row["name"] == "strategy auto(methods=[fp16])")
    assert auto["sent_bytes"] == pytest.approx(BYTES / 2, rel=0.02)


def test_ranks_that_a_launcher_has_started_measure_their_own_network(folder):
    torchrun = command("torchrun", 2, "--no-python")
    out, _, results = run(folder, "--model", "mine:wide", "--methods", "topk", "--rounds", "2", launcher=torchrun)
    assert out.count("mine:wide, 2 ranks") == 1  # rank 0 alone speaks
    assert {row["name"] for row in results.rows} >= {BOUND, "DDP", "topk"}
    assert results.complete


def test_where_no_link_can_be_emulated_it_says_why_and_measures_nothing(tmp_path):
    args = ["--model", "mlp", "--bandwidth", "1gbit", "--out", str(tmp_path)]
    _, err = grace_program("bench", "step", *args, code=1, PATH="/nowhere")
    assert err.startswith("grace bench step: a link cannot be emulated here: ")
    assert record.load(tmp_path).rows == []


@linked
@pytest.mark.alone  # other tests have networks up, too
def test_an_interrupted_run_keeps_what_is_finished_and_removes_the_network(folder, tmp_path):
    before, during = set(_namespaces()), []
    args = ["--model", "mine:wide", "--methods", "topk", "--rounds", "5000", "--bandwidth", "100mbit"]
    code, err, saved = interrupted_bench(
        *("step", *args, "--baselines", "ddp"), out=tmp_path, cwd=folder, meanwhile=lambda: during.extend(_namespaces())
    )
    assert set(during) - before
    assert code == 130
    assert err == f"grace bench step: interrupted; the ranks are ended; what is finished is in {tmp_path}\n"
    assert not saved.complete
    assert BOUND in {row["name"] for row in saved.rows}
    assert not set(_namespaces()) - before


def _namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^(grace-\S+)", listed, re.MULTILINE)


def test_what_each_engine_leaves_out_is_told():
    running = BenchmarkRun("step", {}, None)
    rows = ScenarioRows(running, ScenarioBars(running.console), 2, None, ["mpi", "torch"])
    for engine, name in (("mpi", "powersgd"), ("torch", "DDP bf16 hook")):
        rows.add(engine, {"engine": engine})
        rows.add(engine, {"facts": {"device": "cpu", "skipped": {name: "refused"}}})
    assert running.results.settings == {"device": "cpu", "skipped": {"powersgd": "refused", "DDP bf16 hook": "refused"}}


def row(name, ms, kind="grace", spread=1.0):
    return {
        "name": name, "kind": kind, "ranks": 2, "step_ms": ms, "step_low_ms": ms - spread, "step_high_ms": ms + spread
    }  # fmt: skip


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([row("topk", 50)], "Compress: topk makes a step 2.0x as fast as DDP (50 ms instead of 100 ms)."),
        ([row("topk", 98)], "Do not compress: no method is clearly faster than DDP (100 ms a step)."),
        ([row("topk", 90, spread=12)], "Do not compress"),  # within the spread
        ([row("DDP fp16 hook", 60, "baseline"), row("topk", 99)], "But DDP fp16 hook (1.7x) would be."),
        ([row("DDP fp16 hook", 40, "baseline"), row("topk", 50)], "Faster still: DDP fp16 hook (2.5x)."),
        ([row("topk", 50), row("qsgd", 70)], "It pays too with qsgd (1.4x)."),
        ([row("topk", 50), row("qsgd", 170)], "Slower than DDP: qsgd."),
        ([row("none", 80)], "Do not compress"),  # that is Grace's exchange, not compression
    ],
)
def test_the_verdict(others, words):
    rows = [row(BOUND, 25, "bound"), row("DDP", 100, "baseline"), *others]
    said = verdict_text(compare_with_plain(rows))
    assert words in said
    assert "Without any communication it would be 4.0x" in said


@pytest.mark.parametrize(
    ("shortfalls", "words"),
    [
        ({"topk": 0.03, "qsgd": 0.0}, "Compress: topk makes a step 2.0x as fast as DDP"),
        ({"topk": 0.031, "qsgd": 0.0}, "Compress: qsgd makes a step 1.4x as fast as DDP"),
        (
            {"topk": 0.4, "qsgd": 0.0},
            "not recommended: DDP fp16 hook (2.5x; not trained here), topk (2.0x; lacks 40 % of",
        ),
        ({"topk": math.inf, "qsgd": 0.0}, ", topk (2.0x; diverged)."),
        (
            {"topk": None, "qsgd": None},
            ", topk (2.0x; training gains nothing without compression either), qsgd (1.4x; tr",
        ),
        ({"topk": 0.4, "qsgd": 0.4}, "Do not compress: no method that learns as well is clearly faster than DDP"),
        ({"qsgd": 0.0}, "Compress: qsgd"),
        ({"qsgd": 0.0}, "DDP fp16 hook (2.5x; not trained here), topk (2.0x; not trained here)."),
    ],
)
def test_the_verdict_recommends_no_method_that_learns_less(shortfalls, words):
    rows = [row(BOUND, 25, "bound"), row("DDP", 100, "baseline"), row("DDP fp16 hook", 40, "baseline")]
    rows += [row("topk", 50), row("qsgd", 70)]
    assert words in verdict_text(compare_with_plain(rows), shortfalls)


@pytest.mark.alone
def test_a_sweep_has_a_verdict_for_every_bandwidth(slow):
    out, _, results = slow
    assert list(results.settings["verdict"]) == ["2 ranks at 100mbit", "2 ranks at 5gbit"]
    ddp = {row["bandwidth"]: row["step_ms"] for row in results.rows if row["name"] == "DDP"}
    assert ddp[1e8] > 5 * ddp[5e9]
    assert out.index("mine:wide, 2 ranks at 100mbit") < out.index("mine:wide, 2 ranks at 5gbit")
