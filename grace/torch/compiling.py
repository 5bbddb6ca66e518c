"""What torch.compile sees of an exchange in backward: an operation of Grace's for each gradient, which breaks no graph.

Compiled autograd traces the hooks of parameters too. What a hook does at each step it cannot trace: so that is an
operation, which a graph calls where the gradient is there, and exchanges overlap the rest of the graph as they do
without one. The operation is said to change the gradient, as an exchange does, so that no graph leaves it out. Who
changes gradients after such a backward and before ``synchronize()`` is not told so: the graph's end changes them too.
"""

import itertools
import weakref
from typing import Any

import torch

_sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enlist(session: Any) -> int:
    """A number by which graphs know a session, which they must not keep alive."""
    number = next(_numbers)
    _sessions[number] = session
    return number


@torch.library.custom_op("grace::offer", mutates_args=("gradient",))
def offer(gradient: torch.Tensor, session: int, name: str) -> None:
    """A parameter's gradient is there."""
    alive = _sessions.get(session)
    if alive is not None and alive.hooks:
        alive.offer_in_graph(name, gradient)


@offer.register_fake
def _nothing(gradient: torch.Tensor, session: int, name: str) -> None:
    """Of tensors without numbers."""
