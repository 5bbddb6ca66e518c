"""Tasks of the training benchmarks in TensorFlow and Keras, and their trainer."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers, layers

import grace
from grace.bench.workloads import charlm, digits, recommender
from grace.bench.workloads.charlm import BLOCKS, EMBEDDING, GPT_WINDOW, HEADS, HIDDEN
from grace.bench.workloads.digits import WIDTH
from grace.bench.workloads.task import ADAMW_BETA2, ARRAYS, WORST, LabelledTask, Trainer, in_optimizer
from grace.exchange.bucket import Traffic

class_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
click_entropy = keras.losses.BinaryCrossentropy(from_logits=True)


class _LabelledInTensorFlow(LabelledTask):
    """Task of arrays in TensorFlow."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        for key in ARRAYS:
            setattr(self, key, tf.constant(getattr(self, key)))

    def order(self, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(count)

    def loss(self, model: keras.Model, share: tf.Tensor) -> tf.Tensor:
        return _entropy(model(tf.gather(self.train_x, share)), tf.gather(self.train_y, share))

    def quality(self, model: keras.Model) -> tf.Tensor:
        """Return the task's metric on the test data."""
        outputs = model(self.test_x)
        if self.metric == "accuracy":
            named = tf.argmax(outputs, 1)
            return tf.reduce_mean(tf.cast(named == tf.cast(self.test_y, named.dtype), tf.float32))
        loss = _entropy(outputs, self.test_y)
        return tf.exp(tf.minimum(tf.cast(loss, tf.float64), WORST)) if self.metric == "perplexity" else loss


def _entropy(outputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return the mean cross-entropy of logits of classes, or of one logit where labels are 0.0 or 1.0."""
    return (click_entropy if labels.dtype.is_floating else class_entropy)(labels, outputs)


def _seeds(seed: int) -> Iterator[int]:
    """Return initializers' seeds, a different one for every weight."""
    return iter(range(100 * seed, 100 * seed + 100))


def _dense(units: int, seeds: Iterator[int], activation: str | None = None) -> layers.Layer:
    return layers.Dense(units, activation, kernel_initializer=initializers.GlorotUniform(next(seeds)))


def _embedding(rows: int, width: int, seeds: Iterator[int], spread: float) -> layers.Layer:
    return layers.Embedding(rows, width, initializers.RandomNormal(stddev=spread, seed=next(seeds)))


class Digits(_LabelledInTensorFlow, digits.Digits):
    """The digits, and a multilayer perceptron.

    >>> Digits().network(0).count_params()
    301066
    """

    def network(self, seed: int) -> keras.Model:
        seeds = _seeds(seed)
        hidden = [_dense(WIDTH, seeds, "relu") for _ in range(2)]
        return keras.Sequential([keras.Input([64]), *hidden, _dense(10, seeds)])


class DigitsCNN(_LabelledInTensorFlow, digits.DigitsCNN):
    """The digits, and a convolutional network.

    >>> DigitsCNN().network(0).count_params()
    38282
    """

    def network(self, seed: int) -> keras.Model:
        seeds = _seeds(seed)
        form: dict[str, Any] = {"padding": "same", "activation": "relu"}
        convolutions = [
            layers.Conv2D(channels, 3, **form, kernel_initializer=initializers.GlorotUniform(next(seeds)))
            for channels in digits.CHANNELS
        ]
        hidden, output = _dense(digits.HIDDEN, seeds, "relu"), _dense(10, seeds)
        images = [keras.Input([64]), layers.Reshape([8, 8, 1])]
        return keras.Sequential([*images, *convolutions, layers.MaxPooling2D(), layers.Flatten(), hidden, output])


class CharacterModel(_LabelledInTensorFlow, charlm.CharacterModel):
    """The text, and the LSTM."""

    def network(self, seed: int) -> keras.Model:
        """Return an embedding, one LSTM layer and a linear layer over the characters."""
        seeds, count = _seeds(seed), len(self.characters)
        first, last = (initializers.GlorotUniform(next(seeds)) for _ in range(2))
        recurrent = initializers.Orthogonal(seed=next(seeds))
        form: dict[str, Any] = {"kernel_initializer": first, "recurrent_initializer": recurrent}
        lstm = layers.LSTM(HIDDEN, return_sequences=True, **form, seed=next(seeds))
        embedding = _embedding(count, EMBEDDING, seeds, 1.0)
        output = layers.Dense(count, kernel_initializer=last)
        return keras.Sequential([keras.Input([None], dtype="int64"), embedding, lstm, output])


class CharacterGPT(_LabelledInTensorFlow, charlm.CharacterGPT):
    """The text, and the GPT."""

    def network(self, seed: int) -> keras.Model:
        """Return embeddings of characters and positions, blocks, a norm and a linear layer."""
        seeds, count = _seeds(seed), len(self.characters)
        blocks = [AttentionBlock(self.width, seeds) for _ in range(BLOCKS)]
        output = _dense(count, seeds)
        inputs, first = keras.Input([GPT_WINDOW - 1], dtype="int64"), Embedded(count, self.width, seeds)
        return keras.Sequential([inputs, first, *blocks, layers.LayerNormalization(), output])


class Embedded(layers.Layer):
    """The sum of the embeddings of characters and of their positions."""

    def __init__(self, characters: int, width: int, seeds: Iterator[int]):
        super().__init__()
        sizes = characters, GPT_WINDOW - 1
        self.embedding, self.positions = (_embedding(rows, width, seeds, charlm.SPREAD) for rows in sizes)

    def call(self, codes: tf.Tensor) -> tf.Tensor:
        """Return hidden states: (batch, length, width)."""
        return self.embedding(codes) + self.positions(keras.ops.arange(GPT_WINDOW - 1))


class AttentionBlock(layers.Layer):
    """Causal attention and a layer of four times the width, each after a norm and beside an identity."""

    def __init__(self, width: int, seeds: Iterator[int]):
        super().__init__()
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attended, self.projected = _dense(3 * width, seeds), _dense(width, seeds)
        self.wide, self.narrow = _dense(4 * width, seeds, "gelu"), _dense(width, seeds)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Return hidden states of the shape of the input: (batch, length, width)."""
        length, width = x.shape[1:]
        heads = keras.ops.reshape(self.attended(self.norms[0](x)), (-1, length, 3, HEADS, width // HEADS))
        found = keras.ops.dot_product_attention(*(heads[:, :, i] for i in range(3)), is_causal=True)
        x = x + self.projected(keras.ops.reshape(found, (-1, length, width)))
        return x + self.narrow(self.wide(self.norms[1](x)))


class Recommender(_LabelledInTensorFlow, recommender.Recommender):
    """The clicks, and the scores of pairs.

    >>> Recommender().network(0).count_params()
    27201
    """

    def network(self, seed: int) -> keras.Model:
        """Return two embedding tables, and an MLP of both embeddings and their product, which gives clicks' logits."""
        seeds, pairs = _seeds(seed), keras.Input([2], dtype="int64")
        width, spread = recommender.EMBEDDING, recommender.SPREAD
        user = _embedding(recommender.USERS, width, seeds, spread)(pairs[:, 0])
        item = _embedding(recommender.ITEMS, width, seeds, spread)(pairs[:, 1])
        hidden = _dense(recommender.HIDDEN, seeds, "relu")(keras.ops.concatenate([user, item, user * item], 1))
        return keras.Model(pairs, _dense(1, seeds)(hidden)[:, 0])


class FrameworkTrainer(Trainer):
    """SGD or AdamW in a graph, over Horovod or MPI."""

    def __init__(self, task: Any, method: str, seed: int, lr: float, momentum: float, optimizer: str = "sgd"):
        self.model = model = task.network(seed)
        if optimizer == "sgd":
            made = keras.optimizers.SGD(lr, momentum=momentum, global_clipnorm=task.clip)
        else:  # torch's decay of weights is .01, and Keras' .004
            made = keras.optimizers.AdamW(lr, 0.01, momentum, ADAMW_BETA2, 1e-8, global_clipnorm=task.clip)
        # an embedding's gradient touches most rows here, and is smaller when it is dense
        self.optimizer = grace.DistributedOptimizer(made, seed=seed, sparse_as_dense=True, **in_optimizer(method))

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

    def flush(self) -> None:
        self.optimizer.flush()

    def quality(self) -> float:
        with self.optimizer.anchor():
            return float(self._quality())
