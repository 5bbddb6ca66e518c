"""The README's code runs as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import grace

ROOT = Path(__file__).parent.parent


def blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_the_readmes_own_compressor_trains():
    grace.init("local")
    (code,) = [block for block in blocks() if "class Int8" in block]
    model = torch.nn.Linear(50, 50)
    names = {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(code, names)
    before = model.weight.detach().clone()
    model(torch.randn(4, 50)).square().sum().backward()
    exact = model.weight.grad.clone()
    names["opt"].step()
    scale = exact.abs().max() / 127
    assert torch.allclose(model.weight.grad, exact, atol=float(scale) / 2 * 1.001)
    assert not torch.equal(model.weight.detach(), before)
    sent = sum(names["opt"].traffic.payload_bytes.values())
    assert sent == 50 * 50 + 4 + 50 + 4  # one byte per element and a scale per tensor
    grace.shutdown()


def test_the_readmes_keras_model_trains():
    keras = pytest.importorskip("keras", reason="TensorFlow is not installed")
    (code,) = [block for block in blocks() if "import keras" in block]
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
    names = {"model": model, "x": np.ones((64, 4), np.float32), "y": np.zeros(64)}
    exec(code.replace("grace.init()", "grace.init('local')"), names)
    history = model.history.history["loss"]
    assert names["opt"].traffic.steps == 2
    assert np.isfinite(history).all()
    grace.shutdown()


def test_every_method_is_in_the_readmes_table():
    table = (ROOT / "README.md").read_text()
    for name, cls in grace.known("compressor").items():
        assert name == "cast" or f"`{name}" in table or not cls.__module__.startswith("grace.compressors"), name
