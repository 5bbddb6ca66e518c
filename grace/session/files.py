"""Files that one rank writes for all ranks."""

from collections.abc import Callable
from pathlib import Path

from grace.backends.runtime import current
from grace.core.atomic_files import atomic_write
from grace.core.backend import Backend
from grace.session.agreement import failing_together


def save_from_root(
    path: str | Path, write: Callable[[Path], object], root: int = 0, backend: Backend | None = None
) -> None:
    """Write a file atomically on one rank. Every rank must call it; it returns when the file is complete.

    If the program is killed meanwhile, an earlier file of that name is unchanged.

    Args:
        path: the path of the file.
        write: called on the root only, with the path of a draft to write to.
        root: the rank that writes.
        backend: the ranks; those of ``grace.init()`` if left out.

    Raises:
        RankError: (on other ranks) writing failed on the root, which raises the error itself.

    >>> import grace, tempfile
    >>> _ = grace.init("local")
    >>> file = Path(tempfile.mkdtemp(), "step.txt")
    >>> save_from_root(file, lambda path: path.write_text("3"))
    >>> file.read_text()
    '3'
    >>> grace.shutdown()
    """
    backend = backend or current()
    # Also a barrier: no rank goes on before the file is complete.
    with failing_together(backend, f"{path} to save", f"could not save {path}"):
        if backend.rank == root:
            with atomic_write(path) as draft:
                write(draft)
