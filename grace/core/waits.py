"""Where the threads of this rank wait for other ranks, and for how long they may."""

import contextlib
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace.errors import ConfigError

TIMEOUT = 600.0
"""Seconds that a rank waits for others, if nobody says anything else."""
LONGEST = 1e9

_chosen: float | None = None
"""What ``grace.init()`` was told."""


def choose(timeout: float | None) -> None:
    """What the user says of how long a rank waits, for everything that is opened from now on.

    Raises:
        ConfigError: it is no positive number.
    """
    global _chosen
    _chosen = None if timeout is None else _checked(timeout, "timeout")


def timeout_for(engines: float | None = None) -> float:
    """Return the seconds that a rank waits: what ``grace.init()`` was told, or GRACE_TIMEOUT says; or else 600, or
    what the engine was started with if that is less.

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


def _checked(value: Any, what: str) -> float:
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
        place: what it waits in, the same words on all ranks; a function that makes them, for they are seldom needed.
        timeout: seconds after which to call ``give_up``, which ends the wait where the thread itself cannot.
        began: the time (``time.monotonic()``) when it began.
        warned: True if a message said that it takes long.
    """

    place: Callable[[], str]
    timeout: float = math.inf
    give_up: Callable[[], Any] = lambda: None
    began: float = field(default_factory=time.monotonic)
    warned: bool = False


waits: dict[Any, Wait] = {}
"""By thread, or by whatever else waits for one thing at a time."""
_program = threading.main_thread()
"""In which the program trains: the one that last did something with all ranks."""
_failed: list[tuple[Wait, float]] = []
"""The wait that failed last, if none has succeeded since, and when: others may ask a moment later."""
MOMENT = 5.0


@contextlib.contextmanager
def waiting(place: Callable[[], str]) -> Iterator[Wait]:
    """In this context the thread waits; in a wait inside another the outer one counts."""
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


def program_is_here() -> None:
    """The program trains in this thread: trainers (Ray's) keep the main one to themselves."""
    global _program
    _program = threading.current_thread()


def here() -> tuple[list[str], str]:
    """Where this rank is: what its threads wait in, and the line of the program that it is at."""
    waited = list(waits.values()) or [wait for wait, when in _failed if time.monotonic() - when < MOMENT]
    places = [wait.place() for wait in waited]
    trains = _program.is_alive()
    thread = _program if trains else threading.main_thread()
    frame: Any = sys._current_frames().get(thread.ident or 0)
    inner = ""
    while frame is not None and not _users(frame):
        if not inner and not _graces(frame):
            inner = f", in {frame.f_code.co_name}()"
        frame = frame.f_back
    if frame is None:
        return places, "" if trains else "the end of the thread that trained"
    return places, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{inner if not places else ''}"


def asked_for() -> str:
    """The function of Grace's that the program called, which has led here."""
    frame: Any = sys._getframe(1)
    name = ""
    while frame is not None and not _users(frame):
        if _graces(frame):
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name}()"


_NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<")


def _users(frame: Any) -> bool:
    file = frame.f_code.co_filename
    return "site-packages" not in file and not file.startswith(_NOT_THE_USERS)


def _graces(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == "grace"
