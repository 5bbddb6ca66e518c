"""Progress of benchmarks, as bars on a terminal, or else as lines."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from grace.bench.common.quality import shown
from grace.bench.common.text import show_rate


class ShownProgress(Progress):
    """Base of bars, which are shown inside a ``with`` block."""

    def __init__(self, console: Console, *columns: ProgressColumn):
        super().__init__(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)


class TrainingBars(ShownProgress):
    """Progress of training: a bar per method and network, or a line per run."""

    def __init__(self, console: Console, settings: Any):
        quality = TextColumn("{task.fields[quality]:>7}")
        super().__init__(console, TextColumn("{task.description:<18}"), BarColumn(bar_width=28), quality)
        self.about, self.label = settings.about(), settings.label
        self.total = self.about["epochs"] * len(settings.seeds)

    def show(self, rate: float | None, event: dict[str, Any]) -> None:
        """Show an event of the ranks over a network."""
        where = "" if rate is None else f", {show_rate(rate)}"
        if "method" in event:
            self.bar = self.add_task(event["method"] + where, total=self.total, quality="")
        elif "quality" in event:
            self.update(self.bar, advance=1, quality=shown(event["quality"], self.about))
        elif "run" in event and not self.console.is_terminal:
            run = event["run"]
            quality = f"{self.about['metric']} {shown(run['quality'], self.about)}"
            self.console.print(f"{self.label(run['method'], run['optimizer'])}, seed {run['seed']}{where}: {quality}")


class ScenarioBars(ShownProgress):
    """Progress of a benchmark of several scenarios: a bar, or a line per scenario."""

    def __init__(self, console: Console):
        super().__init__(console, TextColumn("{task.description:<34}"), BarColumn(bar_width=20), TaskProgressColumn())
        self.bars: dict[str, TaskID] = {}

    def show(self, scenario: str, event: dict[str, Any]) -> None:
        """Show an event of a scenario's ranks."""
        if "engine" in event:
            name = f"{scenario}, {event['engine']}"
            if not self.console.is_terminal:
                self.console.print(f"measuring {name} ...")
            self.bars[scenario] = self.add_task(name, total=None)
        elif "blocks" in event:
            self.update(self.bars[scenario], total=event["blocks"])
        elif "times_ms" in event:
            self.update(self.bars[scenario], advance=1)
