"""The demo, run as a user does: over real ranks, started by the grace command."""

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
import torch
from engines import environment

import grace
from grace.bench import launch, table, torch_tasks, training

pytestmark = pytest.mark.ranks

GRACE = str(Path(sys.executable).with_name("grace"))
LAUNCHERS = ("distributed.run", "horovod", "mpirun", "/sh\0", "/bash\0")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and interface names of Linux")


@pytest.fixture(params=["horovod", "mpi4py"])
def launcher(request, monkeypatch, tmp_path_factory):
    """What starts TensorFlow's ranks; for mpirun Horovod is hidden from the command."""
    pytest.importorskip("tensorflow", exc_type=ImportError)
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed (make horovod)")
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    if request.param == "mpi4py":
        (empty := tmp_path_factory.mktemp("hidden") / "horovod").mkdir()
        (empty / "__init__.py").write_text("raise ImportError('hidden')")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(empty.parent), os.environ.get("PYTHONPATH", "")]))


def run(*args, code=0, timeout=120, cwd=None, **environment):
    """Run `grace demo` at 80 columns; returns (stdout, stderr)."""
    env = {**os.environ, "COLUMNS": "80", **environment}
    done = subprocess.run([GRACE, "demo", *args], capture_output=True, text=True, env=env, timeout=timeout, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One short run; (stdout, stderr, folder, results.json)."""
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    # topk with every element would need 64 bits, so its gradients travel as those of none
    args = ["--quick", "--methods", "none,topk(ratio=1.0),topk", "--seeds", "0,1", "--out", str(folder)]
    (decoy := tmp_path_factory.mktemp("cwd") / "grace").mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong grace')")
    out, err = run(*args, cwd=decoy.parent if sys.version_info >= (3, 11) else None)
    return out, err, folder, json.loads((folder / "results.json").read_text())


def test_the_demo_prints_one_row_per_method_and_nothing_on_stderr(quick):
    out, err, _, _ = quick
    assert err == ""
    number = r"\d+\.\d\d"
    rows = re.findall(
        rf"^ (\S+) +(\S+ \w?B) +({number}) +{number} +{number} +\d+\.\d ± \d+\.\d +([+-]\S+)? $", out, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["none", "topk(ratio=1.0)", "topk"]
    assert [row[1] for row in rows] == ["1.20 MB", "1.20 MB", "23.3 kB"]
    assert "How to read it" in out
    assert max(map(len, out.splitlines())) <= 80


def test_bytes_and_bits_are_those_of_the_payloads(quick):
    *_, saved = quick
    none, _, topk = saved["results"]
    n = 301_066
    assert 4 * n <= none["sent_bytes_per_step"] <= 4 * n + 64
    assert none["bits_per_element"] == pytest.approx(32, abs=0.01)
    bits = grace.make("compressor", "topk").wire_bits
    payload = sum(bits(tuple(p.shape)) * p.numel() / 8 for p in torch_tasks.network(0).parameters())
    assert payload <= topk["sent_bytes_per_step"] <= payload + 256
    assert topk["bits_per_element"] == pytest.approx(8 * topk["sent_bytes_per_step"] / n)


def test_every_method_starts_from_the_same_weights_and_sees_the_same_data(quick):
    *_, saved = quick
    none, dense, _ = saved["results"]
    for mine, other in zip(none["runs"], dense["runs"], strict=True):
        assert [a for _, a in mine["curve"]] == [a for _, a in other["curve"]]
    first, second = (run["curve"] for run in none["runs"])
    assert first != second  # seeds differ


def test_times_are_those_of_the_steps(quick):
    *_, saved = quick
    for result in saved["results"]:
        assert 0 < result["codec_ms"] < result["step_ms"] < 1000


def test_results_record_how_they_were_made(quick):
    *_, saved = quick
    assert saved["command"].startswith("grace demo --quick --methods 'none,topk(ratio=1.0),topk' --seeds 0,1")
    assert saved["versions"]["grace"] == grace.__version__
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["settings"]["ranks"] == 2
    run = saved["results"][2]["runs"][1]
    assert (run["method"], run["seed"], run["steps"]) == ("topk", 1, 2 * (1437 // 64))
    sent = [point[0] for point in run["curve"]]
    assert sent == sorted(sent)
    assert run["curve"][-1] == [run["sent_bytes_per_step"] * run["steps"], run["quality"]]


def test_the_picture_is_a_png(quick):
    from matplotlib.image import imread

    *_, folder, _ = quick
    pixels = imread(folder / "accuracy.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    assert len({tuple(pixel) for pixel in pixels[::4, ::4].reshape(-1, pixels.shape[2])}) > 10  # not blank


@pytest.mark.slow
def test_one_rank_trains_sends_nothing_and_draws_nothing(tmp_path):
    out, _ = run("--quick", "-n", "1", "--methods", "qsgd", "--out", str(tmp_path))
    assert "One rank has nobody to send to" in out
    assert re.search(r"qsgd +0 B ", out)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "runs.jsonl"}


@pytest.mark.slow
def test_the_demo_of_tensorflow_measures_as_that_of_torch(tmp_path, launcher, request):
    engine = request.node.callspec.params["launcher"]
    out, err = run("--quick", "--framework", "tensorflow", "--methods", "none,qsgd", "--out", str(tmp_path))
    assert err == ""
    rows = re.findall(r"^ (\S+) +(\S+ \w?B) +(\d+\.\d\d) +\d+\.\d\d +\d+\.\d\d +\d+\.\d +", out, re.MULTILINE)
    assert rows == [("none", "1.20 MB", "32.00"), ("qsgd", "303 kB", "8.06")]
    assert max(map(len, out.splitlines())) <= 80
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["settings"]["framework"] == "tensorflow"
    assert {"tensorflow", "keras", "torch", *({"horovod"} & {engine})} <= set(saved["versions"])
    for result in saved["results"]:
        assert 0 < result["codec_ms"] < result["step_ms"]
        assert 0.8 < result["quality"] < 1
        (made,) = result["runs"]
        assert (made["steps"], made["lr"]) == (2 * (1437 // 64), 0.1)
        assert made["curve"][-1] == [made["sent_bytes_per_step"] * made["steps"], made["quality"]]
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_one_rank_of_tensorflow_needs_no_launcher_and_no_torch(tmp_path):
    pytest.importorskip("tensorflow", exc_type=ImportError)
    (decoy := tmp_path / "decoy" / "torch").mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(decoy.parent), os.environ.get("PYTHONPATH", "")])
    args = ["--quick", "-n", "1", "--framework", "tensorflow", "--methods", "topk", "--out", str(tmp_path / "out")]
    out, err = run(*args, PYTHONPATH=path)
    assert err == ""
    assert re.search(r"^topk, seed 0: accuracy \d+", out, re.MULTILINE)
    assert "One rank has nobody to send to" in out


def test_a_rank_of_tensorflow_that_fails_is_quoted_without_its_start_up_noise(tmp_path):
    pytest.importorskip("tensorflow", exc_type=ImportError)
    (decoy := tmp_path / "keras").mkdir()
    (decoy / "__init__.py").write_text("import tensorflow\nraise SystemExit('keras is broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    args = ["--quick", "-n", "1", "--framework", "tensorflow", "--out", str(tmp_path / "out")]
    _, err = run(*args, code=1, PYTHONPATH=path)
    assert err == "grace demo: the ranks failed (exit code 1)\nrank 0:\nkeras is broken\n"


def test_without_horovod_and_mpi_tensorflow_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    hidden = ("horovod", "mpi4py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find(name))
    with pytest.raises(grace.MissingExtraError, match=r"make horovod.*mpirun and mpi4py.*grace-compress\[mpi\]"):
        launch.launcher_of("tensorflow", 2)
    assert launch.launcher_of("tensorflow", 1).command == [sys.executable]


@pytest.mark.parametrize(
    ("framework", "said"),
    [
        ("torch", "failed (exitcode: -9) local_rank: 1 (pid: 7)"),
        ("horovod", "Process 1 exit with status code 137."),
        ("mpi4py", "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 9 (Killed)."),
    ],
)
def test_what_launchers_say_of_a_killed_rank_is_understood(monkeypatch, tmp_path, framework, said):
    monkeypatch.setattr(launch, "_has_horovod", lambda: framework == "horovod")
    monkeypatch.setattr(launch, "_mpirun", lambda: "mpirun")
    launcher = launch.launcher_of("torch" if framework == "torch" else "tensorflow", 2)
    (tmp_path / "launcher.log").write_text(f"[1]<stdout>:x\n{said}\nProcess 0 exit with status code 1.\n")
    assert launch._complaints(launcher, tmp_path) == "rank 1 was ended by SIGKILL"


@linux
@pytest.mark.slow
def test_a_rank_that_fails_is_quoted_and_the_exit_code_is_1(tmp_path):
    _, err = run("--quick", "--out", str(tmp_path), code=1, GLOO_SOCKET_IFNAME="nosuch0")
    assert "rank 0:" in err
    assert "Unable to find address for: nosuch0" in err
    assert [path.read_text() for path in tmp_path.iterdir()] == [""]  # no run ended


def _ranks(pid):
    """The demo's rank processes below a process."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        found += (below := children.get(todo.pop(), []))
        todo += below
    with contextlib.suppress(OSError):
        commands = {p: Path(f"/proc/{p}/cmdline").read_text() for p in found}
        ranks = [p for p, text in commands.items() if "\0-m\0grace.bench.worker" in text]
        return [p for p in ranks if not any(name in commands[p] for name in LAUNCHERS)]
    return []


def _gone(ranks, seconds=5):
    """Whether the processes end soon: mpirun does not wait for those that it has sent a signal."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@contextlib.contextmanager
def _running(tmp_path, seconds, framework="torch"):
    """A long demo whose ranks have been up for a while: (process, pids of its ranks)."""
    command = [GRACE, "demo", "--methods", "none", "--epochs", "5000", "--out", str(tmp_path)]
    command += ["--framework", framework]
    # os.environ: an MPI started in this very process leaves variables in C's environment that no mpirun survives
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": dict(os.environ)}
    process = subprocess.Popen(command, **quiet)
    try:
        deadline = time.monotonic() + 60
        while len(ranks := _ranks(process.pid)) < 2:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        time.sleep(seconds)
        yield process, ranks
    finally:
        process.terminate()
        process.communicate(timeout=60)


@linux
@pytest.mark.parametrize(
    ("number", "seconds"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 5)],
    ids=["SIGTERM-starting", "SIGINT-training"],
)
def test_an_interrupted_demo_leaves_no_rank_behind(tmp_path, number, seconds):
    with _running(tmp_path, seconds) as (process, ranks):
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err == "grace demo: interrupted; the ranks are ended\n"
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@linux
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 12], ids=["starting", "training"])
def test_an_interrupted_tensorflow_demo_leaves_no_rank_behind(tmp_path, launcher, seconds):
    with _running(tmp_path, seconds, "tensorflow") as (process, ranks):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert err == "grace demo: interrupted; the ranks are ended\n"
        assert _gone(ranks)


@linux
@pytest.mark.slow
def test_a_killed_rank_ends_the_tensorflow_demo_with_its_signal_named(tmp_path, launcher):
    with _running(tmp_path, 12, "tensorflow") as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in err
        assert "absl" not in err
        assert _gone(ranks)


@linux
@pytest.mark.slow
def test_a_killed_rank_ends_the_demo_with_its_signal_named(tmp_path):
    with _running(tmp_path, 5) as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "was ended by SIGKILL" in err
        assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("package", "extra"),
    [("torch", "torch"), ("tensorflow", "tensorflow"), ("sklearn", "bench"), ("matplotlib", "bench")],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(grace.MissingExtraError, match=rf"pip install .*\[{extra}\]"):
        training.run(training.Settings(framework=extra if extra != "bench" else "torch"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_ranks_shares_of_a_batch_make_up_the_same_batch(ranks):
    task = torch_tasks.Digits()
    whole = task.shares(1, 0, seed=3, epoch=2)
    shares = [task.shares(ranks, rank, seed=3, epoch=2) for rank in range(ranks)]
    for i, batch in enumerate(whole):
        assert sorted(int(x) for share in shares for x in share[i]) == sorted(batch.tolist())


def test_the_network_depends_on_its_seed_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (torch_tasks.network(seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fifth_of_each_digits_images_is_held_out():
    data = torch_tasks.Digits()
    assert (len(data.train_x), len(data.test_x)) == (1437, 360)
    assert torch.bincount(data.test_y).min() >= 34
    assert torch.equal(data.test_x, torch_tasks.Digits().test_x)


def test_results_are_means_over_seeds():
    settings = training.Settings(methods=["none"], seeds=[0, 1])
    runs = [
        {
            "method": "none",
            "quality": accuracy,
            "sent_bytes_per_step": 10 * accuracy,
            "bits_per_element": 32,
            "codec_ms": 1,
            "step_ms": 2,
            "curve": [[8, accuracy], [16, accuracy]],
        }
        for accuracy in (0.5, 1.0)
    ]
    (result,) = training.summarize(runs, settings)
    assert (result["quality"], result["quality_spread"], result["sent_bytes_per_step"]) == (0.75, 0.25, 7.5)
    assert result["curve"] == [[8, 0.75], [16, 0.75]]


@pytest.mark.parametrize(
    ("accuracies", "words"),
    [
        ({"none": 0.97, "topk": 0.95, "qsgd": 0.96}, "worst against none is topk's (-2.0 points)."),
        ({"none": 0.97, "topk": 0.98}, "no method's accuracy is worse than that of none."),
        ({"topk": 0.98}, "sending fewer pays."),
    ],
)
def test_the_advice_tells_what_accuracy_was_lost(accuracies, words):
    results = [{"method": method, "quality": accuracy} for method, accuracy in accuracies.items()]
    assert table.advice(results, training.Settings(methods=list(accuracies))).endswith(words)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_method_reaches_the_uncompressed_accuracy_minus_1_5_points_over_3_seeds(tmp_path):
    run("--seeds", "0,1,2", "--out", str(tmp_path), timeout=500)
    results = {r["method"]: r["quality"] for r in json.loads((tmp_path / "results.json").read_text())["results"]}
    assert list(results) == list(training.METHODS)
    assert results["none"] > 0.95
    for method, accuracy in results.items():
        assert accuracy >= results["none"] - 0.015, (method, results)
