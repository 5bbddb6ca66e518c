"""Accelerate hands on how ranks exchange: three ranks on two nodes exchange between nodes only, by strategies.

Other frameworks' callbacks hand on the same choices: test_lightning.py.
"""

import contextlib
import gc
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import grace
from grace.core.backend import Backend
from tests.support.frameworks import torchrun
from tests.support.pools import on_ranks
from tests.support.training import digest, distributed, loss_of, net, sgd, train, weights

STEPS = 3
EXACT = {"strategy": "all_reduce", "hierarchical": True}
TOPK = {"strategy": "uniform(compressor=topk(ratio=0.1))", "hierarchical": True}


@contextlib.contextmanager
def two_nodes():
    """Set the environment that torchrun would give this rank, which is one of two on its node, or alone."""
    gc.unfreeze()  # ranks freeze what they have before each function, and frozen objects are not listed
    for backend in gc.get_objects():
        if issubclass(type(backend), Backend):  # a channel may be one that an earlier test has sent through
            backend.sent_bytes = 0
    with torchrun():
        os.environ["GRACE_NODE"] = "a" if grace.rank() < 2 else "b"
        yield


def under_accelerate(choices: dict[str, Any] | None) -> tuple[torch.nn.Module, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    by = Accelerator(cpu=True)
    model = net()
    given = model, sgd(model.parameters())
    if choices is None:
        wrapped, optimizer = by.prepare(*given)
    else:
        wrapped, optimizer = grace.integrations.accelerate.prepare(by, *given, **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        by.backward(loss_of(wrapped, step))
        optimizer.step()
    return model, None if choices is None else grace.integrations.accelerate.state_of(wrapped)


def between_nodes(runner: Any) -> int:
    """Bytes that this rank has sent to the other node; nothing may leave it over all ranks."""
    assert runner.hierarchical
    assert runner.channel.sent_bytes == 0
    return runner.hierarchy.backend.sent_bytes


def by_optimizer() -> tuple[str, int]:
    """A digest of the weights after an optimizer's steps, and the same bytes."""
    model = net()
    optimizer = distributed(model, **TOPK)
    train(model, optimizer, range(STEPS))
    return digest(weights(model)), between_nodes(optimizer._grace.runner)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@on_ranks(3)
def test_ranks_exchange_between_nodes_only():
    """Without loss, weights are those of the framework's own exchange; with top-k, those of an optimizer, and a node's
    leader sends the bytes that it sends there, and the other rank none."""
    with two_nodes():
        wanted, _ = under_accelerate(None)
        got, _ = under_accelerate(EXACT)
        for name, value in weights(wanted).items():
            torch.testing.assert_close(weights(got)[name], value, rtol=1e-5, atol=1e-6)
        compressed, state = under_accelerate(TOPK)
        sent, leads = between_nodes(state.runner), grace.rank() % 2 == 0
        assert (sent > 0) == leads
        wanted_bits, wanted_bytes = by_optimizer()
        headers = 64 * STEPS  # of other buckets
        assert abs(sent - wanted_bytes) <= headers, (sent, wanted_bytes)
        whole = sum(4 * p.numel() for p in compressed.parameters())
        assert sent < STEPS * whole / 4
        found = digest(weights(compressed))
        assert found == wanted_bits
        return found
