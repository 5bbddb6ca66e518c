"""Ray Train: Grace in its workers' loop, memories in its checkpoints, and what becomes of a run in which one fails."""

import importlib
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import grace
from tests.support import ROOT, warm
from tests.support.limits import HANGS
from tests.support.training import loss_of, net, sgd
from tests.test_pages import blocks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # where nothing else runs, half a minute
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process less
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
STEPS, DIES, SAVED = 6, 4, 3
REASON = "no rows in shard 7"


def of_ray(folder: str) -> list[int]:
    """The processes of the cluster whose files are in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (process / "cmdline").read_text() and int(process.name) != os.getpid():
                found.append(int(process.name))
        except (OSError, UnicodeDecodeError):
            continue
    return found


@pytest.fixture(scope="module")
def cluster():
    """A cluster of Ray's, of this machine, which leaves nothing behind."""
    import ray

    folder = tempfile.mkdtemp(prefix="grace-ray-", dir="/tmp")  # the names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", warm.REAL)  # Ray looks for its workers by their numbers
        interrupt = signal.getsignal(signal.SIGINT)
        try:
            ray.init(
                "local",
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80 << 20,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=folder,
            )
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import the tests
            yield Path(folder)
        finally:
            ray.shutdown()
            signal.signal(signal.SIGINT, interrupt)  # which Ray's trainer takes
            end = time.monotonic() + HANGS
            while of_ray(folder) and time.monotonic() < end:
                time.sleep(0.1)
            left = of_ray(folder)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, "Ray has left processes"


class Both:
    """The same training by DDP's hook, and by a distributed optimizer around a model that is not wrapped."""

    def __init__(self, wrapped):
        self.bare = net()
        self.hooked, self.plain = wrapped(net()), None
        self.plain = sgd(self.hooked.parameters())
        self.state = grace.torch.register_ddp_hook(self.hooked, "topk(ratio=0.1)", optimizer=self.plain)
        self.ours = grace.DistributedOptimizer(sgd(self.bare.parameters()), self.bare, compressor="powersgd(rank=1)")

    def step(self, number):
        for model, optimizer in ((self.hooked, self.plain), (self.bare, self.ours)):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()

    def saved(self):
        return {
            "models": [self.hooked.module.state_dict(), self.bare.state_dict()],
            "optimizers": [self.plain.state_dict(), self.ours.full_state_dict()],
            "grace": self.state.full_state_dict(),
        }

    def load(self, saved):
        for model, kept in zip((self.hooked.module, self.bare), saved["models"], strict=True):
            model.load_state_dict(kept)
        for optimizer, kept in zip((self.plain, self.ours), saved["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.state.load_state_dict(saved["grace"])


def uninterrupted():
    """Without Ray; what all ranks remember in the end."""
    both = Both(torch.nn.parallel.DistributedDataParallel)
    for number in range(STEPS):
        both.step(number)
    return both.saved()


def struck(config):
    """In a worker: rank 1 is killed at one step; when all have gone on from the checkpoint to the end, it fails."""
    import ray.train
    import ray.train.torch

    folder, rank = Path(config["folder"]), grace.init().rank
    both, first = Both(ray.train.torch.prepare_model), 0
    with pytest.raises(grace.ConfigError) as refused:
        grace.DistributedOptimizer(both.plain, both.hooked)
    (folder / f"refused{rank}").write_text(str(refused.value))
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as saved:
            both.load(torch.load(Path(saved, "state.pt"), weights_only=True))
        first = SAVED
    for number in range(first, STEPS):
        if number == DIES and not first and rank == 1:
            ray.train.get_all_reported_checkpoints()  # waits until Ray's controller has it
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            both.step(number)
        except Exception as error:
            (folder / "seen").write_text(f"{time.time()} {error}")
            raise
        if number + 1 in (SAVED, STEPS):
            kept = both.saved()
            with tempfile.TemporaryDirectory() as made:
                torch.save(kept, Path(made, "state.pt"))
                given = ray.train.Checkpoint.from_directory(made) if rank == 0 else None
                ray.train.report({"step": number + 1, "resumed": first}, checkpoint=given)
    torch.save(both.saved(), folder / f"end{rank}")
    if rank == 1:
        raise ValueError(REASON)


def same(one, other):
    """Whether two states have the same bits, but for the number of the save, and what is computed of that."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        kept = one.keys() - {"id", "checksum"}
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in kept)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_worker_that_dies_goes_on_bit_for_bit_and_one_that_fails_is_named(cluster, two_ranks, tmp_path):
    from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        struck,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="struck", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    )
    with pytest.raises(WorkerGroupError) as failed:
        trainer.fit()
    assert {rank: str(error) for rank, error in failed.value.worker_failures.items()} == {1: REASON}
    # what the other one saw when rank 1 was killed, and how soon
    when, _, seen = (tmp_path / "seen").read_text().partition(" ")
    assert "rank 1 was lost (killed, or its machine is gone)" in seen
    assert float(when) - float((tmp_path / "killed").read_text()) < 30
    # and where both came to
    ends = [torch.load(tmp_path / f"end{rank}", weights_only=True) for rank in range(2)]
    for ours, end in zip(two_ranks.run(uninterrupted), ends, strict=True):
        assert same(ours["models"], end["models"])
        assert same(ours["optimizers"], end["optimizers"])
        assert same(ours["grace"], end["grace"])
    assert same(ends[0]["models"], ends[1]["models"])
    # who wraps the optimizer of a model that Ray has wrapped is told what to do
    assert "under Ray Train: model = ray.train.torch.prepare_model(model)" in (tmp_path / "refused0").read_text()


EXAMPLE = ROOT / "examples" / "clusters" / "ray_digits.py"


EPOCHS = 5


def uncompressed():
    """What the example's loop reports at last without compression; what it asks of Ray stands here."""
    ray = MagicMock()
    ray.train.get_checkpoint.return_value = None
    ray.train.torch.prepare_model = torch.nn.parallel.DistributedDataParallel
    ray.train.torch.get_device.return_value = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("ray", ray), ("ray.train", ray.train), ("ray.train.torch", ray.train.torch)):
            patch.setitem(sys.modules, name, module)
        runpy.run_path(str(EXAMPLE))["train"]({"compressor": "none", "epochs": EPOCHS})
    return ray.train.report.call_args.args[0]


def test_the_example_trains(cluster, two_ranks, tmp_path, capsys, monkeypatch):
    import ray

    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    module = importlib.import_module(EXAMPLE.stem)
    ray.cloudpickle.register_pickle_by_value(module)  # as what is in the script that is run
    module.main(["--epochs", str(EPOCHS), "--compressor", "topk(ratio=0.1)", "--storage", str(tmp_path)])
    said = re.search(r"loss ([\d.]+), ([\d,]+) bytes sent", capsys.readouterr().out)
    loss, sent = float(said[1]), int(said[2].replace(",", ""))
    plain = two_ranks.run(uncompressed)[0]
    assert plain["loss"] < 0.1  # ln 10 is 2.3
    assert abs(loss - plain["loss"]) < 0.05
    assert 0 < sent < 0.3 * plain["sent_bytes"]


def test_the_pages_code_is_the_examples():
    """So what the page shows has been run."""
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    shown = [line for block in blocks(ROOT / "docs" / "clusters.md", "python") for line in block.splitlines() if line]
    place = 0
    for line in shown:
        assert line.strip() in lines[place:], f"{line!r} is not in {EXAMPLE.name}, or in another place"
        place = lines.index(line.strip(), place) + 1
