"""File of a benchmark's scenarios that grows, from which an interrupted benchmark continues."""

import json
from pathlib import Path
from typing import Any

from grace.errors import ConfigError

Scenario = dict[str, Any]


def relative_error(one: dict[str, Any]) -> float:
    """Return the relative error of a prediction; positive if it is too long.

    >>> round(relative_error({"predicted_ms": 9.0, "measured_ms": 10.0}), 3)
    -0.1
    """
    return float(one["predicted_ms"] / one["measured_ms"] - 1)


class Kept:
    """File of scenarios, one JSON object a line; without a path nothing is stored.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plans.jsonl")
    >>> Kept(file).add({"model": "lstm"})
    >>> Kept(file).read()
    [{'model': 'lstm'}]
    """

    def __init__(self, file: Path | None):
        self.file = file

    def open(self, resume: bool) -> list[Scenario]:
        """Return the scenarios in the file, if the benchmark continues from them; else empty the file."""
        if self.file is None:
            return []
        if resume and self.file.exists():
            return self.read()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")
        return []

    def read(self) -> list[Scenario]:
        """Return all scenarios in the file.

        Raises:
            ConfigError: a line is no scenario.
        """
        assert self.file is not None
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
