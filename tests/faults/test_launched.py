"""``grace launch`` runs, and what becomes of ranks, launchers and nodes that die, are interrupted or are not there."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from grace.launch.command_lines import Command
from grace.launch.supervisor import End, first_reason, run
from tests.support import warm
from tests.support.command import grace_program
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import environment
from tests.support.limits import HANGS, gone, until

PYTHON = sys.executable
REAL = warm.REAL  # where it matters who is whose child
PACKAGE = {"torch": "torch", "horovod": "horovod", "mpi": "mpi4py"}


SCRIPT = """
import os, signal, sys, time
import grace
how, out = sys.argv[1:]
open(f"{out}/{os.getpid()}.pid", "w").close()
backend = grace.init()
if how == "wait":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that does not listen
with open(f"{out}/{grace.rank()}.rank", "w") as file:
    print(backend.name, grace.rank(), grace.size(), os.environ.get("GRACE_STRATEGY"), os.environ.get("A"), file=file)
print("-" * 74, "| a table |", "-" * 74, sep="\\n", flush=True)
if how in ("end", "raise"):
    backend.allgather_object(None)  # one that ended before all are connected would end them
if how == "wait":
    time.sleep(200)
if grace.rank() == 1 and how == "exit":
    os._exit(7)
if grace.rank() == 1 and how == "raise":
    raise ValueError("a mistake")
if grace.rank() == 1 and how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("exit", "raise", "kill"):
    time.sleep(100)
print(f"said by {grace.rank()}")
"""
NAMES = ["torch", "horovod", "mpi"]
REPORTS = r"ChildFailedError|Root Cause|MPI_ABORT|Primary job|mpirun detected|Process name|orte_base"
"""Words of launchers' own reports, which are left out."""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "my train.py"
    path.write_text(SCRIPT)
    return path


def need(engine):
    if importlib.util.find_spec(PACKAGE[engine]) is None:
        pytest.skip(f"{PACKAGE[engine]} is not installed")


def alive(folder):
    """The ranks that are still there."""
    return [path.stem for path in folder.glob("*.pid") if not gone(path.stem)]


def nobody_left(folder):
    return list(folder.glob("*.pid")) and until(lambda: not alive(folder))


@pytest.mark.ranks
@pytest.mark.parametrize("engine", NAMES if THOROUGH else NAMES[:1])
def test_ranks_know_their_number_and_the_strategy(script, tmp_path, engine):
    need(engine)
    (tmp_path / "s.json").write_text("{}")
    args = ["-n", "2", "--engine", engine, "--strategy", "s.json", "--", PYTHON, str(script), "end", str(tmp_path)]
    out = grace_program("launch", *args, cwd=tmp_path)[0]
    for rank in range(2):
        words = (tmp_path / f"{rank}.rank").read_text().split()
        assert words == [engine, str(rank), "2", str(tmp_path.resolve() / "s.json"), "None"]
        assert f"said by {rank}" in out
    assert nobody_left(tmp_path)


PLANNED = """
import sys
import torch
import grace
from grace.planner import auto_planner
auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.02
grace.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 128)
optimizer = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
steps = 0
while steps < 200 and optimizer.plan is None:
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    steps += 1
sys.stdout.write(f"rank {grace.rank()}: {optimizer.strategy.id} {optimizer.plan.chosen.strategy.id}\\n")
"""


@pytest.mark.ranks
def test_ranks_plan_where_the_program_names_no_strategy(tmp_path):
    need("torch")
    (tmp_path / "train.py").write_text(PLANNED)
    told = ["--strategy", "auto(methods=['fp16'])", "--", PYTHON, "train.py"]
    out, err = grace_program("launch", "-n", "2", "--engine", "torch", *told, cwd=tmp_path)
    one, other = sorted(line for line in out.splitlines() if line.startswith("rank"))
    executed, planned = one.removeprefix("rank 0: ").split()
    assert executed == planned
    assert other == f"rank 1: {executed} {planned}"
    assert err.count("grace: auto: measuring") == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exit", 7, "rank 1 ended with exit code 7"),
        ("raise", 1, "rank 1 ended with exit code 1: ValueError: a mistake"),
        ("kill", 137, "rank 1 was ended by SIGKILL (exit code 137)"),
    ],
)
@pytest.mark.parametrize("engine", NAMES)
def test_a_rank_that_dies_ends_the_job_with_its_number_and_exit_code(script, tmp_path, engine, how, code, message):
    need(engine)
    args = ["-n", "2", "--engine", engine, "--", PYTHON, str(script), how, str(tmp_path)]
    out, err = grace_program("launch", *args, code=code)
    assert err.splitlines()[-1] == f"grace launch: {message}; the others were ended"
    assert re.findall(REPORTS, out + err) == []
    assert how != "raise" or out.count("-" * 74) == 4  # what ranks print is no launcher's
    assert nobody_left(tmp_path)


def test_a_rank_that_gave_no_reason_is_given_none():
    assert first_reason("grace.errors.ExchangeError: rank 1 was killed\nProcess name: [[1,1],1]", 1) == ""
    assert first_reason("[1,1]<stderr>:grace: rank 1 failed first: KeyError: 'x'[1,1]<stderr>:\n", 1) == "KeyError: 'x'"


@pytest.mark.ranks
def test_a_launcher_that_names_no_rank_is_named():
    err = grace_program("launch", "--engine", "torch", "--", PYTHON, "-m", code=2)[1]
    assert err.splitlines()[-1] == (f"grace launch: {Path(PYTHON).name} ended with exit code 2; no rank is named")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("mpi", signal.SIGKILL),  # launch/test_ssh.py ends torchrun's ranks by SIGTERM
        *([("mpi", signal.SIGTERM), ("torch", signal.SIGTERM), ("torch", signal.SIGKILL)] if THOROUGH else []),
        *([("horovod", signal.SIGINT)] if THOROUGH else []),
    ],
)
def test_ending_the_command_leaves_nobody_behind(script, tmp_path, engine, number):
    need(engine)
    args = ["-n", "2", "--engine", engine, "--", REAL, str(script), "wait", str(tmp_path)]
    with open(tmp_path / "err", "w+") as err:  # no pipe, which ranks would hold open
        path = f"{Path(REAL).parent}{os.pathsep}{environment()['PATH']}"
        command = [REAL, "-m", "grace.cli.main", "launch", *args]
        process = subprocess.Popen(command, env={**environment(), "PATH": path}, stdout=subprocess.DEVNULL, stderr=err)
        until(lambda: len(list(tmp_path.glob("*.rank"))) == 2, process)
        assert len(alive(tmp_path)) == 2
        process.send_signal(number)
        process.wait(HANGS)
        if number == signal.SIGKILL:
            assert nobody_left(tmp_path)  # ranks and launchers get a while to end by themselves
            return
    assert process.returncode == 130
    assert (tmp_path / "err").read_text().splitlines()[-1] == "grace launch: interrupted; the ranks are ended"
    assert not alive(tmp_path)


def test_ranks_go_on_when_nobody_reads_what_they_print(monkeypatch):
    """A reader that has left, as in ``grace launch ... | head``, does not make ranks wait for it."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", closefd=True) as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        # more than a pipe holds; the alarm ends a rank that waits for a reader
        code = f"import signal, sys; signal.alarm({HANGS / 3:.0f}); sys.stderr.write('loss 1\\n' * 10**5)"
        assert run([Command("localhost", [PYTHON, "-c", code])]) == End(0)
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            nobody.close()


# -- several nodes, on this machine: an ssh that runs the line in a shell here ----------------------------------------


@pytest.fixture
def cluster(tmp_path):
    """A cluster of two names of this machine, and the folder of its ssh."""
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        pytest.skip("this machine's name has no address")
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "c.yaml").write_text(
        f"nodes: [{{address: {name}, chief: true, cpus: [0, 1]}}, {{address: other, ssh_config: x}}]\n"
        "ssh: {x: {shared_envs: {A: it's here}}}\n"
    )
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    path = f"{tmp_path / 'bin'}{os.pathsep}{environment()['PATH']}"
    return ["-r", str(tmp_path / "c.yaml"), "--engine", "torch", "--port", str(port)], path


@pytest.mark.ranks
def test_two_nodes_are_one_job(script, tmp_path, cluster):
    args, path = cluster
    out = grace_program("launch", *args, "--", PYTHON, str(script), "end", str(tmp_path), PATH=path)[0]
    for rank in range(3):
        assert (tmp_path / f"{rank}.rank").read_text() == f"torch {rank} 3 None it's here\n"
        assert f"said by {rank}" in out


@pytest.mark.ranks
@pytest.mark.parametrize(
    "rank", [1, 2] if THOROUGH else [2], ids=lambda rank: ["on the chief", "on the other node"][rank - 1]
)
def test_one_nodes_failure_ends_the_others(tmp_path, cluster, rank):
    args, path = cluster
    script = tmp_path / "a.py"
    script.write_text(SCRIPT.replace("grace.rank() == 1", f"grace.rank() == {rank}"))
    err = grace_program("launch", *args, "--", PYTHON, str(script), "exit", str(tmp_path), PATH=path, code=7)[1]
    assert err.splitlines()[-1] == f"grace launch: rank {rank} ended with exit code 7; the others were ended"
    assert nobody_left(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", NAMES)
def test_a_node_that_is_not_there_is_named(tmp_path, cluster, engine):
    need(engine)
    args, path = cluster
    (tmp_path / "bin" / "ssh").write_text(
        '#!/bin/sh\nfor word; do case "$word" in nobody*)'
        ' echo "ssh: Could not resolve hostname $word: Name or service not known" >&2;; esac; done\nexit 255\n'
    )
    file = Path(args[1])
    file.write_text(file.read_text().replace("address: other", "address: nobody.example"))
    args = [*args[:2], "--engine", engine, "--", PYTHON, "-c", "1"]
    err = grace_program("launch", *args, PATH=path, code=1 if engine == "horovod" else 255)[1]
    unreached = "grace launch: node nobody.example cannot be reached by ssh: Name or service not known"
    assert err.splitlines()[-1] == unreached
