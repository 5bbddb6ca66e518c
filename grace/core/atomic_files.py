"""Atomic writes of files: a file is replaced completely or not at all, whatever happens while it is written."""

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a draft file's path to write to. At the end of the context the draft is flushed to the disk and replaces
    ``path`` in one step; if writing fails, the draft is removed. A killed process leaves a hidden draft, which the next
    call removes.

    The draft is a new file with a random name, so others who may write to the folder cannot have put a link there.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "words.txt")
    >>> with atomic_write(file) as draft:
    ...     _ = draft.write_text("whole")
    >>> file.read_text(), os.listdir(file.parent)
    ('whole', ['words.txt'])
    """
    path = Path(os.path.realpath(path))  # a link stays, and its target is replaced
    if path.exists() and not path.is_file():  # such as /dev/stdout; a folder is refused when it is written to
        with _naming(path):
            yield path
        return
    _remove_left_over(path)
    draft = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.draft{path.suffix}")
    with _naming(path), _locked(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY):
        try:
            yield draft
            _flush(draft)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    with contextlib.suppress(OSError):  # some file systems cannot flush folders
        _flush(path.parent)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError that names none, as of a full disk, which only a write to an open file meets."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _remove_left_over(path: Path) -> None:
    """Remove drafts of ``path`` that no process writes any more. Only names of the form of drafts are touched."""
    start, end = f".{path.stem}.", f".draft{path.suffix}"
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            # 16: the hexadecimal digits of the draft's name. A named pipe of that name must not block the open.
            if name.startswith(start) and name.endswith(end) and len(name) == len(start) + 16 + len(end):
                with contextlib.suppress(OSError), _locked(path.with_name(name), os.O_WRONLY | os.O_NONBLOCK):
                    path.with_name(name).unlink()


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Open a file and hold an exclusive lock on it, which tells other processes that this one still writes the file.

    Raises:
        OSError: it cannot be opened, is a link, or another process writes it.
    """
    number = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another process holds the lock, or the file system has no locks. A new file has a name of its own: go on.
            if not how & os.O_CREAT:
                raise
        yield
    finally:
        os.close(number)


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk.

    Raises:
        OSError: it is no file or folder, as where a link has taken its place.
    """
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(f"{path} is no longer a regular file: something else was put in its place")
        os.fsync(number)
    finally:
        os.close(number)
