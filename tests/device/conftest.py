"""Device of the tests of a GPU; pytest alone is needed, so that a machine that is lent for minutes can run them."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # grace and tests.*, by their names


@pytest.fixture
def device(monkeypatch):
    """The GPU; or, in Triton's interpreter, the CPU, whose tensors its kernels then take."""
    torch = pytest.importorskip("torch")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from grace.kernels.torch import fused
        from grace.kernels.triton.primitives import KERNELS

        monkeypatch.setattr(fused, "_FUSED", KERNELS)
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    return "cuda"


@pytest.fixture
def gpu(device):
    """A GPU, and nothing else."""
    if device != "cuda":
        pytest.skip("a GPU alone has streams, and graphs")
    return device
