"""Waits of this rank's threads for other ranks, and their time limits."""

import contextlib
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from grace.errors import ConfigError

TIMEOUT = 600.0
"""Seconds that a rank waits for others by default."""
# Python refuses waits of more than threading.TIMEOUT_MAX, 9.2e9 s.
LONGEST = 1e9

_chosen: float | None = None
"""The ``timeout`` of ``grace.init()``; None if it was not given."""


def set_timeout(timeout: float | None) -> None:
    """Set the user's timeout, in seconds, for all backends that are opened from now on; None for the default.

    Raises:
        ConfigError: the timeout is no positive number.
    """
    global _chosen
    _chosen = None if timeout is None else _checked(timeout, "timeout")


def timeout_for(engines: float | None = None) -> float:
    """Return the seconds that a rank waits for others: the timeout of ``grace.init()``, or else that of GRACE_TIMEOUT,
    or else 600, or the engine's own timeout if that is less.

    Raises:
        ConfigError: GRACE_TIMEOUT is no positive number.

    >>> timeout_for(), timeout_for(30.0), timeout_for(1800.0)
    (600.0, 30.0, 600.0)
    """
    if _chosen is not None:
        return _chosen
    if text := os.environ.get("GRACE_TIMEOUT"):
        return _checked(text, "GRACE_TIMEOUT")
    return TIMEOUT if engines is None else min(TIMEOUT, engines)


def _checked(value: float | str, what: str) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= LONGEST:
        raise ConfigError(f"{what}={str(value)[:40]!r}: give a number of seconds above 0, as in 600")
    return seconds


@dataclass(eq=False)
class Wait:
    """One wait of a thread for other ranks.

    Attributes:
        place: returns a description of the operation, equal on all ranks. It is a function because it is seldom needed.
        timeout: seconds after which the watch calls ``give_up``.
        give_up: ends the wait for a thread that cannot end it itself.
        began: the time (``time.monotonic()``) at which the wait began.
        warned: True if a warning about this wait was printed.
    """

    place: Callable[[], str]
    timeout: float = math.inf
    give_up: Callable[[], object] = lambda: None
    began: float = field(default_factory=time.monotonic)
    warned: bool = False


waits: dict[Hashable, Wait] = {}
"""Current waits by thread, or by another object that waits for one operation at a time."""
_program = threading.main_thread()
"""The thread that trains: the thread that last ran an operation of all ranks."""
_failed: list[tuple[Wait, float]] = []
"""The last wait that failed, and its time; empty once another wait has succeeded."""
FAILED_WAIT_SECONDS = 5.0
"""Time for which a failed wait counts as the position of this rank: other ranks may ask a moment later."""


@contextlib.contextmanager
def waiting(place: Callable[[], str]) -> Iterator[Wait]:
    """Register a wait of this thread for other ranks in this context. Of nested waits the outer one is registered."""
    mine = threading.get_ident()
    outer = waits.get(mine)
    wait = waits[mine] = outer or Wait(place)
    try:
        yield wait
        _failed.clear()
    except BaseException:
        _failed[:] = [(wait, time.monotonic())]
        raise
    finally:
        if outer is None:
            waits.pop(mine, None)


def register_training_thread() -> None:
    """Register the current thread as the thread that trains. It need not be the main thread (it is not in Ray)."""
    global _program
    _program = threading.current_thread()


def current_position() -> tuple[list[str], str]:
    """Return the position of this rank: the operations that its threads wait in, and the current line of the
    program."""
    recently_failed = [wait for wait, when in _failed if time.monotonic() - when < FAILED_WAIT_SECONDS]
    waited = list(waits.values()) or recently_failed
    places = [wait.place() for wait in waited]
    trains = _program.is_alive()
    thread = _program if trains else threading.main_thread()
    frame = sys._current_frames().get(thread.ident or 0)
    inner = ""
    # From the library that runs out to the user's own line.
    while frame is not None and not _is_users(frame):
        if not inner and not _is_graces(frame):
            inner = f", in {frame.f_code.co_name}()"
        frame = frame.f_back
    if frame is None:
        return places, "" if trains else "the end of the thread that trained"
    return places, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{inner if not places else ''}"


def called_function() -> str:
    """Return the name of Grace's function that the program called: the outermost one on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and not _is_users(frame):
        if _is_graces(frame):
            name = frame.f_code.co_name
            # The program gave a trainer a callback, and does not call its methods itself: it knows the class.
            if name.startswith("on_") and "self" in frame.f_locals:
                name = f"{type(frame.f_locals['self']).__name__}.{name}"
        frame = frame.f_back
    return f"{name}()"


# "<" for <string> and <frozen ...>, which are no files.
_NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<")


def _is_users(frame: FrameType) -> bool:
    """Return True if a frame runs the user's program, and not a library."""
    file = frame.f_code.co_filename
    return "site-packages" not in file and not file.startswith(_NOT_THE_USERS)


def _is_graces(frame: FrameType) -> bool:
    """Return True if a frame runs a function of Grace."""
    return frame.f_globals.get("__name__", "").partition(".")[0] == "grace"
