"""Program of one rank of a benchmark: it joins the run, and rank 0 writes events for the process that started it."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import grace
from grace.bench.common.events import Event
from grace.core.backend import Backend
from grace.errors import GraceError

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
"""Variables with the rank of a process, by launcher."""
Emit = Callable[[Event], None]
SettingsOf = TypeVar("SettingsOf")


def append_line(file: Path, content: Mapping[str, object]) -> None:
    """Append an object to the file."""
    with file.open("a") as lines:
        lines.write(json.dumps(content) + "\n")


def run_as_rank(main: Callable[..., None]) -> None:
    """Run a rank's program with the command line's arguments; Grace's errors are printed without a traceback."""
    try:
        main(*sys.argv[1:])
    except GraceError:
        sys.tracebacklimit = 0  # the message is for the user; the interpreter still exits with 1
        raise


@contextlib.contextmanager
def join_run(
    folder: str, settings: Callable[..., SettingsOf], engine: str = "torch"
) -> Iterator[tuple[SettingsOf, Backend, Emit]]:
    """Join a run for the time of the ``with`` block; return the settings of settings.json in the folder, the backend,
    and a function by which rank 0 writes an event to events.jsonl."""
    redirect_stderr(Path(folder))
    rank_settings = settings(**json.loads(Path(folder, "settings.json").read_text()))
    backend = grace.init(engine)
    events = Path(folder, "events.jsonl")

    def emit(event: Event) -> None:
        if backend.rank == 0:
            append_line(events, event)

    yield rank_settings, backend, emit
    grace.shutdown()


def redirect_stderr(folder: Path) -> None:
    """Redirect this rank's stderr, native libraries included, to a file of its own in the folder."""
    name = next((os.environ[key] for key in RANK_VARIABLES if key in os.environ), "0")
    # the descriptor, not sys.stderr: gloo, MPI and a crash write to 2
    log = os.open(folder / f"rank{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
