"""Events of a part while it runs: a line of JSON when an item begins, and one when it ended, so that what is finished
is known whatever becomes of the process."""

import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grace.bench.ranks.rank_program import append_line
from tools.device import place

LONGEST = 6000
"""Characters of a traceback that are kept: the last ones."""
BROKEN = 3
"""Exit code of a process whose GPU takes nothing more, after an error that it told: another one goes on."""


def read(file: Path) -> list[dict[str, Any]]:
    """The events of a file; a line that was not written to its end is none.

    >>> read(Path("/there/is/none"))
    []
    """
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


class Log:
    """Log of the events of one process of a part, and the items that the process has to do.

    Args:
        file: of its events; items that it names are not begun again.
        number, count: which of the part's processes this is, of how many.
        limit: seconds after which an item shows where it hangs.
        settings: what was asked for on the command line.
    """

    def __init__(self, file: Path, number: int, count: int, limit: float, settings: dict[str, Any]):
        self.file, self.number, self.count, self.limit, self.settings = file, number, count, limit, settings
        events = read(file)
        self.planned = {item for event in events for item in event.get("planned", [])}
        self.seen = {event["item"] for event in events if "item" in event}
        self.failed = {event["item"] for event in events if event.get("state") == "failed"}
        self.since = time.monotonic()
        self.stderr = os.dup(2)  # pytest takes the other one
        faulthandler.enable(self.stderr)

    def left(self, items: Sequence[str]) -> list[str]:
        """This process's share of a part's items, but for those that were begun before."""
        mine = list(items)[self.number :: self.count]
        if new := [item for item in mine if item not in self.planned]:
            append_line(self.file, {"planned": new})
            self.planned.update(new)
        return [item for item in mine if item not in self.seen]

    def begin(self, item: str) -> None:
        """Tell that an item begins."""
        self.seen.add(item)
        self.since = time.monotonic()
        append_line(self.file, {"item": item, "state": "begun", "at": time.time()})
        faulthandler.dump_traceback_later(self.limit, file=self.stderr)

    def end(self, item: str, state: str, **facts: Any) -> None:
        """Tell how it ended, and what it found."""
        faulthandler.cancel_dump_traceback_later()
        self.failed |= {item} if state == "failed" else set()
        append_line(self.file, {"item": item, "state": state, "seconds": time.monotonic() - self.since, **facts})

    @contextlib.contextmanager
    def item(self, name: str) -> Iterator[dict[str, Any]]:
        """A block that finds something out, and fills it into a dict; what it raises is told, and others go on."""
        found: dict[str, Any] = {}
        self.begin(name)
        try:
            yield found
        except BaseException as error:
            self.end(name, "failed", error=traceback.format_exc()[-LONGEST:], **found)
            if not isinstance(error, Exception):
                raise
            end_if_broken()
        else:
            self.end(name, "done", **found)


def end_if_broken() -> None:
    """End this process if its GPU takes nothing more, so that another one goes on."""
    if place.broken():
        sys.stdout.flush()
        os._exit(BROKEN)
