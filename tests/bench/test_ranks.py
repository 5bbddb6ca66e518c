"""The ranks of a benchmark: how they are started, how they end, and what is said of those that fail."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import grace
from grace.bench.common import results
from grace.bench.common.ending import WorkerError
from grace.bench.ranks import launchers, scenario
from grace.bench.ranks.rank_program import RANK_VARIABLES
from grace.bench.train.train_command import TrainSettings
from tests.support.bench_runs import has_saved_a_row
from tests.support.command import GRACE, grace_program
from tests.support.limits import HANGS, gone, until

pytestmark = pytest.mark.ranks

LAUNCHERS = ("rendezvous", "mpirun", "/sh\0", "/bash\0")
SHORT = ("--epochs", "2", "--seeds", "1")
FILES = {"results.json", "results.csv", "report.html"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and interface names of Linux")


@pytest.mark.slow
def test_one_rank_trains_and_sends_nothing(tmp_path):
    out, _ = grace_program("bench", "train", *SHORT, "-n", "1", "--methods", "qsgd", "--out", str(tmp_path))
    assert "One rank has nobody to send to" in out
    assert re.search(r"qsgd +0 B ", out)
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_engines_that_are_not_installed_are_named(monkeypatch):
    find, hidden = importlib.util.find_spec, ("horovod", "mpi4py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    for engine in hidden:
        with pytest.raises(grace.MissingExtraError, match=f"--engine {engine[:3]}"):
            launchers.check_engine(engine.removesuffix("4py"))


def test_ranks_of_a_launcher_start_no_ranks_of_their_own(monkeypatch):
    """torchrun's variables would reach them: they would wait for its store."""
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(grace.ConfigError, match=r"started by torch\.distributed's variables: RANK=1, WORLD_SIZE=2"):
        scenario.run_scenario(["-c", ""], {}, [], 2, None, lambda event: None)


def test_a_rank_that_is_killed_under_mpirun_is_named(tmp_path):
    launcher = launchers.RankLauncher([launchers.Process([])], "mpi", {})
    said = "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 9 (Killed)."
    (tmp_path / "launcher.log").write_text(f"[1]<stdout>:x\n{said}\n")
    assert scenario._complaints(launcher, {0: 137}, tmp_path) == "rank 1 was ended by SIGKILL"


@pytest.mark.parametrize("engine", launchers.ENGINES)
def test_a_rank_that_fails_ends_the_others(tmp_path, engine):
    if (engine == "horovod" and not launchers.has_horovod()) or (engine == "mpi" and launchers.mpirun() is None):
        pytest.skip(f"{engine} is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys, time\nranks = [os.environ.get(name) for name in {RANK_VARIABLES}]\n"
        "sys.exit(3) if '1' in ranks else time.sleep(10_000)"
    )
    with launchers.launcher(engine, 2) as start, pytest.raises(WorkerError, match=r"failed \(exit code 3\)"):
        scenario.run_ranks(start, [str(program)], tmp_path, lambda: None)


@linux
def test_a_rank_that_fails_is_quoted_and_the_exit_code_is_1(tmp_path):
    _, err = grace_program("bench", "train", *SHORT, "--out", str(tmp_path), code=1, GLOO_SOCKET_IFNAME="nosuch0")
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


@contextlib.contextmanager
def _running(out, trained):
    """A long benchmark: its process and the ranks' pids, when they are there or when a first run has been trained."""
    command = [GRACE, "bench", "train", "--methods", "none", "--seeds", "5000", "--out", str(out)]
    command += ["--epochs", "1" if trained else "5000"]
    # os.environ: an MPI started in this very process leaves variables in C's environment that no mpirun survives
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "MARK": str(out)}
    process = subprocess.Popen(command, **quiet, env=env)
    try:
        until(lambda: len(_ranks(f"MARK={out}".encode())) == 2, process)
        ranks = _ranks(f"MARK={out}".encode())
        until(lambda: not trained or has_saved_a_row(out), process)
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
    until(lambda: gone(*ranks))  # mpirun does not wait for those that it has sent a signal


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
def test_a_killed_rank_ends_the_benchmark_with_its_signal_named(tmp_path):
    with _running(tmp_path, True) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=HANGS)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in err
        assert not _ranks(f"MARK={tmp_path}".encode())


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("numba", "torch"), ("sklearn", "bench")])
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(grace.MissingExtraError, match=rf"pip install .*\[{extra}\]"):
        TrainSettings()
