"""The tasks of the training benchmarks in TensorFlow and Keras, and how they are trained there."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers, layers

import grace
from grace.bench.workloads import charlm, digits
from grace.bench.workloads.charlm import EMBEDDING, HIDDEN, WORST
from grace.bench.workloads.digits import WIDTH
from grace.bench.workloads.task import Task, Trainer, in_optimizer
from grace.exchange.bucket import Traffic

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class _InTensorFlow(Task):
    """What tasks share here."""

    def order(self, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(count)


def _seeds(seed: int) -> Any:
    """Initializers' seeds, a different one for every weight."""
    return iter(range(100 * seed, 100 * seed + 100))


class Digits(_InTensorFlow, digits.Digits):
    """The digits, as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.train_x, self.test_x = tf.constant(self.train_x), tf.constant(self.test_x)
        self.train_y, self.test_y = tf.constant(self.train_y), tf.constant(self.test_y)

    def network(self, seed: int) -> keras.Model:
        return network(seed)

    def loss(self, model: keras.Model, share: tf.Tensor) -> tf.Tensor:
        return cross_entropy(tf.gather(self.train_y, share), model(tf.gather(self.train_x, share)))

    def quality(self, model: keras.Model) -> tf.Tensor:
        """The part of the test images that the model names correctly."""
        named = tf.argmax(model(self.test_x), 1)
        return tf.reduce_mean(tf.cast(named == tf.cast(self.test_y, named.dtype), tf.float32))


def network(seed: int) -> keras.Model:
    """A multilayer perceptron with two hidden layers.

    >>> network(seed=0).count_params()
    301066
    """
    seeds = _seeds(seed)

    def dense(units: int, activation: str | None = None) -> layers.Layer:
        return layers.Dense(units, activation, kernel_initializer=initializers.GlorotUniform(next(seeds)))

    return keras.Sequential([keras.Input([64]), dense(WIDTH, "relu"), dense(WIDTH, "relu"), dense(10)])


class CharacterModel(_InTensorFlow, charlm.CharacterModel):
    """The text, as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.train, self.test = tf.constant(self.train), tf.constant(self.test)

    def network(self, seed: int) -> keras.Model:
        return character_lstm(len(self.characters), seed)

    def loss(self, model: keras.Model, share: tf.Tensor) -> tf.Tensor:
        return _next_character(model, tf.gather(self.train, share))

    def quality(self, model: keras.Model) -> tf.Tensor:
        """The perplexity."""
        return tf.exp(tf.minimum(tf.cast(_next_character(model, self.test), tf.float64), WORST))


def _next_character(model: keras.Model, windows: tf.Tensor) -> tf.Tensor:
    return cross_entropy(windows[:, 1:], model(windows[:, :-1]))


def character_lstm(characters: int, seed: int) -> keras.Model:
    """Embedding, one LSTM layer and a linear layer over the characters; logits of the next character.

    >>> character_lstm(100, seed=0).count_params()
    98532
    """
    seeds = _seeds(seed)
    uniform = [initializers.GlorotUniform(next(seeds)) for _ in range(2)]
    lstm = layers.LSTM(
        HIDDEN,
        return_sequences=True,
        kernel_initializer=uniform[0],
        recurrent_initializer=initializers.Orthogonal(seed=next(seeds)),
        seed=next(seeds),
    )
    embedding = layers.Embedding(characters, EMBEDDING, initializers.RandomNormal(stddev=1.0, seed=next(seeds)))
    output = layers.Dense(characters, kernel_initializer=uniform[1])
    return keras.Sequential([keras.Input([None], dtype="int64"), embedding, lstm, output])


class FrameworkTrainer(Trainer):
    """SGD in a graph, over Horovod or MPI."""

    def __init__(self, task: Any, method: str, seed: int, lr: float, momentum: float):
        self.model = model = task.network(seed)
        sgd = keras.optimizers.SGD(lr, momentum=momentum, global_clipnorm=task.clip)
        # an embedding's gradient touches most rows here, and is smaller when it is dense
        self.optimizer = grace.DistributedOptimizer(sgd, seed=seed, sparse_as_dense=True, **in_optimizer(method))

        @tf.function(autograph=False)
        def step(share: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = task.loss(model, share)
            self.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        self._step = step
        self._quality = tf.function(lambda: task.quality(model), autograph=False)

    @staticmethod
    def join(threads: int) -> None:
        tf.config.set_visible_devices([], "GPU")  # all ranks would take the first one's memory; torch's use CPUs too
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        grace.init(framework="tensorflow")

    @property
    def traffic(self) -> Traffic:
        return self.optimizer.traffic

    def set_lr(self, lr: float) -> None:
        self.optimizer.learning_rate = lr

    def step(self, share: np.ndarray) -> None:
        self._step(tf.constant(share))

    def quality(self) -> float:
        return float(self._quality())
