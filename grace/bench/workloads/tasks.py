"""Tasks of ``grace bench train`` by name: Grace's, and users' own."""

from collections.abc import Callable
from functools import partial
from typing import Any

from grace.bench.common.results import Settings
from grace.bench.common.user_functions import load_function
from grace.bench.workloads.task import Task
from grace.errors import ConfigError

TASKS = {
    "digits": "Digits",
    "digits-cnn": "DigitsCNN",
    "charlm": "CharacterModel",
    "chargpt": "CharacterGPT",
    "recommender": "Recommender",
}
"""Classes of :mod:`grace.bench.workloads.torch_tasks`."""
FACTS = (
    *("about", "metric", "unit", "scale", "higher_is_better", "target"),
    *("optimizer", "epochs", "quick_epochs", "batch"),
)


def task_class(name: str, size: int | None = None) -> Callable[[], Task]:
    """Return the function that makes a task.

    The name is one of ``TASKS``, or ``module:function``, whose function (or class) returns a Task. ``size`` is about
    how many parameters the model has. A ConfigError says that there is no such task, or that its model has one size.
    """
    if name in TASKS:
        from grace.bench.workloads import torch_tasks  # which needs torch

        made: Callable[..., Task] = getattr(torch_tasks, TASKS[name])
    else:
        made = partial(_checked_task, name, load_function(name, "task", sorted(TASKS)))
    if size is None:
        return made
    if not getattr(made, "sized", False):
        raise ConfigError(f"size: the model of the task {name} has one size; chargpt's can be chosen")
    return partial(made, size)


def _checked_task(name: str, function: Callable[[], Any]) -> Task:
    task = function()
    if not isinstance(task, Task):
        raise ConfigError(f"{name}() must return a grace.bench.workloads.Task, not {type(task).__name__}")
    if task.count < task.batch:
        raise ConfigError(f"{name}() has {task.count} examples, and a batch has {task.batch}")
    return task


def facts(name: str) -> Settings:
    """Return the facts of a task.

    >>> facts("charlm")["metric"], facts("charlm")["higher_is_better"]
    ('perplexity', False)
    """
    task = task_class(name) if name in TASKS else task_class(name)()  # a user's function may be no class
    return {key: getattr(task, key) for key in FACTS}
