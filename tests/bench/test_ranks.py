"""The ranks of a benchmark: how they are started, how they end, and what is said of those that fail."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grace
from grace.bench.common import results
from grace.bench.common.errors import WorkerError
from grace.bench.common.results import Results
from grace.bench.ranks import launchers, scenario
from grace.bench.train import training_runs
from grace.bench.train.train_settings import TrainSettings
from tests.support import warm
from tests.support.bench_runs import GRACE, bench
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import environment
from tests.support.limits import HANGS

pytestmark = pytest.mark.ranks

REAL = str(Path(warm.REAL).with_name("grace"))
LAUNCHERS = ("rendezvous", "mpirun", "/sh\0", "/bash\0")
SHORT = ("--epochs", "2", "--seeds", "1")
FILES = {"results.json", "results.csv", "report.html"}
RARE = pytest.mark.skipif(
    not THOROUGH, reason="left to `make thorough`: ranks of torch, or of another launcher, are tried"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and interface names of Linux")


@pytest.fixture
def launcher(request, monkeypatch, tmp_path_factory):
    """The framework of what starts ranks: of mpirun TensorFlow, with Horovod hidden from the command."""
    if request.param == "torch":
        return "torch"
    pytest.importorskip("tensorflow", exc_type=ImportError)
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed (make horovod)")
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    if request.param == "mpi4py":
        (empty := tmp_path_factory.mktemp("hidden") / "horovod").mkdir()
        (empty / "__init__.py").write_text("raise ImportError('hidden')")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(empty.parent), os.environ.get("PYTHONPATH", "")]))
    return "tensorflow"


def run(*args, **options):
    """Return stdout and stderr of `grace bench train`."""
    return bench("train", *args, **options)


@pytest.mark.slow
def test_one_rank_trains_and_sends_nothing(tmp_path):
    out, _ = run(*SHORT, "-n", "1", "--methods", "qsgd", "--out", str(tmp_path))
    assert "One rank has nobody to send to" in out
    assert re.search(r"qsgd +0 B ", out)
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["horovod", pytest.param("mpi4py", marks=RARE)], indirect=True)
def test_tensorflow_is_measured_as_torch_is(tmp_path, launcher, request):
    engine = request.node.callspec.params["launcher"]
    out, err = run(*SHORT, "--framework", "tensorflow", "--methods", "qsgd", "--out", str(tmp_path))
    assert err == ""
    number = r"\d[\d.]*"
    rows = re.findall(rf"^(\S+) +(\S+ \w?B) +({number}) +{number} +\d+\.\d +", out, re.MULTILINE)
    assert rows == [("qsgd", "303 kB", "8.06")]
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["settings"]["framework"] == "tensorflow"
    assert {"tensorflow", "keras", "torch", *({"horovod"} & {engine})} <= set(saved["versions"])
    for result in saved["rows"]:
        assert 0 < result["codec_ms"] < result["step_ms"]
        assert 0.8 < result["quality"] < 1
        (made,) = result["runs"]
        assert (made["steps"], made["lr"]) == (2 * (1437 // 64), 0.1)
        assert made["curve"][-1][:2] == [2, made["sent_bytes_per_step"] * made["steps"]]
        assert made["curve"][-1][3] == made["quality"]


def test_one_rank_of_tensorflow_needs_no_launcher_and_no_torch(tmp_path):
    pytest.importorskip("tensorflow", exc_type=ImportError)
    (decoy := tmp_path / "decoy" / "torch").mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(decoy.parent), os.environ.get("PYTHONPATH", "")])
    args = [*SHORT, "-n", "1", "--framework", "tensorflow", "--methods", "topk", "--out", str(tmp_path / "out")]
    out, err = run(*args, PYTHONPATH=path)
    assert err == ""
    assert re.search(r"^topk, seed 0: accuracy \d+", out, re.MULTILINE)
    assert "One rank has nobody to send to" in out


def test_a_rank_of_tensorflow_that_fails_is_quoted_without_its_start_up_noise(tmp_path):
    pytest.importorskip("tensorflow", exc_type=ImportError)
    (decoy := tmp_path / "keras").mkdir()
    (decoy / "__init__.py").write_text("import tensorflow\nraise SystemExit('keras is broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    args = [*SHORT, "-n", "1", "--framework", "tensorflow", "--out", str(tmp_path / "out")]
    _, err = run(*args, code=1, program=REAL, PYTHONPATH=path)  # has not imported the other keras beforehand
    assert err == "grace bench train: the ranks failed (exit code 1)\nrank 0:\nkeras is broken\n"


def test_without_horovod_and_mpi_tensorflow_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    hidden = ("horovod", "mpi4py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(grace.MissingExtraError, match=r"make horovod.*mpirun and mpi4py.*grace-compress\[mpi\]"):
        launchers.engine_of("tensorflow", 2)
    assert launchers.engine_of("tensorflow", 1) == "local"
    for engine in hidden:
        with pytest.raises(grace.MissingExtraError, match=f"--engine {engine[:3]}"):
            launchers.check_engine(engine.removesuffix("4py"))


@pytest.mark.parametrize(
    ("single", "failed", "said"),
    [
        (False, {1: -9}, ""),
        (True, {0: 137}, "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 9 (Killed)."),
    ],
)
def test_a_killed_rank_is_named(tmp_path, single, failed, said):
    processes = [launchers.Process([])] * (1 if single else 2)
    launcher = launchers.RankLauncher(processes, 2, "mpi", {}, launchers.KILLED_BY_MPIRUN if single else r"(?!)")
    (tmp_path / "launcher.log").write_text(f"[1]<stdout>:x\n{said}\n")
    assert scenario._complaints(launcher, failed, tmp_path) == "rank 1 was ended by SIGKILL"


def test_a_rank_that_fails_ends_the_others(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(10_000)")
    with launchers.launcher("torch", 2) as start, pytest.raises(WorkerError, match=r"failed \(exit code 3\)"):
        scenario.run_ranks(start, [str(program)], tmp_path, lambda: None)


@linux
def test_a_rank_that_fails_is_quoted_and_the_exit_code_is_1(tmp_path):
    _, err = run(*SHORT, "--out", str(tmp_path), code=1, GLOO_SOCKET_IFNAME="nosuch0")
    assert "rank 0:" in err
    assert "Unable to find address for: nosuch0" in err
    saved = results.load(tmp_path)
    assert (saved.rows, saved.complete) == ([], False)


def _ranks(mark):
    """The processes of ranks that have a word in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_text()
            rank = "\0-m\0grace.bench.train.train_rank" in command and not any(name in command for name in LAUNCHERS)
            found += [int(folder.name)] if rank and mark in (folder / "environ").read_bytes() else []
    return sorted(found)


def _until(condition, process):
    deadline = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def _running(out, trained, framework="torch"):
    """A long benchmark: its process and the ranks' pids, when they are there or when a first run has been trained."""
    command = [GRACE, "bench", "train", "--methods", "none", "--seeds", "5000", "--out", str(out)]
    command += ["--framework", framework, "--epochs", "1" if trained else "5000"]
    # os.environ: an MPI started in this very process leaves variables in C's environment that no mpirun survives
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "MARK": str(out)}
    process = subprocess.Popen(command, **quiet, env=env)
    try:
        _until(lambda: len(_ranks(f"MARK={out}".encode())) == 2, process)
        ranks = _ranks(f"MARK={out}".encode())
        _until(lambda: not trained or ((out / "results.json").exists() and results.load(out).rows), process)
        yield process, ranks
    finally:
        process.terminate()
        process.communicate(timeout=HANGS)


def _check_interrupted(process, ranks, number, out, trained):
    process.send_signal(number)
    _, err = process.communicate(timeout=HANGS)
    more = f"; what is finished is in {out}" if trained else ""
    assert err == f"grace bench train: interrupted; the ranks are ended{more}\n"
    assert process.returncode == 130
    deadline = time.monotonic() + HANGS  # mpirun does not wait for those that it has sent a signal
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@linux
@pytest.mark.parametrize(
    ("number", "trained"), [(signal.SIGTERM, False), (signal.SIGINT, True)], ids=["starting", "training"]
)
def test_an_interrupted_benchmark_leaves_no_rank_behind_and_keeps_what_is_finished(tmp_path, number, trained):
    with _running(tmp_path, trained) as (process, ranks):
        _check_interrupted(process, ranks, number, tmp_path, trained)
    if trained:
        saved = results.load(tmp_path)
        assert not saved.complete
        assert 0 < len(saved.rows[0]["runs"]) < 5000
        assert "interrupted" in (tmp_path / "report.html").read_text()


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "trained"),
    [("horovod", False), ("mpi4py", False), pytest.param("horovod", True, marks=RARE)],
    indirect=["launcher"],
)
def test_an_interrupted_tensorflow_benchmark_leaves_no_rank_behind(tmp_path, launcher, trained):
    with _running(tmp_path, trained, "tensorflow") as (process, ranks):
        _check_interrupted(process, ranks, signal.SIGINT, tmp_path, trained)


@linux
@pytest.mark.slow
@pytest.mark.parametrize(  # with Horovod ranks are started as with torch
    "launcher", ["torch", pytest.param("mpi4py", marks=RARE)], indirect=True
)
def test_a_killed_rank_ends_the_benchmark_with_its_signal_named(tmp_path, launcher):
    with _running(tmp_path, True, launcher) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=HANGS)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in err
        assert "absl" not in err
        assert not _ranks(f"MARK={tmp_path}".encode())


@pytest.mark.parametrize(
    ("package", "extra"),
    [("torch", "torch"), ("tensorflow", "tensorflow"), ("sklearn", "bench")],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    settings = TrainSettings(framework=extra if extra != "bench" else "torch")
    with pytest.raises(grace.MissingExtraError, match=rf"pip install .*\[{extra}\]"):
        training_runs.run(settings, Results("train", {}), lambda *event: None)
