"""grace.init, rank, size and shutdown: which run this process joins."""

import importlib.util
import re
import subprocess
import sys

import pytest

import grace
from grace.backends import launchers
from grace.backends.topology import MPI_SIZES
from tests.support.engine_pools import available, command, environment
from tests.support.launchers import LAUNCHERS, TORCHS
from tests.support.limits import HANGS

pytestmark = pytest.mark.usefixtures("no_launcher")


def program(*command: str, **variables: str) -> tuple[str, str]:
    """Run a Python program of its own, and return what it prints."""
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo", **variables}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_without_a_launcher_the_run_is_local_and_nothing_is_said(capsys):
    assert (grace.rank(), grace.size()) == (0, 1)  # they join by themselves
    first = grace.init()
    assert first is grace.init() is grace.init("local")
    assert first.describe() == "local, rank 0 of 1"
    grace.shutdown()
    grace.shutdown()
    assert grace.init() is not first
    assert capsys.readouterr().err == ""


def test_an_unknown_backend_is_refused_with_those_that_are_known():
    with pytest.raises(grace.ConfigError, match="unknown backend 'nccl'; known: auto, torch, horovod, mpi, local"):
        grace.init("nccl")


def test_a_backend_of_ones_own_is_used_as_it_is():
    backend = type(grace.init("local"))()
    assert grace.init(backend) is backend
    assert grace.backends.runtime.current() is backend


def test_what_is_no_backend_is_refused_as_such():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    with pytest.raises(grace.ConfigError, match=r"takes a Backend, as grace.init\('mpi'\) returns one, not 'mpi'"):
        grace.DistributedOptimizer(optimizer, backend="mpi")


def test_a_backend_of_ones_own_waits_as_long_as_the_user_says(monkeypatch):
    class Mine(grace.core.backend.LocalBackend):
        pass

    assert grace.init(Mine()).timeout == 600
    assert grace.init(Mine(), timeout=40).timeout == 40
    with pytest.raises(grace.ConfigError, match="timeout='-1': give a number of seconds above 0"):
        grace.init(Mine(), timeout=-1)
    grace.shutdown()
    monkeypatch.setenv("GRACE_TIMEOUT", "90")
    assert grace.init(Mine()).timeout == 90
    patient = Mine()
    patient.timeout = 3600.0
    assert grace.init(patient).timeout == 3600
    grace.shutdown()
    assert grace.init("local", timeout=50).timeout == 50


def free_port() -> str:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.ranks
def test_torchruns_environment_joins_torch_distributed_and_shutdown_leaves_it():
    script = """
import grace
print(type(grace.init()).__name__, grace.rank(), grace.size(), grace.init() is grace.init("torch"))
import torch.distributed as dist
print(dist.is_initialized())
grace.shutdown()
print(dist.is_initialized())
"""
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    said, _ = program("-c", script, SLURM_NTASKS="2", **launcher)  # another launcher's counts less
    assert said.splitlines() == ["TorchBackend 0 1 True", "True", "False"]


@pytest.mark.ranks
def test_an_initialized_process_group_is_used_and_left_standing(tmp_path):
    script = f"""
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
import grace
print(type(grace.init()).__name__, grace.rank(), grace.size())
grace.shutdown()
print(dist.is_initialized())
dist.destroy_process_group()
import time
time.sleep(0.3)
"""
    said, _ = program("-c", script, OMPI_COMM_WORLD_SIZE="1")
    assert said.splitlines() == ["TorchBackend 0 1", "True"]


@pytest.mark.ranks
def test_torchrun_starts_ranks_that_train_together(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch, grace
grace.init()
torch.manual_seed(grace.rank())
model = torch.nn.Linear(20, 10)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt = grace.DistributedOptimizer(opt, model.named_parameters(), "topk(ratio=0.1)")
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(4, 20)).square().mean().backward()
    opt.step()
open(f"{__file__}.{grace.rank()}of{grace.size()}", "w").write(repr(model.weight.tolist()))
"""
    )
    _, err = program(*command("torchrun", 2, str(script))[1:])
    first, second = (tmp_path / f"train.py.{rank}of2" for rank in range(2))
    assert first.read_text() == second.read_text()
    (told,) = [line for line in err.splitlines() if line.startswith("grace: ")]
    assert re.fullmatch(
        r"grace: torch.distributed \(gloo\), rank 0 of 2; started by torchrun: RANK=0, WORLD_SIZE=2, "
        r"MASTER_ADDR=\S+, MASTER_PORT=\d+ \(GRACE_QUIET=1 hides this\)",
        told,
    )


@pytest.mark.ranks
def test_ranks_that_multiprocessing_forks_say_that_they_leave(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        """
import multiprocessing, os
def rank(number):
    import grace
    os.environ["RANK"] = str(number)
    backend = grace.init()
    backend.allgather_object("a question")
    if number == 0:
        try:
            backend.allgather_object("another question")
        except grace.ExchangeError as error:
            print(error)
fork = multiprocessing.get_context("fork")
ranks = [fork.Process(target=rank, args=(number,)) for number in range(2)]
[each.start() for each in ranks]
[each.join() for each in ranks]
print([each.exitcode for each in ranks])
"""
    )
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    said, _ = program(str(script), **launcher)
    assert "rank 1 has left (its program ended, or called grace.shutdown())" in said
    assert said.splitlines()[-1] == "[0, 0]"


@pytest.mark.ranks
@pytest.mark.parametrize("start", ["torch", "fork"])
def test_ranks_that_multiprocessing_starts_say_why_they_fail(tmp_path, start):
    """multiprocessing calls no excepthook."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import os, sys
import torch.multiprocessing as mp
def rank(number):
    import grace
    os.environ["RANK"] = str(number)
    backend = grace.init()
    backend.allgather_object("a question")
    if number == 1:
        raise ValueError("a bug of the program")
    try:
        backend.allgather_object("another question")
    except grace.ExchangeError as error:
        print(error, flush=True)
if {start!r} == "torch":
    try:
        mp.start_processes(rank, nprocs=2, start_method="fork", join=False).join(grace_period=20)
    except mp.ProcessRaisedException:
        sys.exit()
ranks = [mp.get_context("fork").Process(target=rank, args=(number,)) for number in range(2)]
[each.start() for each in ranks]
[each.join() for each in ranks]
"""
    )
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    said, told = program(str(script), **launcher)
    assert "rank 1 failed: ValueError: a bug of the program" in said
    assert "grace: rank 1 failed first: ValueError: a bug of the program" in told


@pytest.mark.ranks
def test_a_worker_that_a_rank_has_spawned_does_not_join_the_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        """
import multiprocessing
import grace
if __name__ == "__main__":
    backend = grace.init()
    if grace.rank() == 1:
        with multiprocessing.get_context("spawn").Pool(1) as workers:
            try:
                workers.apply(grace.rank)
            except grace.ConfigError as error:
                print(error)
            print(workers.apply(grace.init, ["local"]).size)
    backend.allgather_object("both are here")
"""
    )
    said, _ = program(*command("torchrun", 2, str(script))[1:], GRACE_TIMEOUT="10")
    refused, size = said.splitlines()
    assert refused.startswith("rank 1 has started this process, which is no rank, by multiprocessing")
    assert size == "1"


@pytest.mark.ranks
def test_a_process_group_that_is_made_anew_takes_the_place_of_the_former_one(tmp_path):
    script = tmp_path / "cells.py"
    script.write_text(
        f"""
import os, sys
import torch.distributed as dist
import grace
number = int(os.environ["RANK"])
for cell, rank in enumerate((number, 1 - number, 1 - number)):
    store = f"file://{tmp_path}/store{{cell}}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    if "init" in sys.argv or cell == 0:
        grace.init()
    assert grace.allgather_object(grace.rank()) == [0, 1]
    assert grace.rank() == rank
    dist.destroy_process_group()
    assert (grace.rank(), grace.size()) == (rank, 2)
engine = grace.init()
assert engine.allgather_object(grace.rank()) == [0, 1] and grace.rank() == number
"""
    )
    for way in ("init", "no more"):
        program(*command("torchrun", 2, str(script), way)[1:], GRACE_TIMEOUT="30")
        for store in tmp_path.glob("store*"):
            store.unlink()


def without(monkeypatch, *packages):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


@pytest.mark.parametrize("key", MPI_SIZES)
def test_mpirun_without_horovod_and_mpi4py_names_the_line_that_installs_mpi(monkeypatch, key):
    without(monkeypatch, "horovod", "mpi4py")
    monkeypatch.setenv(key, "4")
    said = rf"{key}=4; neither Horovod nor MPI's package .* mpi4py is not installed; .* pip install .*\[mpi\]"
    with pytest.raises(grace.MissingExtraError, match=said):
        grace.init()
    with pytest.raises(grace.MissingExtraError, match=r"^mpi4py is not installed"):
        grace.init("mpi")


def test_horovodrun_without_horovod_names_what_builds_it(monkeypatch):
    without(monkeypatch, "horovod")
    monkeypatch.setenv("HOROVOD_RANK", "0")
    with pytest.raises(grace.MissingExtraError, match=r"`make horovod` .* builds and installs it"):
        grace.init()


@pytest.mark.parametrize("installed", [True, False])
def test_under_mpirun_horovod_comes_before_mpi(monkeypatch, installed):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    assert grace.backends.runtime._detect() == ("horovod" if installed else "mpi")


def test_the_environment_may_name_the_backend(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("GRACE_BACKEND", "local")
    assert grace.init().name == "local"
    monkeypatch.setenv("GRACE_BACKEND", "nccl")
    with pytest.raises(grace.ConfigError, match="GRACE_BACKEND=nccl: unknown backend"):
        grace.init()


@pytest.mark.parametrize(("launcher", "variables"), LAUNCHERS.items(), ids=LAUNCHERS)
def test_what_was_found_is_said_once_by_rank_0(monkeypatch, capsys, launcher, variables):
    for key, value in {**variables, **(TORCHS if "RANK" in variables else {})}.items():
        monkeypatch.setenv(key, value)
    backend = grace.init("local")
    assert capsys.readouterr().err == ""  # it was chosen
    monkeypatch.setattr(launchers, "_announced", False)
    backend.rank = 1
    launchers.announce(backend)
    backend.rank = 0
    for key in ("GRACE_QUIET", "GRACE_BACKEND"):
        monkeypatch.setenv(key, "1")
        launchers.announce(backend)
        monkeypatch.delenv(key)
    assert capsys.readouterr().err == ""
    launchers.announce(backend)
    launchers.announce(backend)
    told = capsys.readouterr().err
    key, value = next(iter(variables.items()))
    assert told.startswith(f"grace: local, rank 0 of 1; started by {launcher}: {key}={value}")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torchrun"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but not RANK, MASTER_ADDR, MASTER_PORT: torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 and WORLD_SIZE=2 are set, but not MASTER_ADDR, MASTER_PORT: "),
        ({**TORCHS, "WORLD_SIZE": None}, "RANK=0 is set, but not WORLD_SIZE: torchrun"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2 is set, but not HOROVOD_RANK: horovodrun"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4, but SLURM_STEP_NUM_TASKS is not set: "),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, "SLURM_NTASKS=4, but SLURM_STEP_NUM_TASKS is 1: "),
    ],
)
def test_half_of_a_launchers_variables_is_refused(monkeypatch, variables, said):
    for key, value in variables.items():
        monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key, raising=False)
    with pytest.raises(grace.ConfigError) as caught:
        grace.init()
    assert str(caught.value).startswith(said)
    assert "GRACE_BACKEND=local" in str(caught.value)
    monkeypatch.setenv("GRACE_BACKEND", "local")
    assert grace.init().size == 1


@pytest.mark.parametrize(
    "variables", [{"MASTER_ADDR": "10.0.0.1"}, {"RANK": "0", "WORLD_SIZE": "1"}, *({key: "1"} for key in MPI_SIZES)]
)
def test_what_says_nothing_of_several_ranks_is_one_process(monkeypatch, variables):
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    assert grace.init().name == "local"


@pytest.mark.ranks
@pytest.mark.skipif(not available("mpirun-mpi"), reason="mpi4py is not installed (make horovod)")
def test_one_process_joins_mpi_without_a_launcher():
    described, _ = program("-c", "import grace; print(grace.init('mpi').describe())")
    assert re.fullmatch(r"MPI \(.*\), rank 0 of 1\n", described)
