"""Monkey patches of functions that Horovod's scripts call: broadcasts of parameters and of an optimizer's state, joins,
and names for operations that have none."""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import functions, mpi_ops
from horovod.torch.elastic import state as elastic_state

from grace.backends.horovod_torch import TorchHorovodBackend
from grace.torch import initial_sync, lifecycle


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Broadcast as ``hvd.broadcast_parameters`` does, tensors of any dtype and layout. Values without names, and values
    that are no tensors, are allowed too.

    Args:
        params: a dict, a list of tensors or of pairs, as for Horovod; or a module.
        root_rank: the rank whose values count.
    """
    initial_sync.broadcast_parameters(params, root_rank, TorchHorovodBackend.named("hvd.broadcast_parameters"))


def join(device: int = -1) -> int:
    """Run the distributed optimizer's ``join()`` if there is one, else ``hvd.join``. Horovod's own would leave ranks
    with weights of their own, and hang or end the ranks if an exchange is not a sum.

    Args:
        device: the argument of ``hvd.join``.
    """
    if not lifecycle.is_open():
        return mpi_ops.join(device)
    last: int = lifecycle.only_optimizer("hvd.join").join()
    return last


class AlreadyInitialized:
    """Base class between Horovod's methods and the user's optimizer, which is initialized already."""

    def __init__(self, params: object):
        """Do nothing. Horovod's ``__init__`` calls it to make a new optimizer."""


class BroadcastableState:
    """Mixin of optimizers whose state ``hvd.broadcast_optimizer_state`` may read.

    Without a state, Horovod would make a step with zeros for gradients, which changes weights that decay and begins an
    exchange that ranks with a state do not.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state. If the caller is ``hvd.broadcast_optimizer_state``, broadcast the root's state to all ranks
        here, and return an empty state, so that nothing is left to do for Horovod. As after Horovod's step, gradients
        of a rank that had no state become zeros."""
        caller = sys._getframe(1)
        if caller.f_code is not functions.broadcast_optimizer_state.__code__:
            return super().state_dict()  # type: ignore[misc]
        optimizer = caller.f_locals["optimizer"]
        backend = TorchHorovodBackend.named("hvd.broadcast_optimizer_state")
        fresh = not optimizer.state
        initial_sync.broadcast_optimizer_state(optimizer, caller.f_locals["root_rank"], backend)
        session = optimizer._grace
        if session is not None and session.context.size == backend.size:  # a process set has other rank numbers
            runner = session.runner
            runner.broadcast_state(caller.f_locals["root_rank"])
            if runner.outer_rounds and runner.outer_rounds.at != runner.context.step:
                # This rank was elsewhere in the period: as in elastic runs, it starts from the root's anchors.
                runner.outer_rounds.restore()
        for p in (p for group in optimizer.param_groups for p in group["params"] if fresh and p.requires_grad):
            p.grad = torch.zeros_like(p)
        return {"state": {None: {}}, "param_groups": []}


unnamed_counts: Counter[tuple[str, int]] = Counter()
"""Number of unnamed operations started so far, by kind and process set."""


def number_unnamed(start: Callable[..., int]) -> Callable[..., int]:
    """Wrap Horovod's function that starts a kind of operation, so that operations without a name get one.

    Horovod would name them by the number of all operations that this rank has started. That number changes at any time:
    by exchanges besides training, or because a rank leaves out a layer. Here the name has the number of unnamed
    operations of this kind.
    """
    signature = inspect.signature(start)

    @functools.wraps(start)
    def numbering(*args: object, **kwargs: object) -> int:
        """Name the operation if it has no name, and start it."""
        bound = signature.bind(*args, **kwargs)
        if bound.arguments["name"] is None:
            key = start.__name__.strip("_"), bound.arguments["process_set"].process_set_id
            unnamed_counts[key] += 1
            bound.arguments["name"] = f"{key[0]}.unnamed.{unnamed_counts[key]}"
        return start(*bound.args, **bound.kwargs)

    return numbering


hvd.join = join
for module in (hvd, functions, elastic_state):
    module.broadcast_parameters = broadcast_parameters
for kind in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
    for name in (f"_{kind}_async", f"_grouped_{kind}_async"):
        if hasattr(mpi_ops, name):
            setattr(mpi_ops, name, number_unnamed(getattr(mpi_ops, name)))
