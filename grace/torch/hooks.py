"""The hook of every gradient: it offers a gradient to its session when the backward pass has made it.

Compiled autograd traces the hooks of parameters too. What a hook does at each step it cannot trace: so that is an
operation of Grace's, which a graph calls where the gradient is there and which breaks no graph, and exchanges overlap
the rest of the graph as they do without one. The operation is said to change the gradient, as an exchange does, so
that no graph leaves it out. A program that changes gradients after such a backward and before ``synchronize()`` is
not told so: the graph's end changes them too.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enlist(session: Any) -> int:
    """Return a number by which graphs know a session, which they must not keep alive."""
    number = next(_numbers)
    _sessions[number] = session
    return number


def gradient_hook(number: int, name: str) -> Callable[[torch.nn.Parameter], None]:
    """Return the hook of a parameter that offers its gradient to a session as long as there is one."""
    session = weakref.ref(_sessions[number])  # Python does not collect what a parameter's hook holds

    def take(parameter: torch.nn.Parameter) -> None:
        if (alive := session()) is not None:
            alive.offer(name, parameter.grad)

    unseen = torch.compiler.disable(take)

    def traceable(parameter: torch.nn.Parameter) -> None:
        if not torch.compiler.is_dynamo_compiling():
            take(parameter)
        elif not torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            unseen(parameter)  # called within a compiled function, whose backward is not
        elif parameter.grad is not None:
            offer(parameter.grad, number, name)

    return traceable


@torch.library.custom_op("grace::offer", mutates_args=("gradient",))
def offer(gradient: torch.Tensor, session: int, name: str) -> None:
    """Offer a parameter's gradient to a session, from a graph."""
    alive = _sessions.get(session)
    if alive is not None:
        alive.offer_in_graph(name, gradient)


@offer.register_fake
def _nothing(gradient: torch.Tensor, session: int, name: str) -> None:
    """Do nothing to tensors without numbers."""
