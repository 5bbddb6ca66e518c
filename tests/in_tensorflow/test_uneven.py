"""Programs under launchers: epochs of unequal lengths, errors in graphs, and elastic runs, which are refused."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

import grace
from tests.support.drawing import THOROUGH
from tests.support.engine_pools import ENGINES, available, command, environment
from tests.support.limits import HANGS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]

UNEVEN = """
import time
import keras, numpy as np
import grace
grace.init(framework="tensorflow")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="late"), keras.layers.Dense(1)])
model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk(ratio=0.5)"), "mse")
n = 16 if grace.rank() == 0 else 8
model.fit(np.ones((n, 4), "f"), np.ones((n, 1), "f"), batch_size=4, verbose=0)
time.sleep(60)
"""


def run(engine, text, folder, **variables):
    program = folder / "train.py"
    program.write_text(text)
    line = command(engine, 2, str(program))
    env = {**environment(), "GRACE_BACKEND": ENGINES[engine][1], "PYTHONPATH": str(Path(grace.__file__).parents[1])}
    done = subprocess.run(
        line,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("engine", ["horovodrun-gloo", "mpirun-mpi"] if THOROUGH else ["mpirun-mpi"])
def test_epochs_of_unequal_lengths_time_out_and_name_variable_and_ranks(engine, tmp_path):
    if not available(engine):
        pytest.skip(f"{engine}: its packages are not installed")
    code, said = run(engine, UNEVEN, tmp_path, GRACE_TIMEOUT="5")
    assert code, said
    assert "(dense/bias" in said  # the first group that rank 0 waits for
    assert "rank 1 is at train.py:" in said


MISTAKEN = """
import keras, numpy as np, tensorflow as tf
import grace
grace.init(framework="tensorflow")

def check(batch):
    if grace.rank() == 1:
        raise ValueError("a mistake")
    return batch

class Checked(keras.layers.Layer):
    def call(self, batch):
        return tf.ensure_shape(tf.py_function(check, [batch], tf.float32), batch.shape)

model = keras.Sequential([keras.layers.Input((4,)), Checked(), keras.layers.Dense(1)])
model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.1), "topk(ratio=0.5)"), "mse")
model.fit(np.ones((4, 4), "f"), np.ones((4, 1), "f"), verbose=0)
"""


def test_an_error_in_the_graph_of_one_rank_is_told_with_its_cause(tmp_path):
    """TensorFlow's own error begins with the places in the program where the operation was made."""
    code, said = run("mpirun-mpi", MISTAKEN, tmp_path)
    assert code, said
    (line,) = {line for line in said.splitlines() if line.startswith("grace: rank 1 failed first: InvalidArgument")}
    assert "ValueError: a mistake" in line[-345:]


def test_an_elastic_run_is_refused(tmp_path):
    if not available("horovodrun-gloo"):
        pytest.skip("Horovod is not installed")
    text = UNEVEN.replace("time.sleep(60)", "")
    code, said = run("horovodrun-gloo", text, tmp_path, HOROVOD_ELASTIC="1")  # as with --min-np
    assert code, said
    assert "Grace has no elastic mode for TensorFlow" in said
