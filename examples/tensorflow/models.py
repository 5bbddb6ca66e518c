"""Five small Keras models, randomly initialised, with data to train them on: for trials, strategies and tests.

grace strategy build --model examples.tensorflow.models:ncf --builder parallax -n 2 -o s.yaml  # from the repository

They are those of examples/torch/models.py, as Keras has their layers. All their variables are there when the functions
return. The gradients of ``Embedding`` layers, in ``lstm``, ``transformer`` and ``ncf``, are ``tf.IndexedSlices``. Every
optimizer of Keras takes them; but those that square gradients (Adam, Adagrad, RMSprop and others) square each slice by
itself, so where rows repeat in a batch, their steps differ from those for the same gradient made dense.

No model has dropout or batch statistics, so that the mean of the ranks' losses is the loss of their batches together.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import initializers, layers

from examples.batches import arrays

Batch = tuple[tuple[tf.Tensor, ...], tf.Tensor]
"""The model's inputs, and the targets."""


def batch(name: str, seed: int, size: int, **sizes: int) -> Batch:
    """Return a batch for the model of this name. The same seed gives the same batch.

    The numbers are those of examples/torch/models.py; images have their channels last.

    Args:
        name: ``mlp``, ``resnet``, ``lstm``, ``transformer`` or ``ncf``.
        seed: draws the samples; not negative.
        size: samples in the batch.
        sizes: as for the functions of ``examples.batches``, which say the shapes and dtypes.

    >>> (images,), labels = batch("resnet", seed=0, size=4, channels=3, side=16)
    >>> images.shape, labels.dtype
    (TensorShape([4, 16, 16, 3]), tf.int64)
    """
    inputs, targets = arrays(name, seed, size, **sizes)
    if name == "resnet":
        inputs = (np.moveaxis(inputs[0], 1, -1),)
    return tuple(tf.constant(x) for x in inputs), tf.constant(targets)


def loss(name: str, model: keras.Model, batch: Batch) -> tf.Tensor:
    """Return the mean loss of the model of this name: a float32 scalar, in nats.

    That is the cross-entropy per sample (``mlp``, ``resnet``), character (``lstm``, ``transformer``), or rating.
    """
    inputs, targets = batch
    outputs = model(inputs[0] if len(inputs) == 1 else list(inputs))
    if name == "ncf":
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=outputs))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=outputs))


def mlp(*, inputs: int = 64, hidden: int = 128, classes: int = 10) -> keras.Model:
    """A multilayer perceptron with two hidden layers: float32 (batch, inputs) to logits (batch, classes).

    >>> mlp().count_params()
    26122
    """
    images = x = keras.Input([inputs])
    for i in range(2):
        x = layers.Dense(hidden, "relu", name=f"hidden{i}")(x)
    return keras.Model(images, layers.Dense(classes, name="output")(x), name="mlp")


def resnet(*, channels: int = 1, width: int = 16, stages: int = 2, classes: int = 10) -> keras.Model:
    """A residual network: float32 images (batch, any height, any width, channels) to logits (batch, classes).

    A convolution and a block of ``width`` channels; every further stage is a block with twice the channels and half
    the height and width. Groups of channels are normalized, not batches.

    >>> resnet().count_params()
    19642
    >>> resnet(channels=3)(tf.zeros([2, 16, 16, 3])).shape
    TensorShape([2, 10])
    """
    images = keras.Input([None, None, channels])
    x = layers.ReLU()(_convolution(images, width, "stem"))
    for stage in range(stages):
        before, after = x.shape[-1], width << stage
        stride = 1 if after == before else 2
        inner = layers.ReLU()(_convolution(x, after, f"block{stage}_first", stride))
        inner = _convolution(inner, after, f"block{stage}_second")
        if stride > 1:
            x = layers.Conv2D(after, 1, stride, use_bias=False, name=f"block{stage}_shortcut")(x)
        x = layers.ReLU()(layers.Add()([inner, x]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes, name="output")(x), name="resnet")


def lstm(*, vocabulary: int = 64, width: int = 32, hidden: int = 128) -> keras.Model:
    """A character model, of an embedding, an LSTM layer and a dense layer.

    It takes int64 characters (batch, length), and gives logits of the next ones: (batch, length, vocabulary).

    >>> lstm().count_params()
    92736
    """
    characters = keras.Input([None], dtype="int64")
    x = _embedding(vocabulary, width, "embedding", 1.0)(characters)
    x = layers.LSTM(hidden, return_sequences=True, name="lstm")(x)
    return keras.Model(characters, layers.Dense(vocabulary, name="output")(x), name="lstm")


def transformer(
    *, vocabulary: int = 64, length: int = 32, width: int = 64, heads: int = 4, blocks: int = 2
) -> keras.Model:
    """A character model, of causal self-attention.

    It takes int64 characters (batch, up to length), and gives logits of the next ones: (batch, as many, vocabulary).

    >>> transformer().count_params()
    110400
    """
    characters = keras.Input([None], dtype="int64")
    x = Positions(length, name="positions")(_embedding(vocabulary, width, "embedding", 1.0)(characters))
    for i in range(blocks):
        hidden = layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_norm1")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"block{i}_attention")
        x = layers.Add()([x, attention(hidden, hidden, use_causal_mask=True)])
        hidden = layers.LayerNormalization(epsilon=1e-5, name=f"block{i}_norm2")(x)
        hidden = layers.Dense(4 * width, "relu", name=f"block{i}_hidden")(hidden)
        x = layers.Add()([x, layers.Dense(width, name=f"block{i}_output")(hidden)])
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(characters, layers.Dense(vocabulary, name="output")(x), name="transformer")


def ncf(*, users: int = 20_000, items: int = 10_000, width: int = 16) -> keras.Model:
    """Neural collaborative filtering (He et al., WWW 2017, arXiv 1708.05031): nearly all of it is embeddings.

    One tower multiplies the embeddings of a user and an item, the other has a perceptron of other embeddings of them;
    a dense layer joins the towers. It takes ``[users, items]``, int64 (batch,) each, and gives logits (batch,).

    >>> ncf().count_params()
    961617
    """
    user, item = keras.Input([], dtype="int64", name="user"), keras.Input([], dtype="int64", name="item")
    factors = layers.Multiply()(
        [_embedding(users, width, "user_factors", 0.1)(user), _embedding(items, width, "item_factors", 0.1)(item)]
    )
    features = layers.Concatenate()(
        [_embedding(users, width, "user_features", 0.1)(user), _embedding(items, width, "item_features", 0.1)(item)]
    )
    for i, units in enumerate((2 * width, width)):
        features = layers.Dense(units, "relu", name=f"hidden{i}")(features)
    logits = layers.Dense(1, name="output")(layers.Concatenate()([factors, features]))
    return keras.Model([user, item], layers.Reshape([])(logits), name="ncf")


@keras.saving.register_keras_serializable("grace_examples")
class Positions(layers.Layer):
    """Adds a learned vector to every position: float32 (batch, up to length, width) to the same."""

    def __init__(self, length: int, **options: Any):
        super().__init__(**options)
        self.length = length

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        start = initializers.RandomNormal(stddev=0.1)
        self.vectors = self.add_weight(shape=(self.length, input_shape[-1]), initializer=start, name="vectors")

    def call(self, inputs: Any) -> Any:
        return inputs + self.vectors[: keras.ops.shape(inputs)[1]]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "length": self.length}


def _embedding(count: int, width: int, name: str, stddev: float) -> layers.Embedding:
    return layers.Embedding(count, width, initializers.RandomNormal(stddev=stddev), name=name)


def _convolution(images: Any, width: int, name: str, stride: int = 1) -> Any:
    """A convolution, normalized."""
    x = layers.Conv2D(width, 3, stride, padding="same", use_bias=False, name=name)(images)
    return layers.GroupNormalization(4 if width % 4 == 0 else 1, epsilon=1e-5, name=f"{name}_norm")(x)
