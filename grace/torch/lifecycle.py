"""Lifecycle of a distributed optimizer: it is attached to a session and its hooks, and detached from them."""

import gc
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.backends.horovod import NoHorovodSubclass
from grace.errors import ConfigError, ExchangeError
from grace.torch.step_hooks import around_steps

_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sessions of optimizers that exist and were not closed."""


def check_not_distributed(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that another distributed optimizer exchanges: both would start with the same gradients.

    Raises:
        ConfigError: a parameter is exchanged already; the message names the first.
    """
    taken = _exchanged_parameters()
    if not taken.isdisjoint(parameters.values()):
        gc.collect()  # a learning-rate scheduler and its optimizer form a reference cycle
        taken = _exchanged_parameters()
    for name, p in parameters.items():
        if p in taken:
            # An interactive session keeps the last error, whose frames hold the optimizer that trained.
            error = "; this session's last error, too: then make the model anew" if hasattr(sys, "last_value") else ""
            raise ConfigError(
                f"the parameter {name!r} is exchanged by another distributed optimizer already. Call close() of that "
                f"one first, on all ranks, or delete it and what holds it (a scheduler{error})"
            )


def _exchanged_parameters() -> set[torch.nn.Parameter]:
    """Return the parameters of all open sessions."""
    return {p for session in _open for p in session.parameters.values()}


def averaged_buffers() -> list[tuple[weakref.ref[torch.nn.Module], str]]:
    """Return the modules and names of the buffers that open sessions average after outer rounds."""
    models = [session.local_model for session in _open if session.outer_rounds is not None]
    return [place for model in models for place in model.buffer_places.values()]


def is_open() -> bool:
    """Return True if a distributed optimizer exists that was not closed."""
    return len(_open) > 0


def only_optimizer(what: str) -> Any:
    """Return the only distributed optimizer of this program.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if len(_optimizers()) != 1:
        gc.collect()  # a learning-rate scheduler and its optimizer form a reference cycle
    optimizers = _optimizers()
    if len(optimizers) != 1:
        raise ConfigError(
            f"{what}() is a matter of one distributed optimizer, and this program has {len(optimizers) or 'none'}: "
            f"call {what}() of the optimizer that is meant"
        )
    return optimizers[0]


def _optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of all open sessions."""
    return [session.optimizer for session in _open if session.optimizer is not None]


def attach(
    optimizer: Any, session: Any, step_pre_hook: Callable, step_post_hook: Callable, attributes_before: set[str]
) -> None:
    """Attach an optimizer, whose class was changed already, to its session. The session must not keep it alive.

    Args:
        step_pre_hook, step_post_hook: the hooks of its steps, which :func:`~grace.torch.step_hooks.around_steps` calls.
        attributes_before: names of the attributes that the optimizer had before it was made distributed.
    """
    session.hooks += around_steps(optimizer, step_pre_hook, step_post_hook)
    optimizer._grace_added = set(vars(optimizer)) - attributes_before
    _open.add(session)
    session.finalizer = weakref.finalize(optimizer, detach, session)
    session.finalizer.atexit = False  # engines may be shut down by then


def detach(session: Any) -> None:
    """Detach a session from its optimizer, and close its runner. It has no collective, because each rank comes here
    when Python deletes its optimizer."""
    _open.discard(session)
    session.finalizer.detach()
    for hook in session.hooks:
        hook.remove()
    session.hooks.clear()
    session.runner.close()


class Closable(NoHorovodSubclass):
    """Base class that gives a distributed optimizer ``close()``, which makes it plain again."""

    _grace: Any
    _grace_added: set[str]

    def close(self) -> None:
        """End the exchange, and restore the plain optimizer, which keeps its momenta and settings. Every rank must call
        it: an exchange in progress is completed, and its result is dropped.

        The hooks are taken off, compressors and memories given by you may serve another optimizer, and this one may be
        made distributed anew. The contents of memories are lost unless you saved ``state_dict()`` before. ``del
        optimizer`` does the same if nothing else refers to the optimizer, without waiting for an exchange in progress.

        Raises:
            ExchangeError: parameters are the anchors now.
        """
        session: Any = self._grace
        if session is not None and session.runner.outer_rounds.anchored:
            raise ExchangeError(
                "close() under `with optimizer.anchor():` would lose this rank's own parameters: close outside of it"
            )
        try:
            if session is not None:
                session.discard()
        finally:
            if session is not None:
                detach(session)
            for name in [*self._grace_added, "_grace_added"]:
                vars(self).pop(name, None)
            self.__class__ = type(self).__bases__[0]  # type: ignore[assignment]  # the user's, see with_mixins()
