"""The progress of a training benchmark: what the first rank writes down, and what is shown of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from grace.bench.follow import Follower
from grace.bench.task import task_class


class Display:
    """One bar per method on a terminal, else one line per run.

    Args:
        settings: what is run.
        file: what the first rank writes, one JSON object a line: ``{"method"}`` when it begins with one,
            ``{"quality"}`` after each epoch, and ``{"method", "seed", "quality"}`` after each run.
    """

    def __init__(self, settings: Any, file: Path):
        self.follower = Follower(file)
        self.task = task_class(settings.task)
        self.total = (settings.epochs or self.task.epochs) * len(settings.seeds)
        self.console = Console(highlight=False)
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[quality]:>7}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.stop()

    def update(self) -> None:
        """Show what was written since the last time."""
        for event in self.follower.new():
            self._show(event)

    def _show(self, event: dict[str, Any]) -> None:
        if "quality" not in event:
            self.bar = self.progress.add_task(event["method"], total=self.total, quality="")
        elif "method" not in event:
            self.progress.update(self.bar, advance=1, quality=self._shown(event["quality"]))
        elif not self.console.is_terminal:
            method, seed, quality = event["method"], event["seed"], self._shown(event["quality"])
            self.console.print(f"{method}, seed {seed}: {self.task.metric} {quality}")

    def _shown(self, quality: float) -> str:
        return f"{self.task.scale * quality:.4g} {self.task.unit}".rstrip()


class Bar:
    """One bar for a benchmark of several scenarios on a terminal; else a line per scenario.

    Args:
        console: where it is shown.
    """

    def __init__(self, console: Console):
        self.console = console
        self.bars: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.progress.stop()

    def show(self, scenario: str, event: dict[str, Any]) -> None:
        """An event of a scenario's ranks."""
        if "engine" in event:
            name = f"{scenario}, {event['engine']}"
            if not self.console.is_terminal:
                self.console.print(f"measuring {name} ...")
            self.bars[scenario] = self.progress.add_task(name, total=None)
        elif "blocks" in event:
            self.progress.update(self.bars[scenario], total=event["blocks"])
        elif "times_ms" in event:
            self.progress.update(self.bars[scenario], advance=1)
