"""Ray Train: Grace in its workers' loop, memories in its checkpoints, and what becomes of a run in which one fails."""

import functools
import importlib
import json
import os
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
from tests.support.training import net, sgd
from tests.test_pages import blocks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process less
    "RAY_prestart_worker_first_driver": "0",  # only workers that are used
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # beside a busy program workers at 15, Ray's default, get no time at all
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
}
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


UNUSED = ("DatasetsCallback", "PlacementGroupCleanerCallback")
"""Parts of Ray Train that start a process each, seconds of CPU, which these tests do not need."""


@pytest.fixture(scope="module")
def cluster():
    """A cluster of Ray's, of this machine, which leaves nothing behind."""
    import ray
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    usual = DataParallelTrainer._create_default_callbacks

    def only_used(self):
        return [callback for callback in usual(self) if type(callback).__name__ not in UNUSED]

    folder = tempfile.mkdtemp(prefix="grace-ray-", dir="/tmp")  # the names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", warm.REAL)  # Ray looks for its workers by their numbers
        for unused in ("start_monitor", "start_log_monitor"):  # each takes seconds to start
            patch.setattr(ray._private.node.Node, unused, lambda node: None, raising=False)
        patch.setattr(DataParallelTrainer, "_create_default_callbacks", only_used)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
            for number, handler in handlers.items():  # Ray takes them
                signal.signal(number, handler)
            end = time.monotonic() + HANGS
            while of_ray(folder) and time.monotonic() < end:
                time.sleep(0.1)
            left = of_ray(folder)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, "Ray has left processes"


EXAMPLE = ROOT / "examples" / "clusters" / "ray_digits.py"
EPOCHS, DIES = 4, 2
COMPRESSOR = "topk(ratio=0.1)"


def struck(folder, config):
    """Run the example's loop in a worker. Rank 1 is killed after two epochs, and fails when all have gone on from the
    checkpoint to the end."""
    import ray.train
    import ray.train.torch

    rank, begins = grace.init().rank, ray.train.get_checkpoint() is None
    wrapped = ray.train.torch.prepare_model(net())
    with pytest.raises(grace.ConfigError) as refused:
        grace.DistributedOptimizer(sgd(wrapped.parameters()), wrapped)
    (folder / f"refused{rank}").write_text(str(refused.value))
    report, reports = ray.train.report, []

    def reported(metrics, checkpoint=None):
        report(metrics, checkpoint=checkpoint)
        reports.append(metrics)
        (folder / f"end{rank}").write_text(json.dumps(metrics))
        if begins and rank == 1 and len(reports) == DIES:
            ray.train.get_all_reported_checkpoints()  # waits until Ray's controller has it
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    ray.train.report = reported
    try:
        runpy.run_path(str(EXAMPLE))["train"](config)
    except Exception as error:
        (folder / "seen").write_text(f"{time.time()} {error}")
        raise
    finally:
        ray.train.report = report
    if rank == 1:
        raise ValueError(REASON)


def uninterrupted(compressor):
    """Run the example's loop where nothing fails, with a stand-in for Ray; return its last report and its last
    checkpoint."""
    ray = MagicMock()
    ray.train.get_checkpoint.return_value = None
    ray.train.torch.prepare_model = torch.nn.parallel.DistributedDataParallel
    ray.train.torch.get_device.return_value = torch.device("cpu")
    ray.train.Checkpoint.from_directory = lambda folder: torch.load(Path(folder, "state.pt"), weights_only=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("ray", ray), ("ray.train", ray.train), ("ray.train.torch", ray.train.torch)):
            patch.setitem(sys.modules, name, module)
        runpy.run_path(str(EXAMPLE))["train"]({"compressor": compressor, "epochs": EPOCHS})
    return ray.train.report.call_args.args[0], ray.train.report.call_args.kwargs["checkpoint"]


def same(one, other):
    """Return True if two states have the same bits, but for the number of the save, and what is computed of that."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        kept = one.keys() - {"id", "checksum"}
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in kept)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_an_example_whose_worker_dies_goes_on_bit_for_bit_and_one_that_fails_is_named(
    cluster, two_ranks, tmp_path, monkeypatch
):
    import ray
    from ray.train import WorkerGroupError

    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    module = importlib.import_module(EXAMPLE.stem)
    ray.cloudpickle.register_pickle_by_value(module)  # as what is in the script that is run
    monkeypatch.setattr(module, "train", functools.partial(struck, tmp_path))
    arguments = ["--epochs", str(EPOCHS), "--compressor", COMPRESSOR, "--storage", str(tmp_path), "--name", "struck"]
    with pytest.raises(WorkerGroupError) as failed:
        module.main(arguments)
    assert {rank: str(error) for rank, error in failed.value.worker_failures.items()} == {1: REASON}
    # what the other one saw when rank 1 was killed, and how soon
    when, _, seen = (tmp_path / "seen").read_text().partition(" ")
    assert "rank 1 was lost (killed, or its machine is gone)" in seen
    assert float(when) - float((tmp_path / "killed").read_text()) < 30
    # and where both came to
    (wanted, state), _ = two_ranks.run(uninterrupted, COMPRESSOR)
    last = sorted((tmp_path / "struck").glob("checkpoint_*/state.pt"))[-1]
    assert same(torch.load(last, weights_only=True), state)
    found = json.loads((tmp_path / "end0").read_text())
    assert found["loss"] == wanted["loss"]
    plain = two_ranks.run(uninterrupted, "none")[0][0]
    assert plain["loss"] < 0.2  # ln 10 is 2.3
    assert abs(wanted["loss"] - plain["loss"]) < 0.05
    assert 0 < wanted["sent_bytes"] < 0.3 * plain["sent_bytes"]
    # who wraps the optimizer of a model that Ray has wrapped is told what to do
    assert "under Ray Train: model = ray.train.torch.prepare_model(model)" in (tmp_path / "refused0").read_text()


def test_the_pages_code_is_the_examples():
    """So what the page shows has been run."""
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    shown = [line for block in blocks(ROOT / "docs" / "clusters.md", "python") for line in block.splitlines() if line]
    place = 0
    for line in shown:
        assert line.strip() in lines[place:], f"{line!r} is not in {EXAMPLE.name}, or in another place"
        place = lines.index(line.strip(), place) + 1
