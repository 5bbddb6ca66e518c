"""Output of commands on a terminal, and the check of files that they will write."""

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from grace.errors import ConfigError


def standard_output(least_width: int = 0) -> Console:
    """Return the console that commands print to; lines have ``least_width`` characters where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(least_width, console.width))


def check_writable(path: Path, make_folder: bool = True) -> None:
    """Raise a ConfigError if a file cannot be written, before a long computation whose result it is to hold.

    A result replaces its file in one step (see :func:`grace.core.atomic_files.atomic_write`), so the folder, which is
    made unless ``make_folder`` is False, must be writable. A link stays for its target; devices and pipes are taken as
    they are.
    """
    target = Path(os.path.realpath(path))
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.is_file() or not target.exists():
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def check_outputs(*paths: Path | None, sources: Iterable[Path | None] = (), make_folder: bool = False) -> None:
    """Raise a ConfigError if a command could not write its files, or would write two into one, or over its sources.
    Where an option is not given its file is None."""
    given = [path for path in paths if path is not None]
    for path in given:
        check_writable(path, make_folder)
    read = {os.path.realpath(path) for path in sources if path is not None}
    targets = [os.path.realpath(path) for path in given]
    for path, target in zip(given, targets, strict=True):
        if target in read:
            raise ConfigError(f"{path} is a file that is read, and would be overwritten")
        if targets.count(target) > 1 and (os.path.isfile(target) or not os.path.exists(target)):
            raise ConfigError(f"{path} is named for two results, and one would overwrite the other")
