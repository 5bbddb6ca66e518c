"""What scripts call of Horovod's and Grace does: broadcasts of parameters and of an optimizer's state, joins, and names
for operations that have none."""

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

from grace.backends.horovod_torch import HorovodBackend
from grace.torch import lifecycle, parameters


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """``hvd.broadcast_parameters``, of any dtype and layout, and of what has no names or is no tensor as well.

    Args:
        params: as Horovod's: a dict, or a list of tensors or of pairs; or a module.
        root_rank: the rank whose values count.
    """
    parameters.broadcast_parameters(params, root_rank, HorovodBackend.named("hvd.broadcast_parameters"))


def join(device: int = -1) -> int:
    """``hvd.join``: that of the distributed optimizer, where there is one. Horovod's own would leave ranks with weights
    of their own, and hang or end the ranks where something is not summed.

    Args:
        device: for Horovod's own.
    """
    if not lifecycle.is_open():
        return mpi_ops.join(device)
    last: int = lifecycle.only_optimizer("hvd.join").join()
    return last


class Initialized:
    """Stands between Horovod's methods and the user's optimizer, which is initialized already."""

    def __init__(self, params: Any):
        """Horovod's ``__init__`` comes here where a new optimizer would be made."""


class Asked:
    """An optimizer whose state ``hvd.broadcast_optimizer_state`` may ask for.

    Horovod would make a step with zeros for gradients where there is no state yet, which changes weights that decay and
    begins an exchange that ranks with a state do not.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state; where Horovod asks for it in order to broadcast it, all ranks get the root's, and Horovod is
        told of a state with nothing in it that is left to do. As after Horovod's step, gradients of a rank that had no
        state are zeros."""
        caller = sys._getframe(1)
        if caller.f_code is not functions.broadcast_optimizer_state.__code__:
            return super().state_dict()  # type: ignore[misc]
        optimizer, backend = caller.f_locals["optimizer"], HorovodBackend.named("hvd.broadcast_optimizer_state")
        fresh = not optimizer.state
        parameters.broadcast_optimizer_state(optimizer, caller.f_locals["root_rank"], backend)
        session = optimizer._grace
        if session is not None and session.context.size == backend.size:  # a process set numbers ranks otherwise
            session.runner.broadcast_state(caller.f_locals["root_rank"])
        for p in (p for group in optimizer.param_groups for p in group["params"] if fresh and p.requires_grad):
            p.grad = torch.zeros_like(p)
        return {"state": {None: {}}, "param_groups": []}


unnamed: Counter[tuple[str, int]] = Counter()
"""How many operations without a name were started, of each kind in each process set."""


def numbered(start: Callable[..., int]) -> Callable[..., int]:
    """Horovod's function that starts a kind of operation. It would name one without a name by the number of all that
    this rank has started; exchanges beside training, or those of a layer that a rank leaves out, change that at any
    moment, so here it is the number of such calls."""
    signature = inspect.signature(start)

    @functools.wraps(start)
    def numbering(*args: Any, **kwargs: Any) -> int:
        given = signature.bind(*args, **kwargs)
        if given.arguments["name"] is None:
            key = start.__name__.strip("_"), given.arguments["process_set"].process_set_id
            unnamed[key] += 1
            given.arguments["name"] = f"{key[0]}.unnamed.{unnamed[key]}"
        return start(*given.args, **given.kwargs)

    return numbering


hvd.join = join
for module in (hvd, functions, elastic_state):
    module.broadcast_parameters = broadcast_parameters
for kind in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
    for name in (f"_{kind}_async", f"_grouped_{kind}_async"):
        if hasattr(mpi_ops, name):
            setattr(mpi_ops, name, numbered(getattr(mpi_ops, name)))
