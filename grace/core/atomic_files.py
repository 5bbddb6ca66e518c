"""Files that are there whole or not at all, whatever happens while they are written."""

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside ``path`` to write to. At the end what was written takes the place of ``path`` at once, when it is
    on the disk; if writing fails, it is removed. A process that is killed leaves it, hidden, for the next to remove.

    It is a new file, of a name that nobody can foretell: others who may write to the folder cannot have put a link
    there.

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
    _remove_left_over(path)
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.draft{path.suffix}")
    with _locked(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY):
        try:
            yield draft
            _flush(draft)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    with contextlib.suppress(OSError):  # some file systems do not know it of folders
        _flush(path.parent)


def _remove_left_over(path: Path) -> None:
    """Remove drafts that nobody writes any more; what is no draft of ours stays."""
    start, end = f".{path.stem}.", f".draft{path.suffix}"
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(start) and name.endswith(end) and len(name) == len(start) + 16 + len(end):
                with contextlib.suppress(OSError), _locked(path.with_name(name), os.O_WRONLY | os.O_NONBLOCK):
                    path.with_name(name).unlink()


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """The context of a file that this process writes; others see so as long as it lives.

    Raises:
        OSError: it cannot be opened, is a link, or another process writes it.
    """
    number = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has it; or the file system knows no locks, which is no matter of a new file
            if not how & os.O_CREAT:
                raise
        yield
    finally:
        os.close(number)


def _flush(path: Path) -> None:
    """To the disk.

    Raises:
        OSError: it is no file or folder, as where a link has taken its place.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(mode := os.fstat(number).st_mode) and not stat.S_ISDIR(mode):
            raise OSError(f"{path} is no file any more: somebody has put something else in its place")
        os.fsync(number)
    finally:
        os.close(number)
