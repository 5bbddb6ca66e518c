"""Run a program on all ranks of a benchmark, watch them, and end them."""

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
from grace.bench.ranks.events import tell
from grace.bench.ranks.launchers import Launcher
from grace.core.backend import Backend
from grace.errors import GraceError
from grace.launch.processes import end, signals_raise

RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
"""Where launchers say which rank a process is."""
NOISE = re.compile(r"WARNING: All log messages before absl::InitializeLog|I\d{4} \d\d:")
"""What TensorFlow writes when it starts, whatever it is told."""
LAST_WORDS = 1.0
"""Seconds that the other ranks get to notice that one has failed."""


def run_ranks(launcher: Launcher, program: list[str], folder: Path, watch: Callable[[], None]) -> None:
    """Run a Python program on all ranks, and return when they have ended.

    Args:
        launcher: how they are started.
        program: what follows ``python``.
        folder: where their complaints go: ``launcher.log``, and those that called :func:`redirect_stderr`.
        watch: called ten times a second meanwhile.

    Raises:
        WorkerError: one failed; the others are ended.
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
            while not (failed := _failed(processes)) and any(process.poll() is None for process in processes):
                time.sleep(0.1)
                watch()
            if failed := failed or _failed(processes):
                _wait(processes, LAST_WORDS)
        finally:
            end(*processes)
    watch()
    if failed:
        code = next(iter(failed.values()))
        raise WorkerError(f"the ranks failed (exit code {code})\n{_complaints(launcher, failed, folder)}")


@contextlib.contextmanager
def joined(
    folder: str, settings: Callable[..., Any], engine: str
) -> Iterator[tuple[Any, Backend, Callable[..., None]]]:
    """What each rank of a benchmark has in a ``with`` block: its settings, the run that it has joined, and what takes
    events, which are rank 0's."""
    redirect_stderr(Path(folder))
    given = settings(**json.loads(Path(folder, "settings.json").read_text()))
    backend, events = grace.init(engine), Path(folder, "events.jsonl")
    yield given, backend, lambda event: tell(events, event) if backend.rank == 0 else None
    grace.shutdown()


def as_rank(main: Callable[..., None]) -> None:
    """Run a rank's program with the arguments of the command line; an error of Grace's is told without a traceback."""
    try:
        main(*sys.argv[1:])
    except GraceError:
        sys.tracebacklimit = 0
        raise


def redirect_stderr(folder: Path) -> None:
    """Write what this rank says on stderr, native libraries included, to a file of its own below the folder."""
    name = next((os.environ[key] for key in RANK_VARIABLES if key in os.environ), "0")
    log = os.open(folder / f"rank{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)


def _failed(processes: list[subprocess.Popen]) -> dict[int, int]:
    """The exit codes of those that have failed, by number."""
    return {i: process.returncode for i, process in enumerate(processes) if process.poll()}


def _wait(processes: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _complaints(launcher: Launcher, failed: dict[int, int], folder: Path) -> str:
    """What the ranks wrote to stderr, and which rank a signal ended; or else all that was written otherwise."""
    log = (folder / "launcher.log").read_text(errors="replace").strip()
    said = []
    for path in sorted(folder.glob("rank*.log")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if not NOISE.match(line)]
        if text := "\n".join(lines).strip():
            said.append(f"rank {path.stem.removeprefix('rank')}:\n{text}")
    ended = [(int(found["rank"]), int(found["signal"])) for found in re.finditer(launcher.killed, log)]
    if len(launcher.processes) == launcher.ranks:
        ended += [(rank, -code) for rank, code in failed.items() if code < 0]
    said += [f"rank {rank} was ended by {signal.Signals(number).name}" for rank, number in ended]
    return "\n".join(said) or log
