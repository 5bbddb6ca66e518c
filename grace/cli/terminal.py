"""Output of commands on a terminal, and the check of files that they will write."""

import contextlib
import errno
import os
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from grace.errors import ConfigError

ShowProgress = Callable[[str, float], Any]
"""Function that is called with the operation under way, and the part of all that is done, from 0 to 1."""


def standard_output(least_width: int = 0) -> Console:
    """Return the console that commands print to; lines have ``least_width`` characters where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(least_width, console.width))


def plain_table(headings: Iterable[str], left: Container[str], **looks: Any) -> Table:
    """Return a table without lines, in which long words are folded.

    Args:
        headings: the headings of its columns.
        left: headings of words, which are aligned at the left; figures are aligned at the right.
        looks: further arguments of :class:`rich.table.Table`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **looks)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    return table


@contextlib.contextmanager
def progress_bar(console: Console, shown: bool = True) -> Iterator[ShowProgress]:
    """Return a context with a bar on a terminal; it yields the function that moves the bar.

    Args:
        console: the console with the bar.
        shown: False for a process that shows none.
    """
    columns = (TextColumn("{task.description:<40}"), BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda operation, done: progress.update(task, description=operation[:40], completed=done)


def check_writable(path: Path, make_folder: bool = True) -> None:
    """Raise if a file cannot be written, before a long computation whose result it is to hold.

    A result replaces its file in one step (see :func:`grace.core.atomic_files.atomic_write`), so the folder must be
    writable; the file is not opened, and stays as it is.

    Args:
        path: the file; a link stays for its target, and devices and pipes are taken as they are.
        make_folder: True to make its folder.

    Raises:
        ConfigError: the file is a folder, or its folder is missing, cannot be made or cannot be written to.

    >>> check_writable(Path("/dev/null/trace.json"))
    Traceback (most recent call last):
    grace.errors.ConfigError: cannot write /dev/null/trace.json: File exists
    """
    target = Path(os.path.realpath(path))
    code = None
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            code = errno.EISDIR
        elif not target.parent.is_dir():
            code = errno.ENOENT
        elif (target.is_file() or not target.exists()) and not os.access(target.parent, os.W_OK | os.X_OK):
            code = errno.EACCES
    except OSError as error:
        code = error.errno
    if code is not None:
        raise ConfigError(f"cannot write {path}: {os.strerror(code)}")
