"""Contract of a task that ``grace bench train`` trains."""

import abc
import math
from typing import Any, ClassVar

from grace.core import specs
from grace.core.registry import known

OPTIMIZERS = ("sgd", "adamw")


def in_optimizer(method: str) -> dict[str, str]:
    """Return the argument of ``DistributedOptimizer`` for a method: a spec of a compressor or a strategy's builder.

    >>> in_optimizer("topk(ratio=0.05)"), in_optimizer("auto(quality='half')")
    ({'compressor': 'topk(ratio=0.05)'}, {'strategy': "auto(quality='half')"})
    """
    built = not specs.split(method) and specs.parse(method)[0] in known("builder")
    return {"strategy" if built else "compressor": method}


class Task(abc.ABC):
    """Model, its data, and how good it has become.

    The data's order and the initial weights depend on the seed alone, so that methods differ in nothing else.
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
