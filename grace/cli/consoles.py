"""Where commands print, and bars of their progress."""

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def wide_console(least: int = 120) -> Console:
    """The standard output; where it is no terminal, wide enough for tables.

    Args:
        least: characters of a line there.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(least, console.width))


def plain_table(headings: Iterable[str], left: Container[str], **looks: Any) -> Table:
    """A table without lines; long words go on below.

    Args:
        headings: of its columns.
        left: those of words, which stand at the left; figures stand at the right.
        looks: what else :class:`rich.table.Table` takes.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **looks)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    return table


@contextlib.contextmanager
def bar(console: Console, here: bool = True) -> Iterator[Callable[[str, float], Any]]:
    """A bar on a terminal: a function that is told what is done, and how much of all (0 to 1).

    Args:
        console: where.
        here: whether this process shows one at all.
    """
    columns = (TextColumn("{task.description:<40}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (here and console.is_terminal), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, done: progress.update(task, description=what[:40], completed=done)
