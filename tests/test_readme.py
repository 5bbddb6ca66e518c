"""The README's script trains; and the code of the pages on checkpoints, when runs end and others go on."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.test_pages import ROOT, blocks

README = ROOT / "README.md"


@on_ranks()
def test_the_readmes_script_trains_on_two_ranks():
    """The lines behind its diff are a whole training loop, with the model and the data that it leaves out."""
    (diff,) = blocks(README, "diff")
    code = "\n".join(line[1:] for line in diff.splitlines() if line[:1] != "-")
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x[:, :16])
    names = {"Net": lambda: torch.nn.Linear(64, 16), "loss": torch.nn.functional.mse_loss, "data": data}
    names |= {"DataLoader": torch.utils.data.DataLoader, "DistributedSampler": torch.utils.data.DistributedSampler}
    exec(code, names)
    with torch.no_grad():
        error = float(torch.nn.functional.mse_loss(names["model"](x), x[:, :16]))
    assert error < 0.5, error  # 1 at the beginning
    assert names["opt"].traffic.bits_per_element < 32


@on_ranks()
def test_the_pages_checkpoints_of_rank_0_resume(tmp_path):
    """The page's two halves, on real ranks: a run that goes on, and one that is resumed."""
    from tests.support.training import digest, distributed, net, train, weights

    code = [block for block in blocks(ROOT / "docs" / "checkpoints.md", "python") if "checkpoint.pt" in block]
    ends, before = [], os.getcwd()
    os.chdir(tmp_path)
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
    assert ends[0] == ends[1]


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
