"""Horovod elastic: ranks end and join, memories and counters follow the stated rule, and training goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine_pools import available, environment
from tests.support.limits import HANGS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not available("horovodrun-gloo"), reason="Horovod is not installed (make horovod)"),
]

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The log's lines, as (what, process, number of ranks, rest), and what the launcher printed."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "hosts").write_text("localhost:1\n127.0.0.1:1\n")  # two names of this machine, which fail separately
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    command = ["horovodrun", "-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(discover)]
    command += ["--elastic-timeout", "60", sys.executable, str(TESTS / "programs" / "elastic.py"), str(folder)]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**environment(), "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "PYTHONPATH": path}
    env["HOROVOD_CYCLE_TIME"] = "10"  # ranks that sleep between steps need not ask each other every millisecond
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return [(line[0], line[1], int(line[2]), line[3:]) for line in lines], done.stdout + done.stderr


def test_training_goes_on_with_fewer_ranks_and_with_new_ones(run):
    lines, _ = run
    starts = [(size, int(rest[0])) for what, _, size, rest in lines if what == "start"]
    assert sorted(starts)[:1] == [(1, 10)]  # alone, from the last commit before the other rank's death
    assert [start for start in starts if start[0] == 2][:2] == [(2, 0), (2, 0)]
    joined = [step for size, step in starts if size == 2][2:]
    assert len(joined) == 4
    assert joined[0] == joined[1] >= 30
    assert joined[2] == joined[3] >= 80


def test_every_rank_ends_with_the_same_weights_factors_and_step_counters(run):
    lines, _ = run
    ends = [rest for what, _, size, rest in lines if what == "end"]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert ends[0][:2] == ["110", "110"]


def test_a_rank_that_goes_on_keeps_its_memory_and_a_new_one_starts_with_none(run):
    lines, _ = run
    survivor = next(pid for what, pid, size, _ in lines if what == "start" and size == 1)
    alone = next(rest for what, _, size, rest in lines if what == "start" and size == 1)
    assert alone[1] == alone[2]  # the residual is that of the commit
    for what, pid, size, rest in lines:
        if what == "start" and size == 2 and int(rest[0]) >= 30:
            assert (rest[1] == rest[2]) == (pid == survivor)


def test_what_was_lost_is_said(run):
    _, printed = run
    changes = re.findall(r"the number of ranks changed from (\d to \d) at step", printed)
    assert {change: changes.count(change) for change in changes} == {"2 to 1": 2, "1 to 2": 2}
    assert "those of ranks that ended are lost, and new ranks start with none" in printed
