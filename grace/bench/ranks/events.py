"""Reading what the first rank of a benchmark tells, while it tells it."""

import json
from pathlib import Path
from typing import Any


class Follower:
    """A file of JSON objects, one a line, that grows.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "events.jsonl")
    >>> follower = Follower(file)
    >>> follower.new()
    []
    >>> _ = file.write_text('{"a": 1}\\n{"b"')
    >>> follower.new(), follower.new()
    ([{'a': 1}], [])
    """

    def __init__(self, file: Path):
        self.file, self.position = file, 0

    def new(self) -> list[dict[str, Any]]:
        """What was written since the last time; a line that is not whole yet waits."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as file:
            file.seek(self.position)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self.position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def tell(file: Path, event: dict[str, Any]) -> None:
    """Add a line."""
    with file.open("a") as lines:
        lines.write(json.dumps(event) + "\n")
