"""What is no longer used is collected, and ends."""

import gc
import weakref

import grace
from tests.support.training import distributed, net


def test_an_optimizer_that_is_dropped_is_collected():
    grace.init("local")
    try:
        model = net()
        optimizer = distributed(model, "topk")
        session = weakref.ref(optimizer._grace)
        del optimizer
        gc.collect()
        assert session() is None
        (p, *_) = model.parameters()
        (p * 2).sum().backward()  # the model goes on without it
        assert p.grad.unique().tolist() == [2.0]
    finally:
        grace.shutdown()
