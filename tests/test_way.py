"""The way of a gradient through grace/, as tools/trace_step.py prints it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WAY = [  # in order, as ARCHITECTURE.md tells it
    ("torch/hooks.py", "offer_gradient"),
    ("session/step_runner.py", "start"),
    ("exchange/program.py", "fits"),
    ("exchange/fused_codec.py", "encode"),
    ("memories/residual.py", "recall"),
    ("exchange/layout.py", "write_header"),
    ("exchange/round_trip.py", "advance"),
    ("backends/torch_distributed.py", "allgather"),
    ("exchange/fused_codec.py", "remember"),
    ("torch/optimizer.py", "synchronize"),
    ("exchange/round_trip.py", "finish"),
    ("exchange/header.py", "compare"),
    ("exchange/fused_codec.py", "decode"),
    ("exchange/header.py", "resolve"),
    ("core/state.py", "commit"),
]


def way(steps_before: int) -> list[tuple[str, str]]:
    """Return file and name of the functions that a step on two ranks passes, in order."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tools" / "trace_step.py"), "topk(ratio=0.1)", str(steps_before)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("grace/")]
    return [(place.removeprefix("grace/").partition(":")[0], name) for place, name in lines]


@pytest.mark.ranks
def test_the_first_step_is_the_same_program_as_any_other():
    usual, first = way(steps_before=3), way(steps_before=0)
    places = [usual.index(step) for step in WAY]
    assert places == sorted(places)
    assert set(usual) - set(first) <= set()
    assert len(first) <= 1.3 * len(usual)
