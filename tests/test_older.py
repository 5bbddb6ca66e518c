"""Checkpoints and strategy files of an earlier layout, and users' own parts, go on working.

The files in tests/older were written by the commit before the rooms were rebuilt; ``*-after`` is where that commit came
to when it went on from them for as many steps.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import grace
from grace.strategy import schema
from grace.torch import Communicator, Compressor, Memory, Traits

pytestmark = pytest.mark.usefixtures("local")

OLDER = Path(__file__).parent / "older"


def model_and_optimizer(**options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, grace.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def train(model, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["topk", "strategy"])
def test_a_checkpoint_resumes_bit_for_bit(name):
    options = {"compressor": "topk(ratio=0.25)"} if name == "topk" else {"strategy": str(OLDER / "strategy.yaml")}
    saved = torch.load(OLDER / f"{name}.pt", weights_only=True)
    model, optimizer = model_and_optimizer(**options)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    for key, value in torch.load(OLDER / f"{name}-after.pt", weights_only=True).items():
        assert torch.equal(model.state_dict()[key], value), key


def test_a_keras_model_resumes_where_it_was(tmp_path):
    pytest.importorskip("keras", reason="TensorFlow is not installed")
    shutil.copy(OLDER / "topk.keras", tmp_path)
    model = grace.tensorflow.load_model(tmp_path / "topk.keras")
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    model.fit(x, np.sin(x[:, :2] * 3), batch_size=8, epochs=2, shuffle=False, verbose=0)
    with np.load(OLDER / "keras-after.npz") as after:
        for variable, value in zip(model.trainable_variables, after.values(), strict=True):
            # to the last bits, in which processors differ; without its memories it would be off by 1e-2
            np.testing.assert_allclose(variable, value, rtol=0, atol=1e-6, err_msg=variable.path)


def test_strategy_files_are_read_and_written_as_they_were(tmp_path):
    pytest.importorskip("pydantic", reason="needs the extra strategy")
    from_yaml, from_json = (schema.load(OLDER / f"strategy.{end}") for end in ("yaml", "json"))
    assert from_yaml == from_json
    assert from_json.to_dict() == json.loads((OLDER / "strategy.json").read_text())
    for end in ("yaml", "json"):
        schema.dump(from_yaml, tmp_path / f"strategy.{end}")
        assert (tmp_path / f"strategy.{end}").read_text() == (OLDER / f"strategy.{end}").read_text()


class Int8(Compressor):
    name = "int8_of_old"
    traits = Traits(category="quantization", memory="residual")

    def compress(self, tensor, name):
        scale = tensor.abs().max().clamp(min=1e-30).reshape(1) / 127
        return [(tensor / scale).round().to(torch.int8), scale], None

    def decompress(self, payload, ctx):
        codes, scale = payload
        return codes.float() * scale


class Halving(Memory):
    name = "halving"

    def compensate(self, tensor, name):
        return tensor + 0.5 * self.state[name] if name in self.state else tensor.clone()

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = tensor - compressor.decompress(payload, ctx)


class Gather(Communicator):
    name = "gather_of_old"

    def communicate(self, wire):
        return self.backend.allgather(wire)


def test_own_parts_written_before_train_with_their_own_memory_and_communicator():
    model, optimizer = model_and_optimizer(communicator=Gather(Int8(), Halving()))
    before = model.weight.detach().clone()
    train(model, optimizer, range(3))
    assert not torch.equal(model.weight.detach(), before)
    assert set(optimizer.state_dict()["grace"]["state"]["memory"]) == {"weight", "bias"}
    assert optimizer.traffic.steps == 3
