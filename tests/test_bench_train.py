"""``grace bench train``, run as a user does."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import grace
from grace.bench import training
from grace.bench.task import FRAMEWORKS, TASKS, task_class, trainer_class
from grace.bench.torch_tasks import CharacterModel
from grace.registry import known

pytestmark = pytest.mark.ranks

GRACE = str(Path(sys.executable).with_name("grace"))


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    """Each framework that is installed, on one rank."""
    pytest.importorskip(request.param, exc_type=ImportError)
    grace.init("local")
    yield request.param
    grace.shutdown()


def test_a_run_over_seeds_gives_a_table_a_picture_and_the_runs(tmp_path):
    args = ["--task", "charlm", "--epochs", "1", "--methods", "none,dgc", "--seeds", "0,1", "--lr", "dgc=0.5"]
    command = [GRACE, "bench", "train", *args, "--out", str(tmp_path)]
    env = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "dgc, seed 1: perplexity " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["task"]["metric"] == "perplexity"
    none, dgc = saved["results"]
    assert [run["lr"] for run in none["runs"] + dgc["runs"]] == [1.0, 1.0, 0.5, 0.5]
    characters = len(CharacterModel().characters)
    assert 2 < none["quality"] < characters / 2  # it has learned, and held-out text is not predicted perfectly
    assert f"{none['quality']:.2f}" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert lines == none["runs"] + dgc["runs"]
    assert (tmp_path / "perplexity.png").stat().st_size > 10_000


def test_an_interrupted_benchmark_keeps_what_is_finished(tmp_path):
    seeds = ",".join(map(str, range(200)))
    command = [GRACE, "bench", "train", "--methods", "none", "--epochs", "1", "--seeds", seeds, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    runs = tmp_path / "runs.jsonl"
    deadline = time.monotonic() + 60
    while not (runs.exists() and runs.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    count = len(training.load_runs(runs))
    assert 0 < count < 200
    assert f"{count} finished {'run is' if count == 1 else 'runs are'} in {runs}" in err


def test_every_method_is_the_whole_catalogue():
    methods = training.every_method()
    assert {"fp16", "bf16", "topk | efsignsgd"} < set(methods)
    assert set(known("compressor")) - {"cast"} <= set(methods)
    training.Settings(methods=methods)  # all can be built


@pytest.mark.parametrize("name", TASKS)
def test_a_task_depends_on_its_seed_alone(name):
    task = task_class(name, "torch")()
    before = torch.get_rng_state()
    one, same, other = (next(task.network(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    whole = task.shares(1, 0, seed=3, epoch=2)
    halves = [task.shares(2, rank, seed=3, epoch=2) for rank in (0, 1)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert sorted(torch.cat([first, second]).tolist()) == sorted(batch.tolist())


@pytest.mark.parametrize("name", TASKS)
def test_a_task_in_tensorflow_depends_on_its_seed_alone(name):
    pytest.importorskip("tensorflow", exc_type=ImportError)
    task = task_class(name, "tensorflow")()
    before = random.getstate()  # Keras draws seeds from it
    one, same, other = ([w.numpy() for w in task.network(seed).trainable_variables] for seed in (1, 1, 2))
    assert random.getstate() == before
    for weights, again, different in zip(one, same, other, strict=True):
        assert (weights == again).all()
        assert weights.ndim == 1 or not (weights == different).all()  # biases are zeros
    whole = task.shares(1, 0, seed=3, epoch=2)
    halves = [task.shares(2, rank, seed=3, epoch=2) for rank in (0, 1)]
    for batch, first, second in zip(whole, *halves, strict=True):
        assert sorted([*first, *second]) == sorted(batch)


@pytest.mark.parametrize("name", TASKS)
def test_a_trainer_of_each_framework_learns(name, framework):
    task = task_class(name, framework)()
    trainer = trainer_class(framework)(task, "none", 0, task.lr, momentum=0.0)
    before = trainer.quality()
    for share in task.shares(1, 0, seed=0, epoch=0)[:20]:
        trainer.step(share)
    assert trainer.traffic.steps == 20
    assert (trainer.quality() > before) == task.higher_is_better
    trainer.set_lr(0.0)
    after = trainer.quality()
    trainer.step(task.shares(1, 0, seed=0, epoch=1)[0])
    assert trainer.quality() == after


def test_held_out_text_is_not_trained_on():
    task = CharacterModel()
    assert (task.train.numel(), task.test.numel()) == (200_000, 20_000)
    model = task.network(0)
    assert task.quality(model) == pytest.approx(len(task.characters), rel=0.1)  # knows nothing yet


def test_a_method_without_runs_has_no_result():
    assert training.summarize([], training.Settings(methods=["none"])) == []
