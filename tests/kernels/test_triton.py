"""Triton's kernels without a GPU: interpreted, compiled for GPUs that are elsewhere, and where they are taken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grace.kernels import kernels_of
from grace.kernels.torch import fused
from grace.kernels.triton import availability
from tests.support import warm
from tests.support.drawing import THOROUGH
from tests.support.implementations import INTERPRETED
from tests.support.limits import HANGS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="it starts the interpreter")
HERE = Path(__file__).parent
SLOW = ("test_topk_is_exact", "the_ends", "their_ends", "element_i_does_not", "distinct_and_in_range", "multiples_of_2")
"""Tests of many programs; test_triton_bits.py has smaller ones of the same."""
FEW = [*HERE.glob("test_triton_*.py"), HERE / "test_payloads_checked.py", HERE / "test_dispatch.py"]
"""Files that have every kernel and every refusal; `make thorough` runs all files' tests of Triton's kernels."""


@pytest.mark.ranks
def test_every_kernel_has_the_references_bits_in_tritons_interpreter():
    """Run the tests in a process of their own: Triton reads the variable when it is imported."""
    chosen = ["-m", "not slow", "-k", f"triton and not ({' or '.join(SLOW)})"]
    files = [HERE] if THOROUGH else FEW
    command = [warm.REAL, "-m", "pytest", "-p", "no:cacheprovider", *chosen, *map(str, files)]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > (150 if THOROUGH else 100), done.stdout


@pytest.fixture
def fake_gpu(monkeypatch):
    """A tensor on a GPU, without numbers; what is known of GPUs is forgotten before and after."""
    fused._triton_kernels.cache_clear()
    with FakeTensorMode():
        yield torch.empty(3, device="cuda")
    fused._triton_kernels.cache_clear()


def test_gpus_get_tritons_kernels_where_they_work(fake_gpu, monkeypatch):
    from grace.kernels.triton import primitives

    asked = []
    monkeypatch.setattr(primitives, "trouble", lambda device: asked.append(device) or "")
    assert [kernels_of(fake_gpu).name for _ in range(2)] == ["torch-triton"] * 2
    assert [device.type for device in asked] == ["cuda"]
    assert kernels_of(torch.empty(3)).name == "torch-fused"
    assert kernels_of(torch.empty(3, device="meta")).name == "torch"


def test_gpus_on_which_triton_does_not_work_get_torchs_operations_and_say_so(fake_gpu, monkeypatch):
    from grace.kernels.triton import primitives

    with pytest.warns(UserWarning, match="Triton does not work on cuda:0, so Grace takes torch's operations: "):
        assert kernels_of(fake_gpu).name == "torch"
    assert kernels_of(fake_gpu).name == "torch"  # said once
    monkeypatch.setattr(primitives.KERNELS, "random_bits", lambda stream, n, like: torch.zeros(n, dtype=torch.int64))
    assert primitives.trouble(torch.device("cpu")) == "it computes other numbers than the CPU"


def test_triton_is_left_out_where_it_cannot_be_or_shall_not(fake_gpu, monkeypatch):
    monkeypatch.setenv("GRACE_FUSED", "0")
    assert availability.missing() == "GRACE_FUSED=0"
    assert kernels_of(fake_gpu).name == "torch"
    monkeypatch.delenv("GRACE_FUSED")
    assert availability.missing() == ""
    monkeypatch.delitem(sys.modules, "triton")
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    assert availability.missing() == "TensorFlow was imported before Triton"
    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    assert availability.missing() == "Triton is not installed"
