"""When loops are compiled: announced to whoever watches, and counted for those who do it ahead.

Numba keeps what it compiled beside the source, or in NUMBA_CACHE_DIR, for each processor; so this happens once.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event

from grace.kernels import random

RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")


@functools.cache
def sources() -> str:
    """A digest of all files that loops are written in."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(random.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def loop(**options: Any) -> Callable[[Any], Any]:
    """A decorator that compiles a loop, and keeps what was compiled until some loop is written otherwise.

    Numba itself looks at the file of a function alone, but compiles those that it calls into it: after an upgrade that
    changes another file it would go on with what they were.
    """
    decorate = njit(nogil=True, cache=True, error_model="numpy", **options)

    def compiled(function: Any) -> Any:
        dispatcher = decorate(function)
        kept = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if kept is not None:
            kept._source_stamp = (kept._source_stamp, sources())
        return dispatcher

    return compiled


class Listener(event.Listener):
    """Calls a function with the name of each loop of Grace's that is about to be compiled."""

    def __init__(self, told: Callable[[str], Any]):
        self.told = told

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.partition(".")[0] == "grace":  # not what Numba's own functions are made of
            self.told(function.__name__)

    def on_end(self, event: Any) -> None:
        pass


class _Announcement(Listener):
    registered = awaited = False

    def __init__(self) -> None:
        super().__init__(self.say)

    def say(self, name: str) -> None:
        """On a terminal, once."""
        if self.awaited and sys.stderr is not None and sys.stderr.isatty():
            print(
                "grace: compiling loops for this processor, which happens once and may take 20 seconds; "
                "`grace warmup` does it ahead",
                file=sys.stderr,
            )
        self.awaited = False


_announcement = _Announcement()


def announce() -> None:
    """Say so when the next loop is compiled, on one rank of a machine."""
    _announcement.awaited = all(os.environ.get(name, "0") == "0" for name in RANKS)
    if _announcement.awaited and not _announcement.registered:
        _announcement.registered = True
        event.register("numba:compile", _announcement)
