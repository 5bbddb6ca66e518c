"""Fewer ranks than were started: refused, whichever engine and launcher, unless the user has named the engine."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import grace
from grace.backends import launchers
from tests.support.engine_pools import available, command, environment
from tests.support.launchers import LAUNCHERS
from tests.support.limits import HANGS

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def group_of_one():
    """A process group of one rank, which the program has made."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def started_by(monkeypatch, launcher):
    for key, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(key, value)


def optimizer():
    model = torch.nn.Linear(2, 1)
    return grace.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, compressor="fp16")


def hooked():
    return grace.torch.register_ddp_hook(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))


def over_a_group():
    model = torch.nn.Linear(2, 1)
    return grace.DistributedOptimizer(torch.optim.SGD(model.parameters()), model, process_group=dist.group.WORLD)


BEGIN = {"init": grace.init, "optimizer": optimizer, "group": over_a_group, "rank": grace.rank, "hook": hooked}


@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_left_over_process_group_of_one_rank_is_refused(monkeypatch, group_of_one, launcher, begin):
    started_by(monkeypatch, launcher)
    with pytest.raises(grace.ConfigError) as refused:
        begin()
    said = str(refused.value)
    assert said.startswith(launcher)
    assert " 2 ranks (" in said
    assert "torch.distributed sees 1 (torch.distributed (gloo), rank 0 of 1)" in said
    assert "leave out torch.distributed.init_process_group()" in said
    assert "grace.init('torch'), or GRACE_BACKEND=torch" in said
    assert not grace.is_initialized()


def test_who_names_the_engine_trains_alone(monkeypatch, group_of_one):
    started_by(monkeypatch, "mpirun (Open MPI)")
    assert grace.init("torch").size == 1
    assert grace.init().size == grace.size() == 1
    optimizer().close()
    hooked().close()
    grace.shutdown()
    monkeypatch.setenv("GRACE_BACKEND", "torch")
    assert grace.init().size == 1
    hooked().close()


def test_as_many_ranks_or_more_than_were_started_are_taken(monkeypatch, group_of_one):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # one task for each node, which starts ranks itself
    assert grace.init().size == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "none of your business")
    grace.shutdown()
    assert grace.init().size == 1


def test_a_group_that_is_made_after_grace_has_joined_alone_is_not_overlooked(monkeypatch):
    assert grace.init().name == "local"
    monkeypatch.setattr(launchers, "initialized_sizes", lambda: {"torch": 2})
    for call in (grace.rank, grace.size, optimizer):
        with pytest.raises(grace.ConfigError) as refused:
            call()
        said = str(refused.value)
        assert said.startswith(
            "this program has initialized torch.distributed with 2 ranks, and Grace has joined this "
        )
        assert "call grace.init() after torch.distributed.init_process_group()" in said
    assert grace.init("local").name == "local"  # chosen
    assert grace.size() == 1


def test_of_two_engines_the_larger_is_not_overlooked(monkeypatch, group_of_one):
    monkeypatch.setattr(launchers, "initialized_sizes", lambda: {"torch": 1, "mpi": 4})
    with pytest.raises(
        grace.ConfigError, match=r"initialized MPI with 4 ranks, .* which engine counts: grace.init\('mpi'\)"
    ):
        grace.init()


@pytest.mark.parametrize("launcher", ["torchrun", "Ray"])
def test_torch_distributed_is_refused_for_tensorflow(monkeypatch, launcher):
    started_by(monkeypatch, launcher)
    said = (
        rf"^{launcher} has started 2 ranks \(RANK=0, .* moves no tensors of TensorFlow: start the program by horovodrun"
    )
    for options in ({}, {"backend": "torch"}):
        with pytest.raises(grace.ConfigError, match=said):
            grace.init(framework="tensorflow", **options)


def test_where_tensorflow_alone_is_imported_its_tensors_are_meant(monkeypatch):
    started_by(monkeypatch, "torchrun")
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setitem(sys.modules, "tensorflow", sys)
    with pytest.raises(grace.ConfigError, match="moves no tensors of TensorFlow"):
        grace.init()


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}', 2),
        ('{"cluster": {"worker": ["a:1"]}}', 0),
        ("{}", 0),
        ("[" * 100_000, 0),
        ('{"cluster": 3}', 0),
    ],
    ids=["two", "one", "none", "deep", "number"],
)
def test_workers_of_tf_distribute_are_not_ranks(monkeypatch, text, workers):
    monkeypatch.setenv("TF_CONFIG", text)
    if not workers:
        assert grace.init().name == "local"
        return
    with pytest.raises(grace.ConfigError, match=rf"TF_CONFIG names {workers} workers: .* horovodrun or mpirun"):
        grace.init()


def test_a_trainer_that_knows_one_of_several_ranks_is_refused(monkeypatch):
    wrap = pytest.importorskip("grace.integrations.wrapped").wrap
    started_by(monkeypatch, "mpirun (Open MPI)")
    arguments = torch.nn.Linear(2, 1), 1, [], "strict", 'Give Trainer(strategy="ddp")', ""
    with pytest.raises(grace.ConfigError, match=r"has started 2 ranks .*, and the trainer knows 1: .* Give Trainer"):
        wrap(*arguments)
    monkeypatch.setenv("GRACE_BACKEND", "local")
    with pytest.warns(UserWarning, match="one process exchanges no gradients"):
        wrap(*arguments)


# Each line is written in one piece, since two ranks write to one pipe.
SCRIPT = """
import horovod.torch as hvd, torch, grace
hvd.init()
model = torch.nn.Linear(3, 2)
def wrapped():
    return grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=.1), model.named_parameters(), "topk")
try:
    wrapped()
except grace.ConfigError as error:
    print(f"REFUSED {error}\\n", end="", flush=True)
grace.init("horovod")
wrapped()
print(f"ALONE {grace.init().describe()}\\n", end="", flush=True)
"""


@pytest.mark.ranks
@pytest.mark.skipif(not available("mpirun-horovod"), reason="Horovod is not installed (make horovod)")
def test_a_script_for_horovod_under_torchrun_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        command("torchrun", 2, str(script)), env=environment(), capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"REFUSED torchrun has started 2 ranks (RANK={rank}, WORLD_SIZE=2" in done.stdout
    assert done.stdout.count("and Horovod sees 1 (Horovod (") == 2
    assert done.stdout.count("leave out hvd.init(), so that grace.init() joins torch.distributed under torchrun") == 2
    assert done.stdout.count("start the program by horovodrun or mpirun") == 2
    assert done.stdout.count("ALONE Horovod (") == 2
