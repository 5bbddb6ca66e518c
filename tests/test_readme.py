"""The README's code runs as it stands; and that of the pages on checkpoints, when runs end and others go on."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import grace
from tests.support.own_parts import registered
from tests.test_pages import ROOT, blocks

README = blocks(ROOT / "README.md", "python")


def test_the_readmes_own_compressor_trains(local):
    (code,) = [block for block in README if "class Int8" in block]
    model = torch.nn.Linear(50, 50)
    names = {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=0.1)}
    with registered():  # which takes back what the README registers
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


def test_the_readmes_keras_model_trains(local):
    keras = pytest.importorskip("keras", reason="TensorFlow is not installed")
    (code,) = [block for block in README if "import keras" in block]
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, "softmax")])
    names = {"model": model, "x": np.ones((64, 4), np.float32), "y": np.zeros(64)}
    exec(code.replace("grace.init()", "grace.init('local')"), names)
    assert names["opt"].traffic.steps == 2
    assert np.isfinite(model.history.history["loss"]).all()


def saved_and_resumed(folder, code):
    """The page's two halves, on real ranks: a run that goes on, and one that is resumed."""
    from tests.support.training import digest, distributed, net, train, weights

    ends, before = [], os.getcwd()
    os.chdir(folder)
    try:
        for resumed in (False, True):
            model = net(seed=int(resumed))
            names = {"grace": grace, "torch": torch, "model": model, "opt": distributed(model, "topk(ratio=0.1)")}
            if resumed:
                exec(code[1], names)
            else:
                train(model, names["opt"], range(2))
                exec(code[0], names)
            train(model, names["opt"], range(2, 4))
            ends.append(digest(weights(model)))
        if grace.rank() == 0:
            os.remove("checkpoint.pt")
        with pytest.raises(FileNotFoundError if grace.rank() == 0 else grace.RankError, match="No such file"):
            exec(code[1], names)
    finally:
        os.chdir(before)
    return ends[0] == ends[1]


@pytest.mark.ranks
def test_the_pages_checkpoints_of_rank_0_resume(two_ranks, tmp_path):
    code = [block for block in blocks(ROOT / "docs" / "checkpoints.md", "python") if "checkpoint.pt" in block]
    assert two_ranks.run(saved_and_resumed, str(tmp_path), code) == [True, True]


def test_the_pages_keras_checkpoint_resumes(local, tmp_path, monkeypatch):
    keras = pytest.importorskip("keras", reason="TensorFlow is not installed")
    (code,) = [block for block in blocks(ROOT / "docs" / "keras.md", "python") if "save_model" in block]
    monkeypatch.chdir(tmp_path)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), compressor="topk(ratio=0.5)"), "mse")
    x, y = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)
    model.fit(x, y, verbose=0)
    names = {"grace": grace, "model": model, "Path": Path, "tempfile": tempfile}
    exec(code, names)
    for one in (model, names["model"]):
        one.fit(x, y, verbose=0)
    for one, other in zip(model.variables, names["model"].variables, strict=True):
        assert np.array_equal(one, other)
