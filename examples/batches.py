"""Synthetic data for the models of examples/torch/models.py and examples/tensorflow/models.py, in NumPy.

Labels come from fixed random teachers, so that there is something to learn; the seed draws the samples alone, so
batches of other seeds are other samples of the same data. Both frameworks get the same numbers.
"""

from functools import cache
from typing import Any

import numpy as np

NAMES = ("mlp", "resnet", "lstm", "transformer", "ncf")
TEACHER = 20210707
"""The seed of all that stays the same from batch to batch."""

Arrays = tuple[tuple[np.ndarray, ...], np.ndarray]
"""A batch: the inputs of the model, and the targets."""


def arrays(name: str, seed: int, size: int, **sizes: int) -> Arrays:
    """Return a batch of a model.

    Args:
        name: one of ``NAMES``.
        seed: draws the samples; not negative.
        size: samples in the batch.
        sizes: as for :func:`digits`, :func:`images`, :func:`text` or :func:`ratings`, where they are to differ from the
            defaults; those that the model takes too must be the model's.

    Raises:
        ValueError: there is no such model.

    >>> (images,), labels = arrays("resnet", seed=0, size=4, channels=3, side=16)
    >>> images.shape, labels.shape
    ((4, 3, 16, 16), (4,))
    """
    make: Any = {"mlp": digits, "resnet": images, "lstm": text, "transformer": text, "ncf": ratings}.get(name)
    if make is None:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")
    return make(np.random.default_rng(seed), size, **sizes)


def digits(rng: np.random.Generator, size: int, inputs: int = 64, classes: int = 10) -> Arrays:
    """For the MLP: a random image per class, under noise; float32 (size, inputs), and int64 classes (size,)."""
    labels = rng.integers(classes, size=size)
    noise = rng.standard_normal((size, inputs))
    return ((0.5 * (_normal(classes, inputs)[labels] + 1.5 * noise)).astype(np.float32),), labels


def images(rng: np.random.Generator, size: int, channels: int = 1, side: int = 8, classes: int = 10) -> Arrays:
    """For the ResNet: a random texture per class, 4 x 4 pixels that repeat, under noise.

    The images are float32 (size, channels, side, side), the classes int64 (size,).
    """
    labels = rng.integers(classes, size=size)
    pixels = np.arange(side) % 4
    clean = _normal(classes, channels, 4, 4)[..., pixels[:, None], pixels][labels]
    return ((clean + 0.3 * rng.standard_normal(clean.shape)).astype(np.float32),), labels


def text(rng: np.random.Generator, size: int, vocabulary: int = 64, length: int = 32) -> Arrays:
    """For the language models: int64 characters (size, length), and the characters that follow them (size, length).

    Four times out of five a character has its one successor, else any follows, the first ones most often.
    """
    successor = np.random.default_rng(TEACHER).permutation(vocabulary)
    characters = np.empty((size, length + 1), np.int64)
    characters[:] = _zipf(rng, vocabulary, (size, length + 1))
    regular = rng.random((size, length)) < 0.8
    for i in range(length):
        characters[:, i + 1] = np.where(regular[:, i], successor[characters[:, i]], characters[:, i + 1])
    return (characters[:, :-1],), characters[:, 1:]


def ratings(rng: np.random.Generator, size: int, users: int = 20_000, items: int = 10_000) -> Arrays:
    """For the recommender: int64 users (size,) and items (size,), and whether each liked the item, float32 (size,).

    The first ones come most often, so that rows of the embeddings repeat in a batch. About one in five is liked: some
    items by more users than others, and by those whose taste they meet (the product of 8 random numbers of each).
    """
    user, item = _zipf(rng, users, (size,)), _zipf(rng, items, (size,))
    taste, style = _normal(users, 8)[user], _normal(items + 1, 9)[item]
    score = (taste * style[:, :8]).sum(1) / 2 + style[:, 8] - 2
    return (user, item), (rng.random(size) < 1 / (1 + np.exp(-score))).astype(np.float32)


@cache
def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(TEACHER).standard_normal(shape)


def _zipf(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers below the count; i comes about 1 / (i + 1) times as often as 0."""
    return np.minimum((count + 1.0) ** rng.random(shape), count).astype(np.int64) - 1
