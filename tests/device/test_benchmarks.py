"""``grace bench kernels`` and ``step`` on a GPU."""

import subprocess
import sys

import pytest
import torch

from grace.bench.common.results import load
from tests.support.limits import HANGS

pytestmark = pytest.mark.device
GRACE = [sys.executable, "-m", "grace.cli.main", "bench"]


def test_steps_are_measured_on_a_gpu(gpu, tmp_path):
    args = ["--device", "cuda", "--model", "resnet", "--methods", "none,qsgd", "--rounds", "1", "-o", str(tmp_path)]
    done = subprocess.run([*GRACE, "step", *args], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    assert "The wire is simulated" in done.stdout
    rows = {(row["name"], row["bandwidth"]): row for row in load(tmp_path).rows}
    assert rows["none", 1e10]["exposed_ms"] > 0
    assert rows["qsgd", 1e10]["waits_per_step"] <= 1


def test_kernels_are_measured_on_a_gpu(gpu, tmp_path):
    args = ["--device", "cuda", "--size", "1M", "--repeats", "5", "--methods", "fp16,qsgd,topk", "-o", str(tmp_path)]
    done = subprocess.run([*GRACE, "kernels", *args], capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    results = load(tmp_path)
    assert torch.cuda.get_device_name() in done.stdout
    rows = {row["method"]: row for row in results.rows}
    for method in ("fp16", "qsgd", "topk"):
        assert 0 < rows[method]["encode_fraction"] < 1.5
        assert "encode" not in rows[method]["eager"]
