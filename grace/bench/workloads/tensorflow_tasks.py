"""The tasks of the training benchmarks in TensorFlow and Keras, and how they are trained there."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers, layers

import grace
from grace.bench.workloads import charlm, digits, recommender
from grace.bench.workloads.charlm import BLOCKS, EMBEDDING, GPT_WINDOW, HEADS, HIDDEN, WORST
from grace.bench.workloads.digits import WIDTH
from grace.bench.workloads.task import ADAMW_BETA2, Task, Trainer, in_optimizer
from grace.exchange.bucket import Traffic

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
click_entropy = keras.losses.BinaryCrossentropy(from_logits=True)


class _InTensorFlow(Task):
    """What tasks share here."""

    def order(self, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(count)


def _seeds(seed: int) -> Any:
    """Initializers' seeds, a different one for every weight."""
    return iter(range(100 * seed, 100 * seed + 100))


class _Labelled(_InTensorFlow):
    """Inputs ``x`` and labels ``y`` as tensors."""

    def __init__(self) -> None:
        super().__init__()
        for key in ("train_x", "train_y", "test_x", "test_y"):
            setattr(self, key, tf.constant(getattr(self, key)))


class Digits(_Labelled, digits.Digits):
    """The digits."""

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
    hidden = [_dense(WIDTH, seeds, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input([64]), *hidden, _dense(10, seeds)])


def _dense(units: int, seeds: Any, activation: str | None = None) -> layers.Layer:
    return layers.Dense(units, activation, kernel_initializer=initializers.GlorotUniform(next(seeds)))


def _embedding(rows: int, width: int, seeds: Any, spread: float) -> layers.Layer:
    return layers.Embedding(rows, width, initializers.RandomNormal(stddev=spread, seed=next(seeds)))


class CharacterModel(_InTensorFlow, charlm.CharacterModel):
    """The text, as tensors."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
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


class CharacterGPT(CharacterModel, charlm.CharacterGPT):
    """The text, as tensors, and the GPT."""

    def network(self, seed: int) -> keras.Model:
        return gpt(len(self.characters), self.width, seed)

    def quality(self, model: keras.Model) -> tf.Tensor:
        """The mean cross-entropy."""
        return _next_character(model, self.test)


def gpt(characters: int, width: int, seed: int) -> keras.Model:
    """Embeddings of characters and positions, two blocks, a norm and a linear layer; logits of the next character.

    >>> gpt(100, 48, seed=0).count_params()
    69364
    """
    seeds = _seeds(seed)
    blocks = [Block(width, seeds) for _ in range(BLOCKS)]
    output = _dense(characters, seeds)
    first = Embedded(characters, width, seeds)
    inputs = keras.Input([GPT_WINDOW - 1], dtype="int64")
    return keras.Sequential([inputs, first, *blocks, layers.LayerNormalization(), output])


class Embedded(layers.Layer):
    """The sum of the embeddings of characters and of their positions."""

    def __init__(self, characters: int, width: int, seeds: Any):
        super().__init__()
        sizes = characters, GPT_WINDOW - 1
        self.embedding, self.positions = (_embedding(rows, width, seeds, charlm.SPREAD) for rows in sizes)

    def call(self, codes: tf.Tensor) -> tf.Tensor:
        """(batch, length, width)."""
        return self.embedding(codes) + self.positions(keras.ops.arange(GPT_WINDOW - 1))


class Block(layers.Layer):
    """Causal attention and a layer of four times the width, each after a norm and beside an identity."""

    def __init__(self, width: int, seeds: Any):
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


class Recommender(_Labelled, recommender.Recommender):
    """The clicks."""

    def network(self, seed: int) -> keras.Model:
        return scores(seed)

    def loss(self, model: keras.Model, share: tf.Tensor) -> tf.Tensor:
        return click_entropy(tf.gather(self.train_y, share), model(tf.gather(self.train_x, share)))

    def quality(self, model: keras.Model) -> tf.Tensor:
        """The log loss."""
        return click_entropy(self.test_y, model(self.test_x))


def scores(seed: int) -> keras.Model:
    """Two embedding tables, and an MLP of both embeddings and their product; logits of clicks.

    >>> scores(seed=0).count_params()
    27201
    """
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

    def quality(self) -> float:
        return float(self._quality())
