"""Scenarios of a benchmark in a file that grows, from which it goes on if it was interrupted."""

import json
from pathlib import Path
from typing import Any

from grace.errors import ConfigError

Scenario = dict[str, Any]


def signed(one: dict[str, Any]) -> float:
    """By how much a prediction is too long.

    >>> round(signed({"predicted_ms": 9.0, "measured_ms": 10.0}), 3)
    -0.1
    """
    return float(one["predicted_ms"] / one["measured_ms"] - 1)


class Kept:
    """A file of scenarios, one JSON object a line; none keeps nothing.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "plans.jsonl")
    >>> Kept(file).add({"model": "lstm"})
    >>> Kept(file).read()
    [{'model': 'lstm'}]
    """

    def __init__(self, file: Path | None):
        self.file = file

    def begin(self, resume: bool) -> list[Scenario]:
        """Those that are there, if they are to be gone on from; else an empty file."""
        if self.file is None:
            return []
        if resume and self.file.exists():
            return self.read()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")
        return []

    def read(self) -> list[Scenario]:
        """All of them.

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
        """One more."""
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps(scenario) + "\n")
