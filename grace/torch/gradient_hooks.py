"""The post-accumulate-grad hook of every parameter: it marks the gradient as ready in the session.

Compiled autograd traces the hooks of parameters too, and it cannot trace the work of this hook. The hook is therefore a
custom operation: a compiled graph calls it where the gradient is ready, the operation breaks no graph, and exchanges
overlap the rest of the graph as they do without one. The operation is declared to mutate the gradient, as an exchange
does, so that no graph leaves it out. Limitation: a program that changes gradients between such a backward pass and
``synchronize()`` gets no error, because the end of the graph writes ``p.grad`` too.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

not_compiled = torch._disable_dynamo
"""Decorator of methods that a compiled function may call: Dynamo must not trace exchanges, whose kernels write to the
addresses of tensors. It is ``torch.compiler.disable``, which imports Dynamo, seconds, only at the first call."""

_sessions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_session(session: Any) -> int:
    """Return a number by which compiled graphs refer to a session, since graphs must not keep it alive."""
    number = next(_numbers)
    _sessions[number] = session
    return number


def gradient_hook(number: int, name: str) -> Callable[[torch.nn.Parameter], None]:
    """Return the hook of a parameter that marks its gradient as ready in a session, as long as the session lives."""
    session = weakref.ref(_sessions[number])  # a parameter's hook is never collected, nor is anything that it refers to

    def offer_gradient(parameter: torch.nn.Parameter) -> None:
        """Mark the parameter's gradient as ready if the session is still alive, in a form that fits the mode torch runs
        in: eager, compiling, or compiled autograd."""
        if not torch.compiler.is_dynamo_compiling():
            alive = session()
            if alive is not None:
                alive.mark_ready(name, parameter.grad)
        elif not torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            untraced(parameter)  # backward() is called inside a compiled function, but is not compiled itself
        elif parameter.grad is not None:
            mark_ready(parameter.grad, number, name)

    untraced = torch.compiler.disable(offer_gradient)
    return offer_gradient


@torch.library.custom_op("grace::mark_ready", mutates_args=("gradient",))
def mark_ready(gradient: torch.Tensor, session: int, name: str) -> None:
    """Mark a parameter's gradient as ready in a session. This is the operation that compiled graphs contain."""
    alive = _sessions.get(session)
    if alive is not None:  # the session may have been deleted since the graph was compiled
        alive.mark_ready_in_graph(name, gradient)


@mark_ready.register_fake
def _mark_ready_fake(gradient: torch.Tensor, session: int, name: str) -> None:
    """Do nothing: under FakeTensor, tensors have no values."""
