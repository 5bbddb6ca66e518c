"""The example runs as its first lines say, under torchrun and alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

EXAMPLE = Path(__file__).parent.parent / "examples" / "torch" / "digits.py"
PLAIN = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(launcher, *args):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, str(EXAMPLE), *args], capture_output=True, text=True, env=env, timeout=120)


@pytest.mark.parametrize(
    ("launcher", "method", "engine", "sends"),
    [
        (PLAIN, "topk(ratio=0.01)", "local, rank 0 of 1", False),
        (TORCHRUN, "powersgd(rank=2)", "torch.distributed (gloo), rank 0 of 2", True),
    ],
    ids=["python", "torchrun"],
)
def test_the_example_trains_and_prints_once_which_engine_it_is_on(launcher, method, engine, sends):
    done = run(launcher, "--compressor", method)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{method} on {engine}"
    accuracy, sent = re.fullmatch(r"test accuracy ([\d.]+)%, ([\d,]+) bytes sent by this rank", second).groups()
    assert float(accuracy) > 93
    assert (sent != "0") == sends


def test_the_difference_to_an_ordinary_script_is_six_lines():
    marked = [line for line in EXAMPLE.read_text().splitlines() if line.endswith("# +")]
    assert len(marked) == 6
    rest = [line for line in EXAMPLE.read_text().split('"""', 2)[2].splitlines() if line not in marked]
    uses = [line for line in rest if re.search(r"\bgrace\b", line)]
    assert uses == [line for line in uses if "help=" in line or "print(" in line]
