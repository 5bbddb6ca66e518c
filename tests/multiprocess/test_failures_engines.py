"""A rank that is killed, over every launcher: the others end with an error that names what was under way."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from engines import ENGINES, available, command, environment

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAM = str(Path(__file__).parent.parent / "programs" / "killed.py")
TIMEOUT = 10
SECONDS = 40
"""From the kill to the launcher's end: the engine's timeout, and what a launcher takes to clean up."""


@pytest.mark.parametrize("name", ENGINES)
def test_a_killed_rank_ends_the_others_with_the_variables_that_were_under_way(name):
    if not available(name):
        pytest.skip(f"{name}: its packages are not installed (make horovod)")
    env = {**environment(), "GRACE_BACKEND": ENGINES[name][1], "HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIMEOUT)}
    done = subprocess.run(
        command(name, 3, PROGRAM, "topk(ratio=0.05)"),
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    ended = time.time()
    assert done.returncode != 0
    killed = float(re.search(r"killed at ([\d.]+)", done.stdout).group(1))
    assert ended - killed < SECONDS, done.stdout
    for rank in (0, 2):
        message = rf"rank {rank} of 3: the exchange of group \d+ \(.*topk.*\) failed at step \d+"
        assert re.search(message, done.stdout), done.stdout
    left = subprocess.run(["pgrep", "-f", PROGRAM], capture_output=True, text=True)
    assert left.stdout == ""
