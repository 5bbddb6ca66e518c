"""Small language tasks: the next character of Python's own reference manual, by an LSTM and by a GPT."""

import math

import numpy as np

from grace.bench.workloads.task import LabelledTask

HIDDEN, EMBEDDING = 128, 32
"""Of an embedding, one LSTM layer and a linear layer over the characters."""
WINDOW, GPT_WINDOW = 32, 64
TRAINING, GPT_TRAINING, TEST = 200_000, 440_000, 20_000
"""Characters."""
SIZE, BLOCKS, HEADS, UNIT, SPREAD = 70_000, 2, 4, 16, 0.02
"""Sizes of a GPT: parameters, blocks, heads of attention, the unit that divides its width, and the standard deviation
of new embeddings."""


class CharacterModel(LabelledTask):
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
    window, training = WINDOW, TRAINING

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))[: self.training + TEST]
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        codes = np.array([number[character] for character in text])
        train, test = windows(codes[: self.training], self.window), windows(codes[self.training :], self.window)
        self.train_x, self.train_y = train[:, :-1], train[:, 1:]
        self.test_x, self.test_y = test[:, :-1], test[:, 1:]


class CharacterGPT(CharacterModel):
    """A GPT (Radford et al., 2018) of two blocks, whose quality is its mean cross-entropy in nats on held-out text.

    AdamW's rate rises in the first tenth of all steps; it is 6e-3 for a width of 48, the default's, and falls with the
    width's inverse.

    Args:
        size: about how many parameters there are.
    """

    about = "characters of Python's manual, GPT"
    metric = "loss"
    target = 1.5
    quick_epochs = 1
    optimizer, lr, adamw_lr, warmup, epochs, clip = "adamw", 1.0, 6e-3, 0.1, 4, 1.0
    window, training = GPT_WINDOW, GPT_TRAINING
    sized = True

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.width = width_of(size, len(self.characters))

    def rate(self, optimizer: str) -> float:
        return super().rate(optimizer) * (48 / self.width if optimizer == "adamw" else 1)


def width_of(size: int, characters: int) -> int:
    """Return the width of the GPT that has about so many parameters.

    >>> [width_of(size, 100) for size in (1, 70_000, 1_000_000)]
    [16, 48, 192]
    """
    # a block has 12 width^2 and 13 width; embeddings, positions, the last norm and the output the rest
    square, linear = 12 * BLOCKS, 13 * BLOCKS + 2 * characters + GPT_WINDOW + 2
    width = (math.sqrt(linear**2 + 4 * square * size) - linear) / (2 * square)
    return max(1, round(width / UNIT)) * UNIT


def windows(codes: np.ndarray, size: int) -> np.ndarray:
    """Return the characters in rows of ``size``; a last row that is not full is left out.

    >>> windows(np.arange(70), 32).shape
    (2, 32)
    """
    return codes[: len(codes) // size * size].reshape(-1, size)
