"""Start of a program on all ranks of a benchmark, with supervision and end of the ranks."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grace
from grace.bench.common.errors import WorkerError
from grace.bench.ranks.events import write_event
from grace.bench.ranks.launchers import Launcher
from grace.core.backend import Backend
from grace.errors import GraceError
from grace.launch.processes import end, signals_raise

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
"""Variables with the rank of a process, by launcher."""
NOISE = re.compile(r"WARNING: All log messages before absl::InitializeLog|I\d{4} \d\d:")
"""Lines that TensorFlow prints when it starts, whatever its log level is."""
LAST_WORDS = 1.0
"""Seconds that the other ranks get to notice that one has failed."""


def run_ranks(launcher: Launcher, program: list[str], folder: Path, watch: Callable[[], None]) -> None:
    """Run a Python program on all ranks, and return when they have ended.

    Args:
        launcher: the launcher of the ranks.
        program: the arguments of ``python``.
        folder: the folder of their stderr: ``launcher.log``, and a file of each rank that called
            :func:`redirect_stderr`.
        watch: called ten times a second meanwhile.

    Raises:
        WorkerError: a rank failed; the others are ended.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; all are ended.
    """
    processes: list[subprocess.Popen] = []
    with (folder / "launcher.log").open("w") as log, signals_raise():
        try:
            for process in launcher.processes:
                # a session of its own, so that Ctrl-C reaches only us and the ranks end without tracebacks
                processes.append(
                    subprocess.Popen(
                        [*process.command, *program],
                        env={
                            **launcher.defaults,
                            **os.environ,
                            **process.environment,
                            "GRACE_BACKEND": launcher.engine,
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            failed = _failed(processes)
            while not failed and any(process.poll() is None for process in processes):
                time.sleep(0.1)
                watch()
                failed = _failed(processes)
            failed = failed or _failed(processes)
            if failed:
                _wait(processes, LAST_WORDS)
        finally:
            end(*processes)
    watch()
    if failed:
        code = next(iter(failed.values()))
        raise WorkerError(f"the ranks failed (exit code {code})\n{_complaints(launcher, failed, folder)}")


@contextlib.contextmanager
def join_run(
    folder: str, settings: Callable[..., Any], engine: str
) -> Iterator[tuple[Any, Backend, Callable[..., None]]]:
    """Return a rank's settings, the backend of the run that it has joined, and a function that writes events.

    The run ends with the ``with`` block. Only rank 0 writes events.
    """
    redirect_stderr(Path(folder))
    rank_settings = settings(**json.loads(Path(folder, "settings.json").read_text()))
    backend = grace.init(engine)
    events = Path(folder, "events.jsonl")
    yield rank_settings, backend, lambda event: write_event(events, event) if backend.rank == 0 else None
    grace.shutdown()


def as_rank(main: Callable[..., None]) -> None:
    """Run a rank's program with the arguments of the command line; an error of Grace's is printed without a
    traceback."""
    try:
        main(*sys.argv[1:])
    except GraceError:
        sys.tracebacklimit = 0
        raise


def redirect_stderr(folder: Path) -> None:
    """Redirect this rank's stderr, native libraries included, to a file of its own in the folder."""
    name = next((os.environ[key] for key in RANK_VARIABLES if key in os.environ), "0")
    log = os.open(folder / f"rank{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _failed(processes: list[subprocess.Popen]) -> dict[int, int]:
    """Return the exit codes of the processes that have failed, by their numbers."""
    return {i: process.returncode for i, process in enumerate(processes) if process.poll()}


def _wait(processes: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _complaints(launcher: Launcher, failed: dict[int, int], folder: Path) -> str:
    """Return the ranks' stderr, and the ranks that a signal ended; if there is none, the launcher's log."""
    log = (folder / "launcher.log").read_text(errors="replace").strip()
    messages = []
    for path in sorted(folder.glob("rank*.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if not NOISE.match(line)]
        text = "\n".join(lines).strip()
        if text:
            messages.append(f"rank {path.stem.removeprefix('rank')}:\n{text}")
    ended = [(int(found["rank"]), int(found["signal"])) for found in re.finditer(launcher.killed, log)]
    if len(launcher.processes) == launcher.ranks:
        ended += [(rank, -code) for rank, code in failed.items() if code < 0]
    messages += [f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in ended]
    return "\n".join(messages) or log
