"""Files that are there whole or not at all, whatever happens while they are written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
