"""The README's code runs as it stands."""

import re
from pathlib import Path

import torch

import grace

ROOT = Path(__file__).parent.parent


def test_the_readmes_own_compressor_trains():
    grace.init("local")
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
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


def test_every_method_is_in_the_readmes_table():
    table = (ROOT / "README.md").read_text()
    for name, cls in grace.known("compressor").items():
        assert name == "cast" or f"`{name}" in table or not cls.__module__.startswith("grace.compressors"), name
