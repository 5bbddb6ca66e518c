"""Closures that are given to ``step()``: every rank's optimizer sees the same loss, and takes the same path."""

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from grace.exchange.tracing import recorder
from grace.torch.session import Session


def synchronized(closure: Callable[[], Any], session: Any, inner: bool = False) -> Callable[[], Any]:
    """The closure, after which ``p.grad`` and the loss are those of all ranks, at every evaluation.

    Args:
        closure: as it was given to ``step()``.
        session: of the optimizer.
        inner: True at an inner level of ``step()``, where the closure may be one that synchronizes already.
    """

    def evaluate() -> Any:
        loss = closure()
        if inner and not session.computed:
            return loss
        session.before_step()
        loss = loss_of_all(loss, session)
        if recorder.run is not None:
            recorder.run.update_begins()
        return loss

    return evaluate


@torch.no_grad()
def loss_of_all(loss: Any, session: Session) -> Any:
    """The mean of the ranks' losses (their sum, where gradients are summed), the same bits on every rank.

    A line search compares losses: with its own one each rank would go its own way. The type stays what it was. What
    is no single number, as None, does not count, and is returned as it is.
    """
    channel = session.runner.channel
    if channel.size == 1:
        return loss
    tensor = isinstance(loss, torch.Tensor)
    counts = loss.numel() == 1 if tensor else isinstance(loss, Real)
    device = next((p.device for p in session.parameters.values()), None)
    mine = torch.zeros(2, dtype=torch.float64, device=device)
    if counts:
        mine[0], mine[1] = 1, loss.reshape(()) if tensor else float(loss)
    with channel.waiting_for_ranks(lambda: "the mean of the ranks' losses"):
        number, total = sum(channel.allgather(mine).wait())  # in the order of ranks
    if not counts:
        return loss
    whole = total if session.settings.reduction.op == "sum" else total / number
    return whole.to(loss).reshape(loss.shape) if tensor else float(whole)
