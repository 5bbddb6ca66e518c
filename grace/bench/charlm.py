"""A small language task: the next character of Python's own reference manual, and an LSTM."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from grace.bench.digits import shares
from grace.bench.task import Task

HIDDEN, EMBEDDING = 128, 32
WINDOW, BATCH = 32, 32
TRAINING, TEST = 200_000, 20_000
"""Characters."""


class CharacterModel(Task):
    """The text is that of Python's ``help()`` topics (which differs a little between Python versions).

    It is cut into windows of 32 characters, each predicted from an empty state; the quality is the perplexity
    exp(mean cross-entropy in nats) on text that follows the training text.
    """

    about = "characters of Python's manual, LSTM"
    metric = "perplexity"
    higher_is_better = False
    lr, epochs, clip = 1.0, 16, 1.0

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[key] for key in sorted(topics))[: TRAINING + TEST]
        self.characters = sorted(set(text))
        number = {character: i for i, character in enumerate(self.characters)}
        codes = torch.tensor([number[character] for character in text])
        self.train, self.test = codes[:TRAINING], codes[TRAINING:]

    def network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return CharacterLSTM(len(self.characters))

    def shares(self, ranks: int, rank: int, seed: int, epoch: int) -> list[torch.Tensor]:
        return shares(len(self.train) // WINDOW, BATCH, ranks, rank, seed, epoch)

    def loss(self, model: nn.Module, share: torch.Tensor) -> torch.Tensor:
        windows = _windows(self.train)[share]
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def quality(self, model: nn.Module) -> float:
        windows = _windows(self.test)
        with torch.no_grad():
            loss = cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        return math.exp(min(float(loss), 700.0))  # of a model that diverged: large, but a number


def _windows(codes: torch.Tensor) -> torch.Tensor:
    return codes[: len(codes) // WINDOW * WINDOW].view(-1, WINDOW)


class CharacterLSTM(nn.Module):
    """Embedding, one LSTM layer and a linear layer over the characters.

    >>> sum(p.numel() for p in CharacterLSTM(100).parameters())
    99044
    """

    def __init__(self, characters: int):
        super().__init__()
        self.embedding = nn.Embedding(characters, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.output = nn.Linear(HIDDEN, characters)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Logits of the next character: (batch, length, characters)."""
        return self.output(self.lstm(self.embedding(codes))[0])
