"""The life of a distributed optimizer: what ties it to a session and its hooks, and what unties them again."""

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grace.backends.horovod import Once
from grace.errors import ConfigError
from grace.torch.step_hooks import around_steps

_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""The sessions of optimizers that live, and were not closed."""


def check_free(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Refuse parameters that another distributed optimizer exchanges: both would start with the same gradients.

    Raises:
        ConfigError: the message names the first.
    """
    taken = _taken()
    if not taken.isdisjoint(parameters.values()):
        gc.collect()  # a scheduler makes a cycle of its optimizer
        taken = _taken()
    for name, p in parameters.items():
        if p in taken:
            raise ConfigError(
                f"the parameter {name!r} is exchanged by another distributed optimizer already. Call close() of that "
                "one first, on all ranks, or delete it and what holds it (a scheduler)"
            )


def _taken() -> set[torch.nn.Parameter]:
    return {p for session in _open for p in session.parameters.values()}


def is_open() -> bool:
    """Return True if a distributed optimizer lives."""
    return len(_open) > 0


def only_optimizer(what: str) -> Any:
    """Return the distributed optimizer that lives, if it is one.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if len(_optimizers()) != 1:
        gc.collect()  # a scheduler makes a cycle of its optimizer
    optimizers = _optimizers()
    if len(optimizers) != 1:
        raise ConfigError(
            f"{what}() is a matter of one distributed optimizer, and this program has {len(optimizers) or 'none'}: "
            f"call {what}() of the optimizer that is meant"
        )
    return optimizers[0]


def _optimizers() -> list[Any]:
    return [session.optimizer for session in _open if session.optimizer is not None]


def begin(optimizer: Any, session: Any, before_step: Callable, after_step: Callable, had: set[str]) -> None:
    """The optimizer is of its new class: tie it to its session, which must not keep it alive.

    Args:
        before_step, after_step: the hooks of its steps, as :func:`~grace.torch.step_hooks.around_steps` calls them.
        had: its attributes before.
    """
    session.hooks += around_steps(optimizer, before_step, after_step)
    optimizer._grace_added = set(vars(optimizer)) - had
    _open.add(session)
    session.finalizer = weakref.finalize(optimizer, end, session)
    session.finalizer.atexit = False


def end(session: Any) -> None:
    """The optimizer exchanges no more. No collective: each rank comes here when Python deletes its optimizer."""
    _open.discard(session)
    session.finalizer.detach()
    for hook in session.hooks:
        hook.remove()
    session.hooks.clear()
    session.runner.close()


class Closable(Once):
    """What makes a distributed optimizer plain again."""

    _grace: Any
    _grace_added: set[str]

    def close(self) -> None:
        """End the exchange, and be the plain optimizer again that this was before ``grace.DistributedOptimizer``, with
        its momenta and settings. Every rank must call it: an exchange under way is completed, and dropped.

        The hooks are taken off, compressors and memories given by you may serve another optimizer, and this one may be
        made distributed anew; what memories held is gone unless you saved ``state_dict()`` before. ``del optimizer``
        does the same where nothing else holds the optimizer, without waiting for an exchange under way.
        """
        session: Any = self._grace
        try:
            if session is not None:
                session.drop()
        finally:
            if session is not None:
                end(session)
            for name in [*self._grace_added, "_grace_added"]:
                vars(self).pop(name, None)
            self.__class__ = type(self).__bases__[-1]  # type: ignore[assignment]
