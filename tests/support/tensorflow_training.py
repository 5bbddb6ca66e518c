"""Models, data and training loops that the TensorFlow tests of several ranks share; they run in the rank processes."""

import hashlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import grace
import grace.tensorflow
from grace.session.settings import Settings
from grace.strategy.choices import Choices
from grace.tensorflow.step_session import StepSession
from tests.support.pools import on_ranks

on_mpi = on_ranks(engine="mpirun-mpi", framework="tensorflow")
on_horovod = on_ranks(engine="horovodrun-gloo", framework="tensorflow")
on_both = on_ranks(engine=("horovodrun-gloo", "mpirun-mpi"), framework="tensorflow")
"""Run a test's body on 2 ranks of an engine that pairs collectives by order, of one that pairs by name, and of each."""


def digest(tensors: Any) -> str:
    """A hash of the exact bits of tensors or variables."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(np.asarray(tensor).tobytes())
    return hashed.hexdigest()


def network(seed: int = 0, sizes: tuple[int, ...] = (16, 24, 10)) -> keras.Sequential:
    """A few dense layers, whose start values depend on the seed alone."""
    generator = np.random.default_rng(seed)
    model = keras.Sequential([keras.layers.Input(sizes[:1])])
    for i, size in enumerate(sizes[1:]):
        model.add(keras.layers.Dense(size, activation="relu" if i + 2 < len(sizes) else None, name=f"dense{i}"))
    for variable in model.trainable_variables:
        variable.assign(0.3 * generator.standard_normal(variable.shape))
    return model


def samples(count: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A rank's data, for a network of 16 inputs and 10 classes."""
    generator = np.random.default_rng((seed, rank))
    x = generator.standard_normal((count, 16)).astype(np.float32)
    return x, (np.abs(x[:, :10]) + 0.1 * generator.standard_normal((count, 10))).argmax(1)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(compressor: Any = None, lr: float = 1.0, momentum: float = 0.0, **options: Any) -> keras.optimizers.Optimizer:
    """Keras's SGD, made distributed."""
    return grace.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=momentum), compressor, **options)


def compiled(optimizer: keras.optimizers.Optimizer, **options: Any) -> keras.Sequential:
    """A network with its optimizer and loss."""
    model = network()
    model.compile(optimizer, LOSS, **options)
    return model


def fit(model: keras.Model, epochs: range, callbacks: Any = (), rows: int = 64, **options: Any) -> dict[str, Any]:
    """Train some epochs on this rank's data, in order; what was logged."""
    x, y = samples(rows, grace.rank())
    given = {"batch_size": 16, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, initial_epoch=epochs.start, epochs=epochs.stop, callbacks=list(callbacks), **given).history


both_ways = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def traced(step: Any, graph: bool = True) -> Any:
    """A step as a graph, or as it is."""
    return tf.function(step, autograph=False) if graph else step


def apply_steps(optimizer: Any, variables: list[Any], gradients: list[list[Any]], graph: bool = False) -> list[Any]:
    """Apply lists of gradients, one list a step."""
    run = traced(lambda given: optimizer.apply_gradients(zip(given, variables, strict=True)), graph)
    for given in gradients:
        run(given)
    return [np.array(variable) for variable in variables]


class StopBefore(keras.callbacks.Callback):
    """Interrupt training as somebody at a keyboard does."""

    def __init__(self, epoch: int):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def session_of(compressor: Any, communicator: Any = None, **options: Any) -> StepSession:
    """Return a session as optimizers and tapes have it."""
    return StepSession(Choices(compressor, None, communicator), grace.init(), Settings(**options))


def variables_of(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> list[tf.Variable]:
    """Variables of zeros, by name."""
    return [tf.Variable(tf.zeros(shape, dtype), name=name) for name, shape in shapes.items()]


def state_of(session: Any) -> dict[str, dict[str, Any]]:
    """Copies of what the compressor and the memory remember, as arrays."""
    return {kind: _arrays(values) for kind, values in session.runner.state().items()}


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return np.array(value) if tf.is_tensor(value) else value
