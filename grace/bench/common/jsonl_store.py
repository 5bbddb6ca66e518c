"""File of a benchmark's scenarios that grows, from which an interrupted benchmark continues."""

import json
from pathlib import Path
from typing import Any

from grace.errors import ConfigError

Scenario = dict[str, Any]


class JsonlStore:
    """File of scenarios, one JSON object a line; without a path nothing is stored.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plans.jsonl")
    >>> JsonlStore(file).add({"model": "lstm"})
    >>> JsonlStore(file).open(resume=True)
    [{'model': 'lstm'}]
    """

    def __init__(self, file: Path | None):
        self.file = file

    def open(self, resume: bool) -> list[Scenario]:
        """Return the scenarios in the file, if the benchmark continues from them; else empty the file.

        Raises:
            ConfigError: a line is no scenario.
        """
        if self.file is None:
            return []
        if not (resume and self.file.exists()):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("")
        found = []
        for number, line in enumerate(self.file.read_text().splitlines(), start=1):
            try:
                scenario = json.loads(line)
                scenario["model"]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{self.file}, line {number}, is no scenario of a benchmark") from None
            found.append(scenario)
        return found

    def add(self, scenario: Scenario) -> None:
        """Append a scenario."""
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps(scenario) + "\n")
