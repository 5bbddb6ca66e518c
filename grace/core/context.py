"""The context of a run, which components read."""

import dataclasses
from collections.abc import Callable
from typing import Any

from grace.core.api_names import TORCH, ApiNames
from grace.kernels.random import Stream, stream_key
from grace.kernels.reference import Tensor


def _one(name: str) -> float:
    """Return 1, the learning rate of a variable without an optimizer."""
    return 1.0


STAMPED = ("step", "updates", "cleared", "hyperparameter_digest")
"""Attributes that all ranks compare in every step (:mod:`grace.exchange.header`)."""


@dataclasses.dataclass
class Context:
    """Facts of a run; one object is shared by all components of one optimizer.

    Attributes:
        seed: seed of every random number, the same on all ranks.
        step: number of exchanges so far.
        rank, size: the number of this process, and of all processes.
        loss_scale: the factor that gradients are scaled by in mixed precision.
        lr: the learning rate that the optimizer will use for a variable.
        predivide: divisor of payloads before an engine sums them; see ``ReduceOp``.
        updates: number of the optimizer's steps, as far as it is known.
        cleared: number of times that gradients were cleared again without any use of the optimizer in between.
        hyperparameter_digest: a digest of the hyperparameters of the last step.
        out_of_step: the reason why ranks that this leader represents cannot go on; empty if they can.
        partial: True if only some of all ranks take part.
        api_names: names of the user's framework for API calls, for messages.
        device_step: the step in a tensor on a device, where a CUDA graph reads it; else None.
    """

    seed: int = 0
    step: int = 0
    rank: int = 0
    size: int = 1
    loss_scale: float = 1.0
    lr: Callable[[str], float] = _one
    predivide: float = 1.0
    updates: int = 0
    cleared: int = 0
    hyperparameter_digest: int = 0
    out_of_step: str = ""
    partial: bool = False
    api_names: ApiNames = TORCH
    device_step: Tensor | None = None

    def copy_stamped(self, other: "AnyContext") -> None:
        """Take over another context's counters that ranks compare."""
        for name in STAMPED:
            setattr(self, name, getattr(other, name))

    def stream(self, name: str, *, shared: bool = False) -> Stream:
        """Return random numbers for one variable at this step, the same on all ranks if ``shared``."""
        # A captured graph draws other numbers at each replay only if it reads the step from memory.
        who = "shared" if shared else str(self.rank)
        return Stream(stream_key(self.seed, name, who), self.step if self.device_step is None else self.device_step)


class SubgroupContext:
    """Context of components that only some of all ranks take part in. It has its own rank and size; all other
    attributes are read from, and written to, the context of the whole run.

    >>> whole = Context(rank=3, size=4)
    >>> some = SubgroupContext(whole, rank=1, size=2)
    >>> some.loss_scale = 8.0
    >>> some.rank, some.size, whole.rank, whole.loss_scale
    (1, 2, 3, 8.0)
    """

    stream, copy_stamped = Context.stream, Context.copy_stamped

    def __init__(self, whole: Context, rank: int, size: int):
        # Not by assignment, which would write to the whole run's context.
        vars(self).update(_whole=whole, rank=rank, size=size, partial=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_whole"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["_whole"], name, value)


AnyContext = Context | SubgroupContext
