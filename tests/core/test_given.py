"""Refusals of things that are given to ``grace.DistributedOptimizer`` instead of an optimizer."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest
import torch

import grace
import grace.torch
from tests.support.limits import HANGS

MODEL = torch.nn.Linear(2, 2)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    """A wrapper as Accelerate's: an optimizer by its class alone."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer


class Averaging(torch.optim.Optimizer):
    """Around another optimizer, without torch's dicts of hooks."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base, self.param_groups = base, base.param_groups


@pytest.mark.parametrize("make", [grace.DistributedOptimizer, grace.torch.DistributedOptimizer])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (MODEL, "not the model (Linear): grace.DistributedOptimizer(optimizer, model.named_parameters(), ...)"),
        ([SGD, SGD], "not a list of 2: call it for each optimizer"),
        (None, "not None"),
        (torch.optim.SGD, "not the class torch.optim.sgd.SGD: make an object of it, SGD(...)"),
        (torch.optim.lr_scheduler.StepLR(SGD, 1), "give its optimizer (SGD)"),
        (Wrapper(SGD), "Wrapper: give its optimizer (SGD), before anything wraps it"),
        (Averaging(SGD), "Averaging: give its optimizer (SGD), before anything wraps it"),
        ("sgd", "an optimizer of torch or Keras, not 'sgd': if it is Keras's, give keras.optimizers.get('sgd')"),
        ({"class_name": "Adam", "config": {}}, "give keras.optimizers.get({'class_name': 'Adam', 'config': {}})"),
    ],
)
def test_what_is_no_optimizer_is_named(make, given, words):
    with pytest.raises(grace.ConfigError) as caught:
        make(given, compressor="topk")
    assert words in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_what_is_no_keras_optimizer_is_named():
    script = """
        import keras, grace, grace.tensorflow
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        for make in (grace.DistributedOptimizer, grace.tensorflow.DistributedOptimizer):
            for given in (model, keras.optimizers.SGD, None, [1]):
                try:
                    make(given)
                except grace.ConfigError as error:
                    print(str(error).partition(", not ")[2])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=HANGS
    )
    model, kind, nothing, several = done.stdout.splitlines()[:4]
    assert done.stdout.splitlines()[4:] == [model, kind, nothing, several]
    assert model == "the model (Sequential): model.compile(grace.DistributedOptimizer(optimizer, ...), ...)"
    assert kind.startswith("the class keras.")
    assert (nothing, several) == ("None", "a list of 1: call it for each optimizer")
