"""Files of JSON objects, one a line, that grow: events of ranks, and scenarios that a benchmark has measured."""

import json
from pathlib import Path
from typing import Any

from grace.core import documents
from grace.errors import ConfigError

Scenario = dict[str, Any]


def append_line(file: Path, content: dict[str, Any]) -> None:
    """Append an object to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(content) + "\n")


def open_scenarios(file: Path, resume: bool) -> list[Scenario]:
    """Return the scenarios in the file, if the benchmark continues from them; else empty the file.

    Raises:
        ConfigError: the file cannot be read, or a line is no scenario.
    """
    if not (resume and file.exists()):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    found = []
    for number, line in enumerate(documents.read(file).splitlines(), start=1):
        try:
            scenario = json.loads(line)
            scenario["model"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file}, line {number}, is no scenario of a benchmark") from None
        found.append(scenario)
    return found


class EventReader:
    """Reader of the objects that other processes append to a file.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "events.jsonl")
    >>> reader = EventReader(file)
    >>> reader.read_new()
    []
    >>> _ = file.write_text('{"a": 1}\\n{"b"')
    >>> reader.read_new(), reader.read_new()
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
