"""Every method with its memories has the same bits by compiled loops and by plain operations (`GRACE_FUSED=0`)."""

import numpy as np
import pytest
import torch

import grace
from grace.kernels.torch import fused
from tests.support.drawing import THOROUGH
from tests.support.methods import SPECS
from tests.support.trained import Trained, drawn

pytest.importorskip("numba", reason="the loops are compiled by it")
pytestmark = pytest.mark.filterwarnings("ignore:.*not a contraction", "ignore:.*momentum")

SHAPES = [(20, 25), (), (5003,), (8, 3, 3)]
MEMORIES = [*sorted(grace.known("memory")), "residual(beta=0.7, gamma=0.3)"]
SETTINGS = [
    *SPECS, "block(bits=4, block=33)", "block(format=fp8)", "block(hadamard=32)", "block(rounding=stochastic)",
    "block(bits=3)", "block(bits=2)", "block(bits=2, scale=rms)", "topk(ratio=0.1) | block(bits=2, scale=rms)",
    "signum(momentum=0.3)", "terngrad(clip=1)", "dgc(ratio=0.1) | efsignsgd", "randomk(ratio=0.1) | fp16",
]  # fmt: skip


def trained(spec, memory):
    return Trained(spec, memory, SHAPES, apart=False)


def plain_operations(monkeypatch):
    """Compute CPU tensors by plain operations, as a process with GRACE_FUSED=0 does."""
    monkeypatch.setattr(fused, "_USE_FUSED", False)


def memories_for(spec):
    """Return the memories none and residual, and another in turn; `make thorough` takes all."""
    others = [memory for memory in MEMORIES if memory not in ("none", "residual")]
    return MEMORIES if THOROUGH else ["none", "residual", others[SETTINGS.index(spec) % len(others)]]


@pytest.mark.parametrize("spec", SETTINGS)
def test_compiled_loops_have_the_bits_of_plain_operations(spec, monkeypatch):
    legal = 0
    for memory in memories_for(spec):
        try:
            loops = trained(spec, memory)
        except grace.ConfigError:  # this memory is not for this method
            continue
        legal += 1
        plain, rng = trained(spec, memory), np.random.default_rng(1)
        for step in range(3):
            gradients, present = drawn(rng, SHAPES, torch.float32)
            wanted = loops.step(gradients, present)
            with monkeypatch.context() as patched:
                plain_operations(patched)
                found = plain.step(gradients, present)
            if "powersgd" in spec:  # its products are sums, of which neither has an order of its own
                compare_nearly(found, wanted)
            else:
                assert found == wanted, (memory, step)
                assert plain.remembered() == loops.remembered(), (memory, step)
    assert legal


def compare_nearly(found, wanted):
    for name, value in wanted.items():
        mine, other = (None if v is None else np.frombuffer(v, np.float32) for v in (found[name], value))
        if value is not None:
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4 * np.abs(other).max(initial=0))
