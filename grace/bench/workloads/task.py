"""Contract of a task that a training benchmark trains, and the tasks that Grace brings."""

import abc
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from grace.bench.common.user_functions import load_function
from grace.core import specs
from grace.core.registry import known
from grace.errors import ConfigError

TASKS = {
    "digits": "digits.Digits",
    "digits-cnn": "digits.DigitsCNN",
    "charlm": "charlm.CharacterModel",
    "chargpt": "charlm.CharacterGPT",
    "recommender": "recommender.Recommender",
}
"""The module and class of each task; in ``FRAMEWORK_tasks`` a class of the same name fills it in."""
FRAMEWORKS = ("torch", "tensorflow")
OPTIMIZERS = ("sgd", "adamw")
ARRAYS = ("train_x", "train_y", "test_x", "test_y")
"""Arrays of a :class:`LabelledTask`."""
WORST = 700.0
"""The largest mean loss whose exponential is shown: of a model that diverged it is large, but a number."""
ADAMW_BETA2 = 0.99
"""The second moments' decay, for runs of about a thousand steps; AdamW's first beta is the task's ``momentum``."""
FACTS = (
    *("about", "metric", "unit", "scale", "higher_is_better", "target"),
    *("optimizer", "epochs", "quick_epochs", "batch"),
)


def in_optimizer(method: str) -> dict[str, str]:
    """Return the argument of ``DistributedOptimizer`` for a method: a spec of a compressor or a strategy's builder.

    >>> in_optimizer("topk(ratio=0.05)"), in_optimizer("auto(quality='half')")
    ({'compressor': 'topk(ratio=0.05)'}, {'strategy': "auto(quality='half')"})
    """
    built = not specs.split(method) and specs.parse(method)[0] in known("builder")
    return {"strategy" if built else "compressor": method}


class Task(abc.ABC):
    """Model, its data, and how good it has become.

    The facts and the data are the same in every framework; what is abstract here is the framework's. The data's order
    and the initial weights depend on the seed alone, so that methods differ in nothing else.
    """

    about: ClassVar[str]
    """Description of the task, in a few words."""
    metric: ClassVar[str]
    """Name of the figure that ``quality`` returns."""
    unit: ClassVar[str] = ""
    scale: ClassVar[float] = 1.0
    """Factor of ``quality`` for showing it in ``unit``."""
    higher_is_better: ClassVar[bool] = True
    optimizer: ClassVar[str] = "sgd"
    """The default optimizer: one of ``OPTIMIZERS``."""
    lr: ClassVar[float]
    """The peak of SGD's learning rate."""
    adamw_lr: ClassVar[float] = 3e-3
    """The peak of AdamW's learning rate."""
    warmup: ClassVar[float] = 0.0
    """The part of all steps in which the learning rate rises to its peak; it falls to 0 along a cosine afterwards."""
    momentum: ClassVar[float] = 0.9
    clip: ClassVar[float | None] = None
    """The largest norm of the averaged gradient of all parameters."""
    epochs: ClassVar[int]
    quick_epochs: ClassVar[int | None] = None
    """Enough to see that methods learn, where ``epochs`` take minutes."""
    target: ClassVar[float | None] = None
    """A quality that is worth reaching: how long that takes is measured."""
    batch: ClassVar[int]
    """Examples in a global batch, whatever the number of ranks."""
    sized: ClassVar[bool] = False
    """True if the class takes the number of the model's parameters."""

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """Training examples."""

    @abc.abstractmethod
    def network(self, seed: int) -> Any:
        """Return the model with the seed's initial weights; the global generator is left alone."""

    @abc.abstractmethod
    def order(self, count: int, seed: int) -> Any:
        """Return the numbers from 0 to ``count`` - 1 in an order that depends on the seed alone."""

    @abc.abstractmethod
    def loss(self, model: Any, share: Any) -> Any:
        """Return the mean loss over a share: a 0-d tensor."""

    @abc.abstractmethod
    def quality(self, model: Any) -> Any:
        """Return the quality of the model on held-out data: a number, or a 0-d tensor."""

    def rate(self, optimizer: str) -> float:
        """Return the peak of an optimizer's learning rate."""
        return self.lr if optimizer == "sgd" else self.adamw_lr

    def schedule(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, of so many, relative to its peak; it is above 0."""
        rise = self.warmup * steps
        if step < rise:
            return (step + 1) / (rise + 1)
        return (1 + math.cos(math.pi * (step - rise) / (steps - rise))) / 2

    def shares(self, ranks: int, rank: int, seed: int, epoch: int) -> list[Any]:
        """Return this rank's shares of an epoch's batches, in order: numbers of examples, no example twice.

        Examples that do not fill a batch are left out.
        """
        order = self.order(self.count, 1000 * seed + epoch)
        return [order[i : i + self.batch][rank::ranks] for i in range(0, self.count - self.batch + 1, self.batch)]


class LabelledTask(Task):
    """Task of arrays: what a model is given, and what it shall answer; its loss is a cross-entropy."""

    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any

    @property
    def count(self) -> int:
        return len(self.train_x)


class Trainer(abc.ABC):
    """Training run of a task with one method in one framework: the model, its distributed optimizer, and a step.

    The seed is that of weights, order and method; the momentum is AdamW's first beta, too.
    """

    @abc.abstractmethod
    def __init__(self, task: Any, method: str, seed: int, lr: float, momentum: float, optimizer: str = "sgd"): ...

    @staticmethod
    @abc.abstractmethod
    def join(threads: int) -> None:
        """Join the run, and compute with so many threads."""

    @property
    @abc.abstractmethod
    def traffic(self) -> Any:
        """Counts of all exchanges so far."""

    @abc.abstractmethod
    def set_lr(self, lr: float) -> None:
        """Set the learning rate of later steps."""

    @abc.abstractmethod
    def step(self, share: Any) -> None:
        """Make one training step, and wait until it has ended."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Run a last outer round, where ranks train alone."""

    @abc.abstractmethod
    def quality(self) -> float:
        """Return the task's quality of the parameters that all ranks share."""


def task_class(name: str, framework: str | None = None, size: int | None = None) -> Callable[[], Task]:
    """Return the function that makes a task in a framework; without one, a task of its facts and data.

    The name is one of ``TASKS``, or ``module:function``, whose function (or class) returns a Task. ``size`` is about
    how many parameters the model has. A ConfigError says that there is no such task, or that its model has one size.

    >>> task_class("digits").metric
    'accuracy'
    >>> task_class("mnist")
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown task 'mnist'; known: chargpt, charlm, digits, digits-cnn, recommender, or ...
    """
    if name in TASKS:
        module, _, cls = TASKS[name].partition(".")
        module = module if framework is None else f"{check_framework(framework)}_tasks"
        made: Any = getattr(importlib.import_module(f"grace.bench.workloads.{module}"), cls)
    else:
        made = partial(_own, name, load_function(name, "task", sorted(TASKS)))
    if size is None:
        return made
    if not getattr(made, "sized", False):
        raise ConfigError(f"size: the model of the task {name} has one size; chargpt's can be chosen")
    return partial(made, size)


def _own(name: str, function: Callable[[], Any]) -> Task:
    task = function()
    if not isinstance(task, Task):
        raise ConfigError(f"{name}() must return a grace.bench.workloads.Task, not {type(task).__name__}")
    return task


def facts(name: str) -> dict[str, Any]:
    """Return the facts of a task, which are the same in every framework.

    >>> facts("charlm")["metric"], facts("charlm")["higher_is_better"]
    ('perplexity', False)
    """
    task: Any = task_class(name) if name in TASKS else task_class(name)()
    return {key: getattr(task, key) for key in FACTS}


def trainer_class(framework: str) -> type[Trainer]:
    """Return the class of a framework's trainer."""
    return importlib.import_module(f"grace.bench.workloads.{check_framework(framework)}_tasks").FrameworkTrainer


def check_framework(name: str) -> str:
    """Return the name, or raise if it is no framework's.

    >>> check_framework("jax")
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown framework 'jax'; known: torch, tensorflow
    """
    if name not in FRAMEWORKS:
        raise ConfigError(f"unknown framework {name!r}; known: {', '.join(FRAMEWORKS)}")
    return name
