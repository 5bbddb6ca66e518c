"""What scripts call of Horovod's and Grace does: broadcasts of parameters, and of a distributed optimizer's state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import functions
from horovod.torch.elastic import state as elastic_state

from grace.torch import parameters
from grace.torch.backends.horovod import HorovodBackend


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """``hvd.broadcast_parameters``, of any dtype and layout, and of what has no names or is no tensor as well.

    Args:
        params: as Horovod's: a dict, or a list of tensors or of pairs; or a module.
        root_rank: the rank whose values count.
    """
    if not isinstance(params, (torch.nn.Module, Mapping)):
        params = [(str(i), p) if isinstance(p, torch.Tensor) else p for i, p in enumerate(params)]
    parameters.broadcast_parameters(params, root_rank, HorovodBackend.named("hvd.broadcast_parameters"))


class Asked:
    """An optimizer whose state ``hvd.broadcast_optimizer_state`` may ask for.

    Horovod would make a step with zeros for gradients where there is no state yet, which changes weights that decay and
    begins an exchange that ranks with a state do not.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state; where Horovod asks for it in order to broadcast it, all ranks get the root's, and Horovod is
        told of a state with nothing in it that is left to do."""
        caller = sys._getframe(1)
        if caller.f_code is not functions.broadcast_optimizer_state.__code__:
            return super().state_dict()  # type: ignore[misc]
        optimizer, backend = caller.f_locals["optimizer"], HorovodBackend.named("hvd.broadcast_optimizer_state")
        parameters.broadcast_optimizer_state(optimizer, caller.f_locals["root_rank"], backend)
        return {"state": {None: {}}, "param_groups": []}


for module in (hvd, functions, elastic_state):
    module.broadcast_parameters = broadcast_parameters
