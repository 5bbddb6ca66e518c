"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grace.agreement import tell
from grace.backends.runtime import current
from grace.core.backend import Backend


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside ``path`` to write to. At the end what was written takes the place of ``path`` at once, when it is
    on the disk; if writing fails, it is removed. A process that is killed leaves it, hidden, for the next to overwrite.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "words.txt")
    >>> with replacing(file) as draft:
    ...     _ = draft.write_text("whole")
    >>> file.read_text(), os.listdir(file.parent)
    ('whole', ['words.txt'])
    """
    path = Path(os.path.realpath(path))  # of a link, what it leads to
    if path.exists() and not path.is_file():  # /dev/stdout, say, or a folder, which writing will refuse
        yield path
        return
    draft = path.with_name(f".{path.stem}.draft{path.suffix}")
    try:
        yield draft
        _flush(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems do not know it of folders
        _flush(path.parent)


def _flush(path: Path) -> None:
    """To the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def save_from_root(
    path: str | Path, write: Callable[[Path], Any], root: int = 0, backend: Backend | None = None
) -> None:
    """Write a file on one rank, whole or not at all. Every rank must call it, and goes on when the file is there.

    A program that is killed meanwhile leaves the file that was there before.

    Args:
        path: of the file.
        write: called on the root alone, with a path beside it to write to.
        root: the rank.
        backend: the ranks; those of ``grace.init()`` if left out.

    Raises:
        RankError: it failed on the root, where the error itself is raised.

    >>> import grace, tempfile
    >>> _ = grace.init("local")
    >>> file = Path(tempfile.mkdtemp(), "step.txt")
    >>> save_from_root(file, lambda path: path.write_text("3"))
    >>> file.read_text()
    '3'
    >>> grace.shutdown()
    """
    backend, error = backend or current(), None
    if backend.rank == root:
        try:
            with replacing(path) as draft:
                write(draft)
        except Exception as raised:
            error = raised
    tell(backend, f"{path} to save", None, error, f"could not save {path}")
