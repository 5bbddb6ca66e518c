"""Training without a launcher."""

import pytest
import torch

import grace
from tests.support.training import (
    METHODS,
    distributed,
    loss_of,
    net,
    same,
    sgd,
    train,
    weights,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("compressor", METHODS)
def test_every_method_trains_in_one_process(compressor):
    grace.shutdown()
    grace.init("local")
    try:
        model = net()
        optimizer = distributed(model, compressor)
        before = loss_of(model, 0).item()
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
        assert torch.isfinite(loss_of(model, 0))
        assert loss_of(model, 0).item() < before or compressor == "signsgd"
        assert optimizer.traffic.sent_bytes == 0
        assert optimizer.traffic.steps == 10
    finally:
        grace.shutdown()


def test_none_in_one_process_is_the_plain_optimizer_bit_for_bit():
    grace.shutdown()
    grace.init("local")
    try:
        model, reference = net(), net()
        train(model, distributed(model, "none"), range(5))
        train(reference, sgd(reference.parameters()), range(5))
        assert same(weights(model), weights(reference))
    finally:
        grace.shutdown()
