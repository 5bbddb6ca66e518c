"""A rank that is killed, over every launcher: the others end with an error that names what was under way."""

from __future__ import annotations

import re
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import ENGINES, available, command, environment

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAMS = Path(__file__).parent.parent / "programs"
TIMEOUT = 10
SECONDS = 40
"""From the kill to the launcher's end: the engine's timeout, and what a launcher takes to clean up."""


def run(name: str, how: str, program: str = "killed.py") -> tuple[str, float]:
    """What was printed, and the seconds from the end of rank 1 to that of the launcher."""
    if not available(name):
        pytest.skip(f"{name}: its packages are not installed (make horovod)")
    env = {**environment(), "GRACE_BACKEND": ENGINES[name][1], "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT)}
    done = subprocess.run(
        command(name, 3, str(PROGRAMS / program), "topk(ratio=0.05)", how),
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    ended = time.time()
    assert done.returncode != 0
    killed = float(re.search(r"killed at ([\d.]+)", done.stdout).group(1))
    left = subprocess.run(["pgrep", "-f", str(PROGRAMS / program)], capture_output=True, text=True).stdout
    assert left == ""
    return done.stdout, ended - killed


@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_rank_ends_the_others_with_the_variables_that_were_under_way(name):
    printed, seconds = run(name, "kill")
    assert seconds < SECONDS, printed
    for rank in (0, 2):
        message = rf"rank {rank} of 3: the exchange of group \d+ \(.*topk.*\) failed at step \d+"
        assert re.search(message, printed), printed


@pytest.mark.parametrize("name", ["horovodrun-gloo", "mpirun-mpi"])
def test_an_error_on_one_rank_ends_the_others(name):
    printed, seconds = run(name, "raise")
    assert "ValueError: a mistake on rank 1" in printed
    assert seconds < SECONDS, printed


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize("name", ["horovodrun-gloo", "mpirun-mpi"])
def test_a_killed_rank_ends_the_others_in_the_middle_of_a_graph(name):
    printed, seconds = run(name, "kill", "killed_keras.py")
    assert seconds < SECONDS, printed
    horovods = r"grace\.1\.0\.dense_kernel"
    ours = r"the launcher ended rank [02] of 3 \(SIGTERM\); the last exchange .* group 0 \(dense/kernel .. dense_1/bias"
    assert re.search(horovods if name == "horovodrun-gloo" else ours, printed), printed


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_an_error_on_one_rank_ends_the_others_in_the_middle_of_a_graph():
    printed, seconds = run("mpirun-mpi", "raise", "killed_keras.py")
    assert "ValueError: a mistake on rank 1" in printed
    assert seconds < SECONDS, printed
