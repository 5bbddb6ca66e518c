"""What components may know about the run that they are in."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.api_names import TORCH, Calls
from grace.kernels.random import Stream, stream_key


def _one(name: str) -> float:
    """The learning rate where there is no optimizer."""
    return 1.0


@dataclasses.dataclass
class Context:
    """What a component may know about the run it is in; shared by all components of one optimizer.

    Attributes:
        seed: seed of every random number, the same on all ranks.
        step: number of exchanges so far.
        rank, size: this process and how many there are.
        loss_scale: the factor that gradients are scaled by in mixed precision.
        lr: the learning rate that the optimizer will use for a variable.
        predivide: what payloads are divided by before an engine sums them; see ``ReduceOp``.
        updates: number of the optimizer's steps, as far as it is known.
        left_out: how often gradients were cleared again, and nothing was done with the optimizer since the last time.
        settings: a digest of the hyperparameters that the last step was made with.
        out_of_step: why ranks that this one speaks for cannot go on; empty if they can.
        names: what the ranks are called, where only some of all take part.
        calls: what messages call things, in the user's framework.
        step_there: the step in a tensor on a device, where a CUDA graph reads it; else None.
    """

    seed: int = 0
    step: int = 0
    rank: int = 0
    size: int = 1
    loss_scale: float = 1.0
    lr: Callable[[str], float] = _one
    predivide: float = 1.0
    updates: int = 0
    left_out: int = 0
    settings: int = 0
    out_of_step: str = ""
    names: Sequence[int] = ()
    calls: Calls = TORCH
    step_there: Any = None

    def stream(self, name: str, *, shared: bool = False) -> Stream:
        """Random numbers for one variable at this step, the same on all ranks if ``shared``."""
        who = "shared" if shared else str(self.rank)
        return Stream(stream_key(self.seed, name, who), self.step if self.step_there is None else self.step_there)


class Among:
    """A context for components that only some of all ranks take part in: who this rank is among them is its own, and
    all else is the whole run's, whichever of the two it is changed by.

    >>> whole = Context(rank=3, size=4)
    >>> some = Among(whole, rank=1, size=2, names=[0, 3])
    >>> some.loss_scale = 8.0
    >>> some.rank, some.size, whole.rank, whole.loss_scale
    (1, 2, 3, 8.0)
    """

    stream = Context.stream

    def __init__(self, whole: Context, rank: int, size: int, names: Sequence[int]):
        vars(self).update(_whole=whole, rank=rank, size=size, names=names)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_whole"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_whole"], name, value)
