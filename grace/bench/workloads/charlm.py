"""A small language task: the next character of Python's own reference manual, and an LSTM."""

from typing import Any

import numpy as np

from grace.bench.workloads.task import Task

HIDDEN, EMBEDDING = 128, 32
"""Of an embedding, one LSTM layer and a linear layer over the characters."""
WINDOW = 32
TRAINING, TEST = 200_000, 20_000
"""Characters."""
WORST = 700.0
"""The largest mean loss whose exponential is shown: of a model that diverged it is large, but a number."""


class CharacterModel(Task):
    """The text is that of Python's ``help()`` topics (which differs a little between Python versions).

    It is cut into windows of 32 characters, each predicted from an empty state; the quality is the perplexity
    exp(mean cross-entropy in nats) on text that follows the training text.
    """

    about = "characters of Python's manual, LSTM"
    metric = "perplexity"
    higher_is_better = False
    target = 5.5
    quick_epochs = 4
    lr, epochs, clip, batch = 1.0, 16, 1.0, 32

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))[: TRAINING + TEST]
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        codes = np.array([number[character] for character in text])
        self.train: Any = windows(codes[:TRAINING])
        self.test: Any = windows(codes[TRAINING:])

    @property
    def count(self) -> int:
        return len(self.train)


def windows(codes: np.ndarray) -> np.ndarray:
    """The characters in rows of ``WINDOW``; those that do not fill one are left out.

    >>> windows(np.arange(70)).shape
    (2, 32)
    """
    return codes[: len(codes) // WINDOW * WINDOW].reshape(-1, WINDOW)
