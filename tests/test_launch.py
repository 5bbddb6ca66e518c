"""``grace launch``: the command lines, and what becomes of ranks that run, die or are interrupted."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import BIN, environment

import grace
from grace.jobs import first_failure
from grace.launch import command
from grace.strategy.resources import Resources

GRACE = [sys.executable, "-m", "grace.cli", "launch"]
ROOT = str(Path(grace.__file__).parents[1])
PACKAGE = {"torch": "torch", "horovod": "horovod", "mpi": "mpi4py"}

ONE = "nodes: [{address: 10.0.0.1, chief: true, gpus: [0, 1]}]"
THREE = """
nodes:
  - {address: 10.0.0.2, gpus: [0, 1], ssh_config: default}
  - {address: 10.0.0.1, chief: true, gpus: [0, 1]}
ssh: {default: {port: 2222, key_file: /keys/id, shared_envs: {A: x y}}}
"""
UNEVEN = """
nodes:
  - {address: 10.0.0.1, chief: true, gpus: [0, 1]}
  - {address: 10.0.0.2, gpus: [3], ssh_config: default}
ssh: {default: {username: me, key_file: /my keys/id, python_venv: ~/my venv, shared_envs: {A: x y}}}
"""


def env():
    return {**environment(), "PYTHONPATH": ROOT, "COLUMNS": "80"}


def launched(*args, folder=None, code=0, **variables):
    """Run the command; returns (stdout, stderr)."""
    done = subprocess.run(
        [*GRACE, *args], capture_output=True, text=True, env={**env(), **variables}, cwd=folder, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def lines(folder, text, *args):
    (folder / "cluster.yaml").write_text(text)
    program = ["--", "python", "my train.py", "--name", "it's"]
    return launched("-r", "cluster.yaml", "--dry-run", *args, *program, folder=folder)[0].splitlines()


PROGRAM = "'my train.py' --name 'it'\"'\"'s'"


# -- dry runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("torch", f"python -m torch.distributed.run --standalone --nproc-per-node 3 {PROGRAM}"),
        ("horovod", f"horovodrun -np 3 -H localhost:3 python {PROGRAM}"),
        (
            "mpi",
            "env GRACE_BACKEND=mpi mpirun -np 3 -H localhost:3 --bind-to none --map-by slot -x GRACE_BACKEND "
            f"python {PROGRAM}",
        ),
    ],
)
def test_without_a_file_this_machine_is_used(engine, expected):
    program = ["python", "my train.py", "--name", "it's"]
    assert launched("--engine", engine, "-n", "3", "--dry-run", "--", *program)[0].splitlines() == [expected]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "torch",
            "env CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.run --standalone --nproc-per-node 2 " + PROGRAM,
        ),
        ("horovod", f"horovodrun -np 2 -H 10.0.0.1:2 env CUDA_VISIBLE_DEVICES=0,1 python {PROGRAM}"),
        (
            "mpi",
            "env GRACE_BACKEND=mpi CUDA_VISIBLE_DEVICES=0,1 mpirun -np 2 -H 10.0.0.1:2 --bind-to none --map-by slot "
            f"-x GRACE_BACKEND -x CUDA_VISIBLE_DEVICES python {PROGRAM}",
        ),
    ],
)
def test_one_node(tmp_path, engine, expected):
    assert lines(tmp_path, ONE, "--engine", engine) == [expected]


def test_two_nodes_under_horovod_and_mpi(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    strategy = ["--strategy", "s.json"]
    path = tmp_path.resolve() / "s.json"
    assert lines(tmp_path, THREE, "--engine", "horovod", *strategy) == [
        f"env 'A=x y' GRACE_STRATEGY={path} horovodrun -np 4 -H 10.0.0.1:2,10.0.0.2:2 -p 2222 -i /keys/id "
        f"env CUDA_VISIBLE_DEVICES=0,1 python {PROGRAM}"
    ]
    assert lines(tmp_path, THREE, "--engine", "mpi", *strategy) == [
        f"env GRACE_BACKEND=mpi 'A=x y' CUDA_VISIBLE_DEVICES=0,1 GRACE_STRATEGY={path} "
        "mpirun -np 4 -H 10.0.0.1:2,10.0.0.2:2 --bind-to none --map-by slot --mca plm_rsh_args '-p 2222 -i /keys/id' "
        f"-x GRACE_BACKEND -x A -x CUDA_VISIBLE_DEVICES -x GRACE_STRATEGY python {PROGRAM}"
    ]


def test_two_nodes_of_unequal_gpus_under_torch(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(UNEVEN)
    (tmp_path / "s.json").write_text("{}")
    folder = tmp_path.resolve() / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    first, second = command(
        Resources.load(tmp_path / "c.yaml"), "torch", ["python", "my train.py"], tmp_path / "s.json", port=1234
    )
    path = tmp_path.resolve() / "s.json"
    meet = "--master-addr 10.0.0.1 --master-port 1234 'my train.py'"
    assert str(first) == (
        f"env 'A=x y' CUDA_VISIBLE_DEVICES=0,1 GRACE_STRATEGY={path} "
        f"python -m torch.distributed.run --nnodes 2 --node-rank 0 --nproc-per-node 2 {meet}"
    )
    ssh = ["ssh", "-tt", "-o", "BatchMode=yes", "-p", "22", "-i", "/my keys/id", "me@10.0.0.2"]
    assert second.argv[:-1] == ssh
    assert second.argv[-1] == (
        f"cd '{tmp_path.resolve()}/it'\"'\"'s here' && . ~/'my venv'/bin/activate && "
        f"env 'A=x y' CUDA_VISIBLE_DEVICES=3 GRACE_STRATEGY={path} "
        f"python -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1 {meet}"
    )
    assert second.environment == {}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            ["python3.11", "-m", "pkg", "x"],
            "python3.11 -m torch.distributed.run --standalone --nproc-per-node 1 -m pkg x",
        ),
        (
            ["/opt/python", "-X", "dev", "a.py"],
            "/opt/python -m torch.distributed.run --standalone --nproc-per-node 1 --no-python /opt/python -X dev a.py",
        ),
        (["./a.sh"], "python -m torch.distributed.run --standalone --nproc-per-node 1 --no-python ./a.sh"),
    ],
)
def test_torchrun_starts_what_is_no_python_script(program, expected):
    assert launched("--engine", "torch", "--dry-run", *program)[0].splitlines() == [expected]


def test_the_default_engine_is_the_first_that_is_installed(monkeypatch):
    from grace.launch import default_engine

    for installed, engine in (({"horovod", "torch"}, "horovod"), ({"torch"}, "torch"), (set(), "mpi")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, here=installed: name if name in here else None)
        assert default_engine() == engine


def test_help_says_what_it_does():
    text = launched("--help")[0]
    for word in ("--resources", "--engine", "--ranks", "--strategy", "--dry-run", "--port", "python train.py"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


# -- refusals -------------------------------------------------------------------------------------------------------


TWO = "nodes: [{address: a, chief: true}, {address: b, ssh_config: x}, {address: c, ssh_config: y}]\n"


@pytest.mark.parametrize(
    ("text", "engine", "message"),
    [
        (UNEVEN.replace("username: me, ", ""), "horovod", "gpus differ (10.0.0.1: [0, 1]; 10.0.0.2: [3])"),
        (UNEVEN, "horovod", "horovodrun takes no user name for ssh"),
        (UNEVEN, "mpi", "gpus differ (10.0.0.1: [0, 1]; 10.0.0.2: [3])"),
        (THREE.replace("/keys/id", "/my keys/id"), "mpi", "mpirun takes no key file whose path has spaces"),
        (TWO + "ssh: {x: {port: 1}, y: {port: 2}}", "mpi", "the ssh groups differ (b: 1; c: 2)"),
        (
            TWO + "ssh: {x: {shared_envs: {V: 1}}, y: {shared_envs: {V: 2}}}",
            "torch",
            "shared_envs give V several values ('1', '2')",
        ),
        (THREE, "slurm", "unknown engine 'slurm'; known: horovod, torch, mpi"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(tmp_path, text, engine, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(grace.ConfigError) as error:
        command(Resources.load(tmp_path / "c.yaml"), engine, ["python", "a.py"])
    assert message in str(error.value)


def test_groups_that_say_the_same_are_used(tmp_path):
    (tmp_path / "c.yaml").write_text(
        TWO + "ssh: {x: {username: me, python_venv: /v}, y: {username: me, python_venv: /v}}"
    )
    (line,) = command(Resources.load(tmp_path / "c.yaml"), "mpi", ["python", "a.py"])
    assert "--mca plm_rsh_args '-l me' -x GRACE_BACKEND /v/bin/python a.py" in str(line)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "--", "python"], "grace: ranks must be at least 1, not 0"),
        (["-r", "nowhere.yaml", "--", "python"], "grace: nowhere.yaml: cannot be read: No such file or directory"),
        (["--strategy", "nowhere.json", "--", "python"], "grace: there is no strategy file nowhere.json"),
        (["--engine", "jax", "--", "python"], "grace: unknown engine 'jax'; known: horovod, torch, mpi"),
        (["--engine", "torch", "--", "/no/python", "a"], "grace: cannot start /no/python: No such file or directory"),
        (["--engine", "mpi", "--", "./nothing"], "grace: cannot start ./nothing: No such file or directory"),
        (["--engine", "mpi", "--", sys.executable, "no.py"], "grace: cannot start no.py: there is no such file in "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message):
    out, err = launched(*args, code=2)
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


# -- runs -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import grace
how, out = sys.argv[1:]
open(f"{out}/{os.getpid()}.pid", "w").close()
backend = grace.init()
with open(f"{out}/{grace.rank()}.rank", "w") as file:
    print(backend.name, grace.rank(), grace.size(), os.environ.get("GRACE_STRATEGY"), os.environ.get("A"), file=file)
if how == "wait":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that does not listen
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
ENGINES = ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]


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
    return [path.stem for path in folder.glob("*.pid") if Path("/proc", path.stem).exists()]


def nobody_left(folder, within=5):
    until = time.monotonic() + within
    while alive(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return list(folder.glob("*.pid")) and not alive(folder)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_know_their_number_and_the_strategy(script, tmp_path, engine):
    need(engine)
    (tmp_path / "s.json").write_text("{}")
    python = str(BIN / "python")
    args = ["-n", "2", "--engine", engine, "--strategy", "s.json", "--", python, str(script), "end", str(tmp_path)]
    out = launched(*args, folder=tmp_path)[0]
    for rank in range(2):
        words = (tmp_path / f"{rank}.rank").read_text().split()
        assert words == [engine, str(rank), "2", str(tmp_path.resolve() / "s.json"), "None"]
        assert f"said by {rank}" in out
    assert nobody_left(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("exit", 7, "rank 1 ended with exit code 7"),
        ("raise", 1, "rank 1 ended with exit code 1"),
        ("kill", 137, "rank 1 was ended by SIGKILL (exit code 137)"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_dies_ends_the_job_with_its_number_and_exit_code(script, tmp_path, engine, how, code, message):
    need(engine)
    args = ["-n", "2", "--engine", engine, "--", str(BIN / "python"), str(script), how, str(tmp_path)]
    err = launched(*args, code=code)[1]
    assert err.splitlines()[-1] == f"grace launch: {message}; the others were ended"
    assert nobody_left(tmp_path)


@pytest.mark.ranks
def test_a_launcher_that_names_no_rank_is_named():
    err = launched("--engine", "torch", "--", sys.executable, "-m", code=2)[1]
    assert err.splitlines()[-1] == (
        f"grace launch: {Path(sys.executable).name} ended with exit code 2; no rank is named"
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("torch", signal.SIGTERM),
        ("torch", signal.SIGKILL),
        *(pytest.param(name, signal.SIGINT, marks=pytest.mark.slow) for name in NAMES[1:]),
        *(pytest.param(name, signal.SIGKILL, marks=pytest.mark.slow) for name in NAMES[1:]),
    ],
)
def test_ending_the_command_leaves_nobody_behind(script, tmp_path, engine, number):
    need(engine)
    args = ["-n", "2", "--engine", engine, "--", str(BIN / "python"), str(script), "wait", str(tmp_path)]
    with open(tmp_path / "err", "w+") as err:  # no pipe, which ranks would hold open
        process = subprocess.Popen([*GRACE, *args], env=env(), stdout=subprocess.DEVNULL, stderr=err)
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*.rank"))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)
        assert len(alive(tmp_path)) == 2
        process.send_signal(number)
        process.wait(60)
        if number == signal.SIGKILL:
            assert nobody_left(tmp_path, within=30)  # ranks and launchers get a while to end by themselves
            return
    assert process.returncode == 130
    assert (tmp_path / "err").read_text().splitlines()[-1] == "grace launch: interrupted; the ranks are ended"
    assert not alive(tmp_path)


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
    out = launched(*args, "--", str(BIN / "python"), str(script), "end", str(tmp_path), PATH=path)[0]
    for rank in range(3):
        assert (tmp_path / f"{rank}.rank").read_text() == f"torch {rank} 3 None it's here\n"
        assert f"said by {rank}" in out


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [1, 2], ids=["on the chief", "on the other node"])
def test_one_nodes_failure_ends_the_others(tmp_path, cluster, rank):
    args, path = cluster
    script = tmp_path / "a.py"
    script.write_text(SCRIPT.replace("grace.rank() == 1", f"grace.rank() == {rank}"))
    err = launched(*args, "--", str(BIN / "python"), str(script), "exit", str(tmp_path), PATH=path, code=7)[1]
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
    args = [*args[:2], "--engine", engine, "--", str(BIN / "python"), "-c", "1"]
    err = launched(*args, PATH=path, code=1 if engine == "horovod" else 255)[1]
    unreached = "grace launch: node nobody.example cannot be reached by ssh: Name or service not known"
    assert err.splitlines()[-1] == unreached


# -- what launchers say -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 3.", (1, 3)),
        ("  Process name: [[30297,1],1]\n  Exit code:    7\n", (1, 7)),
        ("first process to do so was:\nProcess name: 12\nExit code: 137\n", (12, 137)),
        ("process rank 1 with PID 0 on node vm exited on signal 11 (Segmentation fault).", (1, -11)),
        (
            "Root Cause (first observed failure):\r\n[0]:\r\n  host      : a\r\n  rank      : 5 (local_rank: 1)\r\n"
            "  exitcode  : -9 (pid: 1)\r\n",
            (5, -9),
        ),
        (
            "MPI_ABORT was invoked on rank 0 in communicator A\nwith errorcode 1.\n\n"
            "process rank 1 with PID 0 on node vm exited on signal 9 (Killed).",
            (1, -9),
        ),
        (
            "grace: ValueError on rank 1 ends all ranks\n"
            "MPI_ABORT was invoked on rank 0 in communicator A\nwith errorcode 1.",
            (1, 1),
        ),
        ("nothing of it", None),
    ],
)
def test_the_first_failure_is_read_from_what_a_launcher_says(said, expected):
    assert first_failure(said) == expected
