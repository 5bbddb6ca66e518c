"""``grace calibrate``: alone in this process, and as real ranks run it."""

import json
import subprocess
from pathlib import Path

import pytest

from grace.cli.calibration_file import read
from grace.planner.network import KINDS
from tests.support.command import grace_command, grace_program
from tests.support.engine_pools import command
from tests.support.limits import HANGS
from tests.support.warm import REAL

MODEL = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))

def rows():
    return torch.nn.Embedding(10, 4, sparse=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


def calibrated(folder, *args):
    return grace_command("calibrate", *args, folder=folder, columns=160)


def test_one_process_measures_methods_and_says_that_there_are_no_links(folder):
    code, out, err = calibrated(folder, "--quick", "--methods", "topk,sketch/none", "--model", "mine:net")
    assert (code, err) == (0, "")
    file = Path("calibration.json")
    made = read(folder / file)
    assert made.key.engine == "local"
    assert made.key.framework.startswith("torch")
    assert set(made.codecs) == {"allreduce, none, none", "allgather, topk, residual", "allgather, sketch, none"}
    assert made.codecs["allgather, topk, residual"].start.seconds(10, 1e6, 2) > 0
    assert "One process alone: there are no links to measure." in out
    assert f"Wrote {file} in" in out
    code, again, _ = calibrated(folder, "--show", str(file))
    assert code == 0
    assert "0 days ago" in again
    assert all(line in out for line in again.splitlines()[2:])


def test_the_files_folder_is_made(folder):
    code, out, err = calibrated(folder, "--quick", "--methods", "none", "--model", "mine:net", "-o", "kept/c.json")
    assert (code, err) == (0, "")
    assert "Wrote kept/c.json in" in out
    assert read(folder / "kept" / "c.json").codecs


def test_numpy_needs_no_framework(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # of nested regions, too
    code, out, err = calibrated(
        folder, "--quick", "--methods", "bf16,fp16", "--framework", "numpy", "-o", "c.json", "--model", "mine:net"
    )
    assert (code, err) == (0, "")
    assert "left out: allreduce, cast(dtype='bf16'), none: NumPy has no bfloat16" in out
    assert "allreduce, cast, none" in read(folder / "c.json").codecs
    assert read(folder / "c.json").key.framework.startswith("numpy")
    assert read(folder / "c.json").key.threads == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--methods", "topkk"], "topkk"),
        (["--methods", "topk/nothing"], "nothing"),
        (["--model", "mine"], "module:function"),
        (["--model", "mine:rows"], "no variable with dense gradients"),
        (["--framework", "jax"], "--framework is torch, tensorflow or numpy, not 'jax'"),
        (["--show", "none.json"], "none.json: cannot be read"),
        (["--show", "mine.py"], "mine.py: is not JSON"),
    ],
)
def test_what_is_wrong_is_said_at_once(folder, args, said):
    code, out, err = calibrated(folder, "--quick", *args)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("output", "said"),
    [("file/c.json", "cannot write file/c.json: File exists"), (".", "cannot write .: Is a directory")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(folder, output, said, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setattr("grace.cli.calibrate.measure_methods", lambda *args: pytest.fail("it measures"))
    code, _, err = calibrated(folder, "--quick", "--methods", "none", "--model", "mine:net", "-o", output)
    assert code == 2
    assert said in err


@pytest.mark.ranks
def test_ranks_measure_links_and_methods(folder):
    args = ["calibrate", "--quick", "--methods", "topk", "--model", "mine:net", "-o", "c.json"]
    out, _ = grace_program(*args, cwd=folder, launcher=command("torchrun", 2, "--no-python"), columns=160)
    made = read(folder / "c.json")
    assert (made.key.engine, made.key.ranks, made.key.threads, made.by_ring) == ("torch.distributed (gloo)", 2, 1, True)
    assert set(made.network.curves) == set(KINDS)
    costs = made.costs(made.network)
    assert 0 < costs.network.seconds("allreduce", 1e4, 2) <= costs.network.seconds("allreduce", 1e7, 2)
    assert out.count("Wrote c.json") == 1  # rank 0 alone speaks
    assert json.loads((folder / "c.json").read_text())["made"] > 1e9


@pytest.mark.ranks
def test_nothing_of_a_framework_is_imported_to_show_one(folder):
    calibrated(folder, "--quick", "--methods", "none", "--model", "mine:net", "-o", "c.json")
    program = f"""
import sys
from pathlib import Path
from grace.cli.calibration_file import read
read(Path({str(folder / "c.json")!r})).key
print(sorted({{"torch", "tensorflow", "keras"}} & set(sys.modules)))
"""
    done = subprocess.run([REAL, "-c", program], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout == "[]\n", done.stderr
