"""``grace launch``: the command lines, and what it refuses; faults/test_launched.py runs them."""

import importlib.util
import os
import shlex
import subprocess
import sys

import pytest
import yaml

import grace
from grace.launch import preparing
from grace.launch.cluster import Resources
from grace.launch.command_lines import command
from grace.launch.supervisor import first_failure
from tests.support.command import grace_command

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
ssh: {default: {username: me, key_file: /my keys/id, python_venv: ~/my venv}}
"""


def launched(*args, folder=None, code=0):
    """Run the command; returns (stdout, stderr)."""
    ended, out, err = grace_command("launch", *args, folder=folder)
    assert ended == code, out + err
    return out, err


def lines(folder, text, *args):
    (folder / "cluster.yaml").write_text(text)
    program = ["--", "python", "my train.py", "--name", "it's"]
    out = launched("-r", "cluster.yaml", "--dry-run", *args, *program, folder=folder)[0]
    return out.replace(str(folder.resolve() / "cluster.yaml"), "CLUSTER").splitlines()


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
            "env CUDA_VISIBLE_DEVICES=0,1 GRACE_RESOURCES=CLUSTER python -m torch.distributed.run --standalone "
            f"--nproc-per-node 2 {PROGRAM}",
        ),
        (
            "horovod",
            f"env GRACE_RESOURCES=CLUSTER horovodrun -np 2 -H 10.0.0.1:2 env CUDA_VISIBLE_DEVICES=0,1 python {PROGRAM}",
        ),
        (
            "mpi",
            "env GRACE_BACKEND=mpi CUDA_VISIBLE_DEVICES=0,1 GRACE_RESOURCES=CLUSTER mpirun -np 2 "
            f"-H 10.0.0.1:2 --bind-to none --map-by slot -x GRACE_BACKEND -x CUDA_VISIBLE_DEVICES "
            f"-x GRACE_RESOURCES python {PROGRAM}",
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
        f"env A=... GRACE_STRATEGY={path} GRACE_RESOURCES=CLUSTER horovodrun -np 4 -H 10.0.0.1:2,10.0.0.2:2 "
        f"-p 2222 -i /keys/id env CUDA_VISIBLE_DEVICES=0,1 python {PROGRAM}"
    ]
    assert lines(tmp_path, THREE, "--engine", "mpi", *strategy) == [
        f"env GRACE_BACKEND=mpi A=... CUDA_VISIBLE_DEVICES=0,1 GRACE_STRATEGY={path} GRACE_RESOURCES=CLUSTER "
        "mpirun -np 4 -H 10.0.0.1:2,10.0.0.2:2 --bind-to none --map-by slot --mca plm_rsh_args '-p 2222 -i /keys/id' "
        f"-x GRACE_BACKEND -x A -x CUDA_VISIBLE_DEVICES -x GRACE_STRATEGY -x GRACE_RESOURCES python {PROGRAM}"
    ]


@pytest.mark.parametrize("engine", ["torch", "horovod", "mpi"])
def test_a_strategy_that_the_ranks_build(engine):
    spec = "auto(methods=['fp16'], replan=500)"
    (line,) = launched("--engine", engine, "--strategy", spec, "--dry-run", "--", "python", "a.py")[0].splitlines()
    assert f"GRACE_STRATEGY={spec}" in shlex.split(line)


def test_what_is_copied_is_shown_first(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "b.py").touch()
    plain = THREE.replace(", shared_envs: {A: x y}", "")
    said = lines(tmp_path, plain, "--engine", "torch", "--copy", "data/", "--copy", "b.py")
    folder = tmp_path.resolve()
    assert said[0].startswith(f"ssh -o BatchMode=yes -p 2222 -i /keys/id 10.0.0.2 'mkdir -p -- {folder} && ")
    assert shlex.split(said[1])[-3:] == [f"{folder}/data", f"{folder}/b.py", f"10.0.0.2:{folder}/"]
    assert len(said) == 4


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
        f"env CUDA_VISIBLE_DEVICES=0,1 GRACE_STRATEGY={path} "
        f"python -m torch.distributed.run --nnodes 2 --node-rank 0 --nproc-per-node 2 {meet}"
    )
    ssh = ["ssh", "-tt", "-o", "BatchMode=yes", "-p", "22", "-i", "/my keys/id", "me@10.0.0.2"]
    assert second.argv[:-1] == ssh
    assert second.argv[-1] == (
        f"cd '{tmp_path.resolve()}/it'\"'\"'s here' && . ~/'my venv'/bin/activate && "
        f"env CUDA_VISIBLE_DEVICES=3 GRACE_STRATEGY={path} "
        f"python -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1 {meet}"
    )
    assert second.environment == {}


AUTODIST = """
nodes:
  - {address: 10.0.0.1, cpus: [0], gpus: [0, 1], chief: true}
  - {address: 10.0.0.2, gpus: [0, 1], ssh_config: one}
  - {address: 10.0.0.3, gpus: [0], ssh_config: two}
ssh:
  one: {key_file: /keys/id, username: me, python_venv: source /home/me/venv/bin/activate}
  two:
    username: you
    python_venv: 'source /opt/conda.sh;conda activate autodist'
    shared_envs: {LIBS: '$LIBS:/usr/local/cuda/lib64'}
"""


def test_a_file_as_autodist_has_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBS", "/here")
    monkeypatch.chdir(tmp_path)
    chief, one, two = command(Resources.from_document(yaml.safe_load(AUTODIST)), "torch", ["python", "a.py"])
    assert chief.environment == {"LIBS": "/here:/usr/local/cuda/lib64", "CUDA_VISIBLE_DEVICES": "0,1"}
    scripts = [shlex.split(node.argv[-1].partition(" && ")[2]) for node in (one, two)]
    entered = ("source /home/me/venv/bin/activate", "source /opt/conda.sh;conda activate autodist")
    for script, line in zip(scripts, entered, strict=True):
        assert script[:2] == ["bash", "-c"]
        assert f"{{ {line}" in script[2].splitlines()
        assert script[2].splitlines()[-1] == 'exec "$@"'
    assert scripts[0][3:7] == ["grace-launch", "env", "CUDA_VISIBLE_DEVICES=0,1", "python"]
    assert two.env_exports == """export LIBS="${LIBS}":/usr/local/cuda/lib64"""


def run_prepared(resources, engine, but):
    """Start a program as the engine's launcher starts it on each node, and return what it prints."""
    (launcher,) = command(
        Resources.from_document(resources), engine, ["sh", "-c", "echo $HELD $MADE $GRACE_SHARED_ENVS"]
    )
    argv = launcher.argv[launcher.argv.index("bash") :]
    argv[2] = argv[2].replace(preparing.this_machine(), but)
    env = {**os.environ, "HELD": "node's", **launcher.environment}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("engine", ["horovod", "mpi"])
def test_launchers_of_all_nodes_prepare_them_alike_but_not_the_chief(engine):
    nodes = [{"address": "a", "chief": True}, {"address": "b", "ssh_config": "x"}]
    ssh = {"setup": "export MADE=by_setup", "shared_envs": {"HELD": "$HELD:more"}}
    resources = {"nodes": nodes, "ssh": {"x": ssh}}
    here = preparing.this_machine()
    assert run_prepared(resources, engine, but="another") == "node's:more by_setup"
    assert run_prepared(resources, engine, but=here) == "node's:more"
    nodes[0]["ssh_config"] = "x"
    assert run_prepared(resources, engine, but=here) == "node's:more by_setup"


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
    from grace.launch.command_lines import default_engine

    for installed, engine in (({"horovod", "torch"}, "horovod"), ({"torch"}, "torch"), (set(), "mpi")):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, here=installed: name if name in here else None)
        assert default_engine() == engine


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
            TWO + "ssh: {x: {shared_envs: {V: secret}}, y: {shared_envs: {V: secret2}}}",
            "torch",
            "shared_envs give V several values, and",
        ),
        (TWO + "ssh: {x: {setup: [a]}, y: {setup: [b]}}", "horovod", "the ssh groups differ (b: ['a']; c: ['b'])"),
        (
            TWO.replace("true", "true, ssh_config: z") + "ssh: {x: {setup: [a]}, y: {setup: [a]}, z: {setup: [b]}}",
            "mpi",
            "the chief's ssh group has other lines (['b']) than the others' (['a'])",
        ),
        (THREE, "slurm", "unknown engine 'slurm'; known: horovod, torch, mpi"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(tmp_path, text, engine, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(grace.ConfigError) as error:
        command(Resources.load(tmp_path / "c.yaml"), engine, ["python", "a.py"])
    assert message in str(error.value)
    assert "secret" not in str(error.value)  # values of variables


def test_groups_that_say_the_same_are_used(tmp_path):
    (tmp_path / "c.yaml").write_text(
        TWO + "ssh: {x: {username: me, python_venv: /v}, y: {username: me, python_venv: /v}}"
    )
    (line,) = command(Resources.load(tmp_path / "c.yaml"), "mpi", ["python", "a.py"])
    assert "--mca plm_rsh_args '-l me' -x GRACE_BACKEND /v/bin/python a.py" in str(line)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "0", "--", "python"], "grace: ranks must be between 1 and 65535, not 0"),
        (["-n", "100000000", "--", "python"], "grace: ranks must be between 1 and 65535, not 100000000"),
        (["-r", "nowhere.yaml", "--", "python"], "grace: nowhere.yaml: cannot be read: No such file or directory"),
        (["--strategy", "nowhere.json", "--", "python"], "grace: there is no strategy file nowhere.json"),
        (["--strategy", "no/where(x=1)", "--", "python"], "grace: there is no strategy file no/where(x=1)"),
        (["--strategy", "auot", "--", "python"], "grace: unknown builder 'auot' (did you mean 'auto'?)"),
        (["--strategy", "auto(quality=bad)", "--", "python"], "grace: quality must be one of 'exact', 'half', "),
        (["--engine", "jax", "--", "python"], "grace: unknown engine 'jax'; known: horovod, torch, mpi"),
        (["--engine", "torch", "--", "/no/python", "a"], "grace: cannot start /no/python: No such file or directory"),
        (
            ["-r", "two.yaml", "--copy", "no.py", "--engine", "torch", "--", "python", "-c", "1"],
            "grace: cannot copy no.py to the nodes: there is no such file in ",
        ),
        (["--engine", "mpi", "--", "./nothing"], "grace: cannot start ./nothing: No such file or directory"),
        (["--", "/tmp"], "grace: cannot start /tmp: it is a folder"),
        (["--engine", "mpi", "--", sys.executable, "no.py"], "grace: cannot start no.py: there is no such file in "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, args, message):
    (tmp_path / "two.yaml").write_text(THREE)
    out, err = launched(*args, folder=tmp_path, code=2)
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


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
