"""Progress of commands, as bars on a terminal; of benchmarks' scenarios else as lines."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from grace.bench.common.events import Event

ShowProgress = Callable[[str, float], object]
"""Function that is called with the operation under way, and the part of all that is done, from 0 to 1."""


def _columns(width: int) -> list[ProgressColumn]:
    words = TextColumn(f"{{task.description:<{width}}}", markup=False)
    return [words, BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn()]


@contextlib.contextmanager
def progress_bar(console: Console, shown: bool = True) -> Iterator[ShowProgress]:
    """Return a context that yields the function that moves a bar on a terminal; with ``shown`` False there is none.

    No thread draws the bar: what the command measures meanwhile would wait for it.
    """
    hidden = not (shown and console.is_terminal)
    with Progress(*_columns(40), console=console, disable=hidden, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=1.0)

        def show(operation: str, done: float) -> None:
            progress.update(task, description=operation[:40], completed=done, refresh=True)

        yield show


class ScenarioBars(Progress):
    """Progress of scenarios: a bar for each of them, or a line; shown inside a ``with`` block."""

    def __init__(self, console: Console):
        super().__init__(*_columns(34), console=console, disable=not console.is_terminal)
        self.bars: dict[str, TaskID] = {}

    def show(self, scenario: str, event: Event) -> None:
        """Show an event of a scenario's ranks: their engine, the number of blocks, or a block (of steps, or an
        epoch)."""
        if "engine" in event:
            name = f"{scenario}, {event['engine']}"
            if not self.console.is_terminal:
                self.console.print(f"measuring {name} ...", markup=False)
            self.bars[scenario] = self.add_task(name, total=None)
        elif "blocks" in event:
            self.update(self.bars[scenario], total=event["blocks"])
        elif {"times_ms", "quality"} & event.keys():
            self.update(self.bars[scenario], advance=1)
