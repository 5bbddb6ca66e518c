"""A file that one rank writes for all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace.backends.runtime import current
from grace.core.atomic_files import atomic_write
from grace.core.backend import Backend
from grace.session.agreement import tell


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
            with atomic_write(path) as draft:
                write(draft)
        except Exception as raised:
            error = raised
    tell(backend, f"{path} to save", None, error, f"could not save {path}")
