"""Closures that are passed to ``step()``: every rank's optimizer gets the same loss, so that all take the same path."""

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

import torch

from grace.exchange.tracing import recorder
from grace.torch.session import Session

T = TypeVar("T")
"""Type of a loss."""


def synchronize_closure(closure: Callable[[], T], session: Any, inner: bool = False) -> Callable[[], T]:
    """Return a closure that evaluates the user's one, then replaces ``p.grad`` and the loss by those of all ranks.

    Args:
        closure: the closure that was passed to ``step()``.
        session: the optimizer's session.
        inner: True at an inner level of ``step()``, where the closure may be one that synchronizes already.
    """

    def evaluate() -> T:
        """Evaluate the closure, synchronize, and return the loss of all ranks."""
        loss = closure()
        if inner and not session.computed:  # an outer closure has synchronized this evaluation already
            return loss
        session.synchronize_once()
        loss = all_reduce_loss(loss, session)
        if recorder.run is not None:
            recorder.run.update_begins()
        return loss

    return evaluate


@torch.no_grad()
def all_reduce_loss(loss: Any, session: Session) -> Any:
    """Return the mean of the ranks' losses (their sum, where gradients are summed), the same bits on every rank.

    A line search compares losses: with a loss of its own each rank would take its own path. The type of the loss is
    kept. A loss that is not a single number, such as None, is returned unchanged and is left out of the mean. Without
    gradients that are exchanged in every step the loss stays this rank's.
    """
    channel = session.runner.channel
    if channel.size == 1 or not session.runner.buckets:  # ranks that train alone take paths of their own
        return loss
    is_tensor = isinstance(loss, torch.Tensor)
    counts = loss.numel() == 1 if is_tensor else isinstance(loss, Real)
    device = next((p.device for p in session.parameters.values()), None)
    local = torch.zeros(2, dtype=torch.float64, device=device)
    if counts:
        local[0] = 1
        local[1] = loss.reshape(()) if is_tensor else float(loss)
    with channel.waiting_for_ranks(lambda: "the mean of the ranks' losses"):
        # All ranks take part, also those whose loss does not count. Rank order makes the sum the same everywhere.
        number, total = sum(channel.allgather(local).wait())
    if not counts:
        return loss
    reduced = total if session.settings.reduction.op == "sum" else total / number
    return reduced.to(loss).reshape(loss.shape) if is_tensor else float(reduced)
