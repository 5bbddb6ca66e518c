"""The dgc memory: momentum correction, local clipping, masking, and that it rolls back."""

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather
from grace.compressors.topk import kept_count
from grace.core.context import Context
from grace.memories.dgc import DGCMemory


def normal(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def simulate(gradients, ratio, momentum, clip, nesterov):
    """Algorithm 4 of the paper in float64 for one worker, with the exact top-k threshold."""
    u = v = np.zeros_like(gradients[0], np.float64)
    for gradient in gradients:
        g = gradient.astype(np.float64)
        if clip is not None:
            g = g * min(1, clip / max(np.linalg.norm(g), 1e-300))
        if nesterov:
            u = momentum * (u + g)
            v = v + u + g
        else:
            u = momentum * u + g
            v = v + u
        mask = np.zeros(v.shape, bool)
        mask[np.argsort(-np.abs(v), kind="stable")[: kept_count(ratio, v.size)]] = True
        yield np.where(mask, v, 0), np.where(mask, 0, u), np.where(mask, 0, v)
        u, v = np.where(mask, 0, u), np.where(mask, 0, v)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("compressor", ["dgc(ratio=0.1)", "topk(ratio=0.1)"])
@pytest.mark.parametrize(
    ("momentum", "clip", "nesterov"), [(0.9, None, False), (0.9, 5.0, False), (0.9, None, True), (0.5, 5.0, True)]
)
def test_dgc_memory_is_the_papers_algorithm(convert, compressor, momentum, clip, nesterov):
    gradients = [normal(200, seed=step) for step in range(20)]
    communicator = Allgather(compressor, DGCMemory(momentum, clip, nesterov))
    expected = simulate(gradients, 0.1, momentum, clip, nesterov)
    for gradient, (sent, u, v) in zip(gradients, expected, strict=True):
        got = communicator.step(convert(gradient.copy()), "w")
        state = communicator.memory.state["w"]
        np.testing.assert_allclose(np.asarray(got), sent, atol=2e-5)
        velocity = np.asarray(state["velocity"]) * (momentum if nesterov else 1)  # the paper's code keeps momentum u
        np.testing.assert_allclose(velocity, u, atol=2e-5)
        np.testing.assert_allclose(np.asarray(state["accumulated"]), v, atol=2e-5)


@pytest.mark.parametrize("compressor", ["dgc(ratio=0.01)", "threshold(value=3.0)", "adaptive(ratio=0.1)"])
def test_dgc_memory_identity_over_20_steps(compressor):
    communicator = Allgather(compressor, "dgc(momentum=0.7)")
    u = v = np.zeros(3000)
    for step in range(20):
        gradient = normal(3000, seed=step)
        sent = communicator.step(gradient, "w")
        state = communicator.memory.state["w"]
        np.testing.assert_allclose(sent + state["accumulated"], v + 0.7 * u + gradient, atol=2e-5)
        assert not state["velocity"][sent != 0].any()
        u, v = state["velocity"].astype(np.float64), state["accumulated"].astype(np.float64)
    assert sent.any()


def test_dgc_memory_clears_what_a_composition_sent_and_keeps_its_error():
    communicator = Allgather("dgc(ratio=0.1) | qsgd(levels=7)", "dgc")
    gradient = normal(400)
    sent = communicator.step(gradient, "w")
    state = communicator.memory.state["w"]
    assert 0 < np.count_nonzero(sent) <= 52
    assert not state["velocity"][sent != 0].any()
    np.testing.assert_allclose(sent + state["accumulated"], gradient, atol=1e-6)


def test_dgc_memory_clips_by_the_number_of_ranks_and_the_loss_scale():
    memory = DGCMemory(momentum=0.0, clip=6.0)
    memory.bind(Context(size=4, loss_scale=2.0))
    x = memory.compensate(np.float32([[30, 40]]), "w")
    assert np.linalg.norm(x) == pytest.approx(6.0)  # 6 * 2 / sqrt(4)
    memory.bind(Context(size=4))
    assert not memory.compensate(np.zeros((1, 2), np.float32), "new").any()


def test_dgc_memory_is_for_sparsifiers_and_owns_the_momentum():
    assert DGCMemory.owns_momentum
    assert DGCMemory.accepts(grace.make("compressor", "topk")) is None
    assert DGCMemory.accepts(grace.make("compressor", "topk | qsgd")) is None
    assert "sparsifiers" in DGCMemory.accepts(grace.make("compressor", "qsgd"))
    for bad in ("dgc(momentum=2)", "dgc(clip=0)", "dgc(clip=true)", "dgc(nesterov=1)"):
        with pytest.raises(grace.ConfigError):
            grace.make("memory", bad)
