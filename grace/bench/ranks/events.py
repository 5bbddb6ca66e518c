"""Events that the first rank of a benchmark writes, read while it writes them."""

import json
from pathlib import Path
from typing import Any


class Follower:
    """Reader of a file of JSON objects, one a line, that grows.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "events.jsonl")
    >>> follower = Follower(file)
    >>> follower.read_new()
    []
    >>> _ = file.write_text('{"a": 1}\\n{"b"')
    >>> follower.read_new(), follower.read_new()
    ([{'a': 1}], [])
    """

    def __init__(self, file: Path):
        self.file = file
        self.position = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Return the events that were written since the last call; an incomplete line is read by a later call."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self.position)
            written = file.read()
        complete = written[: written.rfind(b"\n") + 1]
        self.position += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def write_event(file: Path, event: dict[str, Any]) -> None:
    """Append an event to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(event) + "\n")
