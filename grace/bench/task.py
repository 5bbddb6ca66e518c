"""What a training benchmark trains: the contract of a task, and the tasks that Grace brings."""

from __future__ import annotations

import abc
import importlib
from typing import Any, ClassVar

from grace.errors import ConfigError

TASKS = {"digits": "grace.bench.digits:Digits", "charlm": "grace.bench.charlm:CharacterModel"}


class Task(abc.ABC):
    """A model, its data, and how good it has become.

    The data's order and the initial weights depend on the seed alone, so that methods differ in nothing else.
    """

    about: ClassVar[str]
    """What the task is, in a few words."""
    metric: ClassVar[str]
    """What ``quality`` measures."""
    unit: ClassVar[str] = ""
    scale: ClassVar[float] = 1.0
    """What ``quality`` is multiplied with to be shown in ``unit``."""
    higher_is_better: ClassVar[bool] = True
    lr: ClassVar[float]
    """The learning rate at the start; it falls to 0 along a cosine."""
    momentum: ClassVar[float] = 0.9
    clip: ClassVar[float | None] = None
    """The largest norm of the averaged gradient of all parameters."""
    epochs: ClassVar[int]

    @abc.abstractmethod
    def network(self, seed: int) -> Any:
        """The model with the seed's initial weights; the global generator is left alone."""

    @abc.abstractmethod
    def shares(self, ranks: int, rank: int, seed: int, epoch: int) -> list[Any]:
        """This rank's shares of an epoch's batches, in order."""

    @abc.abstractmethod
    def loss(self, model: Any, share: Any) -> Any:
        """The mean loss over a share: a 0-d tensor."""

    @abc.abstractmethod
    def quality(self, model: Any) -> float:
        """How good the model is on held-out data."""


def task_class(name: str) -> type[Task]:
    """The class of a task.

    >>> task_class("digits").metric
    'accuracy'
    >>> task_class("mnist")
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown task 'mnist'; known: charlm, digits
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(sorted(TASKS))}")
    module, attribute = TASKS[name].split(":")
    return getattr(importlib.import_module(module), attribute)
