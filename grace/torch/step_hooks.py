"""Hooks around the steps of an optimizer. torch calls its hooks at each level of ``step()``, or at none."""

import functools
import sys
import weakref
from collections.abc import Callable, Collection
from types import FrameType, MethodType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from grace.core.weak_calls import WeakCall

DCP = "torch.distributed.checkpoint.state_dict"
"""Module of torch that creates an optimizer's state by a step."""
HOOKED = torch.optim.Optimizer.profile_hook_step(print).__code__
"""Code of the wrapper that torch puts around a ``step()`` to call its hooks."""


def around_steps(
    optimizer: torch.optim.Optimizer, before: Callable | None, after: Callable | None
) -> list[RemovableHandle]:
    """Register hooks around each step of an optimizer, or of an optimizer inside it.

    An optimizer around another one (Lookahead, SAM) may step by the other's ``step()`` alone, and may not call
    ``Optimizer.__init__``, which installs the hooks of ``step()``. Steps that only make the optimizer's state
    (:func:`initializing`) are left out, unless there is state afterwards: Adam counts such a step, so that a rank that
    makes it alone is out of step.

    Args:
        optimizer: the optimizer; the hooks do not keep it alive.
        before, after: functions that are called with the optimizer, the arguments of ``step()``, and True at an inner
            level of ``step()``, such as ``super().step()``.

    Returns:
        handles that remove the hooks.
    """
    family = _nested_optimizers(optimizer)
    ids = {id(member) for member in family}
    outer = weakref.ref(optimizer)
    handles = []

    def hook(call: Callable) -> Callable:
        """Return a torch hook that calls one of Grace's, with True at an inner level of ``step()``."""

        def call_unless_initializing(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
            """Call Grace's hook, but not before a step that only makes the optimizer's state."""
            if initializing() and not getattr(outer(), "state", None):
                return None
            return call(outer(), args, kwargs, within_step(ids))

        # A compiled step() is compiled without the hooks, which run before and after it.
        return torch.compiler.disable(call_unless_initializing)

    registries: list[object] = []
    for member in family:
        _install_step_hooks(member)
        # A wrapper may have no hooks of its own, but those of the optimizer inside it, as Lightning Fabric's has.
        registry = member._optimizer_step_post_hooks
        if any(registry is other for other in registries):
            continue
        registries.append(registry)
        if before is not None:
            handles.append(member.register_step_pre_hook(hook(before)))
        if after is not None:
            handles.append(member.register_step_post_hook(hook(after)))
    return handles


class ScalerHook:
    """Call after each ``update()`` of a gradient scaler, which every rank makes, also one whose step was skipped.

    Args:
        scaler: the ``torch.amp.GradScaler``.
        call: the method to call; it does not keep its object alive.
    """

    def __init__(self, scaler: Any, call: Callable[[], object]):
        self.scaler = scaler
        weak_call = WeakCall(call)
        inner = scaler.update

        @functools.wraps(inner)
        def update(*args: object, **kwargs: object) -> None:
            inner(*args, **kwargs)
            weak_call()

        scaler.update = self.update = update

    def remove(self) -> None:
        """Take the call off, unless another one was put around it since."""
        if vars(self.scaler).get("update") is self.update:
            del self.scaler.update


def within_step(ids: Collection[int]) -> bool:
    """Return True if the calling hook runs at an inner level of ``step()``.

    torch puts the hooks around the ``step()`` of each class that was ever made in the process, so that a ``step()``
    which calls ``super().step()`` has them called twice or once. The levels are counted on the stack, since torch calls
    no hook after a ``step()`` that raised.

    Args:
        ids: ids of the optimizers whose levels count.
    """
    levels = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and levels < 2:
        if frame.f_code is HOOKED and id(frame.f_locals.get("self")) in ids:
            levels += 1
        frame = frame.f_back
    return levels == 2


def is_stepping(thread: int) -> bool:
    """Return True if a thread runs the ``step()`` of an optimizer, or a closure that it evaluates.

    Args:
        thread: the thread's ``ident``.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not HOOKED:
        frame = frame.f_back
    return frame is not None


def initializing() -> bool:
    """Return True if ``step()`` was called only to make the optimizer's state, with zeros for gradients, as
    ``torch.distributed.checkpoint`` does before it reads or fills a state dict."""
    module = sys.modules.get(DCP)
    makes = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = None if makes is None else sys._getframe(1)
    for _ in range(8):  # torch's function is a few frames above the hook
        if frame is None or frame.f_code is makes:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is makes


def _nested_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and the optimizers inside it: attributes that hold some of its parameters."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    family = [optimizer]
    for member in family:  # the list grows in the loop
        values = list(vars(member).values())
        for value in values.copy():
            if isinstance(value, (list, tuple, dict)):
                values += value.values() if isinstance(value, dict) else value
        for value in values:
            if not isinstance(value, torch.optim.Optimizer) or any(value is other for other in family):
                continue
            if any(p in own for group in value.param_groups for p in group["params"]):
                family.append(value)
    return family


def _install_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Install torch's hooks around an optimizer's ``step()`` where torch did not. torch installs them in
    ``Optimizer.__init__``, and a program may have replaced the ``step`` of the object since."""
    kind = type(optimizer)
    own = vars(optimizer).get("step")
    if not _is_hooked(kind.step):
        kind.step = optimizer.profile_hook_step(kind.step)  # type: ignore[assignment, method-assign]
    if own is not None and not _is_hooked(own):

        @functools.wraps(own)
        def step(self: object, *args: object, **kwargs: object) -> object:
            """Call the program's own ``step``, which torch's hooks then surround."""
            return own(*args, **kwargs)

        vars(optimizer)["step"] = MethodType(optimizer.profile_hook_step(step), optimizer)


def _is_hooked(step: object) -> bool:
    """Return True if torch's hooks are around a function, or around one that it wraps."""
    while step is not None:
        step = getattr(step, "__func__", step)
        if getattr(step, "__code__", None) is HOOKED:
            return True
        step = getattr(step, "__wrapped__", None)
    return False
