"""When loops are compiled: announced to whoever watches, and counted for those who do it ahead.

Numba keeps what it compiled beside the source, or in NUMBA_CACHE_DIR, for each processor; so this happens once.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from numba.core import event

RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")


class Listener(event.Listener):
    """Calls a function with the name of each loop that is about to be compiled."""

    def __init__(self, told: Callable[[str], Any]):
        self.told = told

    def on_start(self, event: Any) -> None:
        self.told(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: Any) -> None:
        pass


class _Announcement(Listener):
    listens = False

    def __init__(self) -> None:
        super().__init__(self.say)

    def say(self, name: str) -> None:
        """On a terminal, once, and on one rank of a machine."""
        event.unregister("numba:compile", self)
        self.listens = False
        if sys.stderr is not None and sys.stderr.isatty():
            print(
                "grace: compiling loops for this processor, which happens once and may take 20 seconds; "
                "`grace warmup` does it ahead",
                file=sys.stderr,
            )


_announcement = _Announcement()


def announce() -> None:
    """Say so when the next loop is compiled."""
    if not _announcement.listens and all(os.environ.get(name, "0") == "0" for name in RANKS):
        _announcement.listens = True
        event.register("numba:compile", _announcement)
