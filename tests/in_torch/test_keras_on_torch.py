"""Keras's torch backend, in processes that import Keras with it: its models, and what is refused."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support import ROOT
from tests.support.by_hand import started_by_hand
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import environment
from tests.support.limits import HANGS

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAM = """
import hashlib, runpy, sys
sys.modules["tensorflow"] = None  # is not needed
found = runpy.run_path("EXAMPLE", run_name="__main__")
import keras, numpy as np, torch, torch.distributed as dist
import grace, grace.torch

def bits(model):
    values = [np.asarray(v.value.detach()).tobytes() for v in model.trainable_variables]
    return grace.allgather_object(hashlib.sha256(b"".join(values)).hexdigest())

same = bits(found["model"])
assert same == same[:1] * grace.size(), same
assert found["optimizer"].traffic.steps == 3 * (1797 // (32 * grace.size()))

started, kept = [], {}
for name in ("all_gather_object", "all_reduce", "barrier", "broadcast"):
    kept[name] = getattr(dist, name)
    setattr(dist, name, lambda *args, name=name, **options: started.append(name))
for wrap in (grace.DistributedOptimizer, grace.torch.DistributedOptimizer):
    try:
        wrap(keras.optimizers.SGD(0.1), "topk")
    except grace.ConfigError as refused:
        assert str(refused).startswith("Keras runs on torch here"), refused
        assert "torch.optim.SGD(model.parameters()" in str(refused)
    else:
        raise AssertionError("not refused")
assert started == [], started
for name, plain in kept.items():
    setattr(dist, name, plain)

def trained(rows, wrap):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(5):
        x = torch.tensor(np.random.default_rng(step).standard_normal((8, 4)), dtype=torch.float32)[rows]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return np.concatenate([np.asarray(v.value.detach()).ravel() for v in model.trainable_variables])

def distributed(opt, model):
    return grace.DistributedOptimizer(opt, model.named_parameters())

ours = trained(slice(grace.rank(), 8, grace.size()), distributed)
np.testing.assert_allclose(ours, trained(slice(8), lambda opt, model: opt), rtol=1e-5, atol=1e-6)

if INSTALLED:
    del sys.modules["tensorflow"]
    import grace.tensorflow

    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(loss="mse")
    x = np.zeros([2, 4], "float32")
    callbacks = grace.tensorflow.BroadcastCallback(), grace.tensorflow.TrafficCallback()
    calls = [lambda one=one: model.fit(x, x[:, :1], verbose=0, callbacks=[one]) for one in callbacks]
    for call in (*calls, *(lambda on=on: grace.tensorflow.broadcast_variables(on) for on in (model, model.variables))):
        try:
            call()
        except grace.ConfigError as refused:
            assert str(refused).startswith("Keras runs on torch here"), refused
        else:
            raise AssertionError("not refused")
"""


@pytest.mark.parametrize("size", [1, *([2] if THOROUGH else [])])
def test_keras_models_train_in_fit_and_in_loops_by_torchs_optimizers_and_keras_own_are_refused(tmp_path, size):
    """Two ranks are left to `make thorough`: to import Keras anew is dear, and they exchange parameters of torch."""
    pytest.importorskip("keras")
    script = tmp_path / "train.py"
    example, installed = ROOT / "examples" / "torch" / "keras_on_torch.py", find_spec("tensorflow") is not None
    script.write_text(PROGRAM.replace("EXAMPLE", str(example)).replace("INSTALLED", str(installed)))
    command = [sys.executable, str(script), "--epochs", "3", "--compressor", "topk(ratio=0.1)"]
    if size == 1:
        done = subprocess.run(
            command, env={**environment(), "KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=HANGS
        )
        ranks = [(done.returncode, done.stdout + done.stderr)]
    else:
        ranks = started_by_hand(command, KERAS_BACKEND="torch")
    assert [code for code, _ in ranks] == [0] * size, ranks
    said = ranks[0][1]
    assert "topk(ratio=0.1) on " in said
    assert size == 1 or "(gloo), rank 0 of 2" in said
    assert float(said.split("accuracy ")[1].split("%")[0]) > 80
