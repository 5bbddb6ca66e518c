"""A network trained in torch and in TensorFlow, from the same weights on the same data, over 2 ranks."""

# ruff: noqa: E402 - what is imported after TensorFlow needs it

import itertools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import grace
from tests.support.pools import launched
from tests.support.training import KINDS, momentum_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS, LR = 30, 0.02
SIZES = (16, 24, 24, 10)


def start() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    shapes = {f"w{i}": pair for i, pair in enumerate(itertools.pairwise(SIZES))}
    shapes |= {f"b{i}": (n,) for i, n in enumerate(SIZES[1:])}
    return {name: (0.3 * generator.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    from tests.support.tensorflow_training import samples

    x, y = samples(16 * STEPS, grace.rank())
    return [(x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16]) for i in range(STEPS)]


def in_torch(spec: str) -> list[float]:
    import torch

    weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    optimizer = torch.optim.SGD(weights.values(), lr=LR, momentum=momentum_for(spec))
    optimizer = grace.DistributedOptimizer(optimizer, weights.items(), compressor=spec)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        hidden = torch.tensor(x)
        for i in range(3):
            hidden = hidden @ weights[f"w{i}"] + weights[f"b{i}"]
            hidden = torch.relu(hidden) if i < 2 else hidden
        loss = torch.nn.functional.cross_entropy(hidden, torch.tensor(y))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def in_tensorflow(spec: str) -> list[float]:
    import keras

    weights = {name: tf.Variable(value, name=name) for name, value in start().items()}
    optimizer = keras.optimizers.SGD(LR, momentum=momentum_for(spec))
    optimizer = grace.DistributedOptimizer(optimizer, compressor=spec)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = x
            for i in range(3):
                hidden = hidden @ weights[f"w{i}"] + weights[f"b{i}"]
                hidden = tf.nn.relu(hidden) if i < 2 else hidden
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden))
        variables = list(weights.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return [float(step(tf.constant(x), tf.constant(y))) for x, y in batches()]


def curves() -> dict[str, tuple[list[float], list[float]]]:
    return {spec: (in_torch(spec), in_tensorflow(spec)) for spec in KINDS}


@pytest.fixture(scope="module")
def results():
    return launched("mpirun-mpi", 2, "tensorflow").run(curves)  # which moves both frameworks' tensors


@pytest.mark.parametrize("spec", KINDS)
def test_both_follow_the_same_loss_curve(results, spec):
    for with_torch, with_tensorflow in (rank[spec] for rank in results):
        np.testing.assert_allclose(with_tensorflow, with_torch, rtol=1e-4)
        assert np.isfinite(with_torch).all()
