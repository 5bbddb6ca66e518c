"""A failing ``grace launch`` ends with what one needs to know; the launcher's own report is left out."""

import importlib.util
import re
import subprocess
import sys

import pytest

from grace.launch.supervisor import first_reason
from tests.support.engine_pools import environment
from tests.support.limits import HANGS

PROGRAM = """
import sys

import grace

grace.init()
print("-" * 74, "| a table |", "-" * 74, sep="\\n", flush=True)
grace.from_root(lambda: 0)
if grace.rank() == 1:
    raise ValueError("the data are wrong")
grace.from_root(lambda: 0)
"""
LAUNCHERS = r"ChildFailedError|Root Cause|MPI_ABORT|Primary job|mpirun detected|Process name|orte_base"


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["torch", "mpi", "horovod"])
def test_a_failing_launch_ends_with_the_rank_and_its_reason(tmp_path, engine):
    if importlib.util.find_spec({"mpi": "mpi4py"}.get(engine, engine)) is None:
        pytest.skip(f"{engine} is not installed")
    (tmp_path / "train.py").write_text(PROGRAM)
    arguments = ["launch", "-n", "2", "--engine", engine, "--", "python", "train.py"]
    command = [sys.executable, "-m", "grace.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=HANGS)
    assert done.returncode == 1
    last = "grace launch: rank 1 ended with exit code 1: ValueError: the data are wrong; the others were ended"
    assert done.stderr.splitlines()[-1] == last
    assert re.findall(LAUNCHERS, done.stdout + done.stderr) == []
    assert done.stdout.count("-" * 74) == 4  # what ranks print is not a launcher's


def test_a_rank_that_gave_no_reason_is_given_none():
    assert first_reason("grace.errors.ExchangeError: rank 1 was killed\nProcess name: [[1,1],1]", 1) == ""
    assert first_reason("[1,1]<stderr>:grace: rank 1 failed first: KeyError: 'x'[1,1]<stderr>:\n", 1) == "KeyError: 'x'"
