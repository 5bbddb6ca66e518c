"""Functions that run when this process ends, also in processes that multiprocessing has forked."""

import atexit
import sys
from collections.abc import Callable
from typing import Any

_finalizers: dict[Callable[[], object], Any] = {}
"""Finalizers of multiprocessing, by their functions."""


def call_at_exit(function: Callable[[], object]) -> None:
    """Call a function once when this process ends; the function registered last is called first.

    A process that multiprocessing has forked, such as a rank of a notebook, runs no function of :mod:`atexit` before
    Python 3.14, but multiprocessing's own finalizers. Others may run both, so a second call must do nothing.
    """
    atexit.register(function)
    call_as_child_ends(function)


def call_as_child_ends(function: Callable[[], object], priority: int = 0) -> None:
    """Call a function once when this process ends, if multiprocessing has started it. An error that ends it is the one
    that is being handled then.

    Args:
        priority: functions of a higher priority are called first.
    """
    _cancel_finalizer(function)
    # Not imported: it is there in every process that it has started.
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        from multiprocessing.util import Finalize

        _finalizers[function] = Finalize(None, function, exitpriority=priority)


def cancel_at_exit(function: Callable[[], object]) -> None:
    """Do not call a function when this process ends."""
    atexit.unregister(function)
    _cancel_finalizer(function)


def _cancel_finalizer(function: Callable[[], object]) -> None:
    finalizer = _finalizers.pop(function, None)
    if finalizer is not None:
        finalizer.cancel()
