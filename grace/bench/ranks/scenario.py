"""One scenario of a benchmark: ranks that are started over a network, and the events of the first of them."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from grace.backends.launchers import detect
from grace.bench.common.ending import WorkerError
from grace.bench.common.events import Event
from grace.bench.link.emulation import Link
from grace.bench.ranks.launchers import RankLauncher, launcher
from grace.errors import ConfigError
from grace.launch.processes import end, signals_raise
from grace.launch.supervisor import first_failure

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Scenario = dict[str, Any]
"""Facts of a scenario, and what was measured in it: one document, whose keys are the benchmark's."""
LAST_WORDS = 1.0
"""Seconds that the other ranks get to notice that one has failed."""


def run_scenario(
    program: Sequence[str],
    settings: "DataclassInstance | Mapping[str, object]",
    arguments: Sequence[str],
    ranks: int,
    rate: float | None,
    on_event: Callable[[Event], None],
    engine: str = "torch",
    nodes: int | None = None,
) -> Scenario:
    """Start ranks, and return the result that rank 0 writes in the end.

    Args:
        program: arguments of ``python``; a folder with settings.json follows, to which rank 0 writes events.jsonl.
        settings: a dataclass, or a dict.
        arguments: further arguments, after the folder.
        rate: bits per second of emulated links; None for loopback.
        on_event: called with each event; the first one has the engine.
        nodes: the number of machines that a link joins; one for each rank if left out.

    Raises:
        ConfigError: this process is a launcher's rank itself.
        LinkError: a network cannot be emulated here.
        WorkerError: a rank failed.
    """
    started_by = detect()
    if started_by is not None:  # its variables would reach our ranks, which would wait for a store that is not there
        raise ConfigError(
            f"this benchmark starts ranks of its own, and this process is a rank itself, started by {started_by}: run "
            "it without a launcher (grace bench step alone measures over a launcher's ranks)"
        )
    found: Scenario = {}
    on_event({"engine": engine})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grace-bench-")))
        facts = dict(settings) if isinstance(settings, Mapping) else dataclasses.asdict(settings)
        (folder / "settings.json").write_text(json.dumps(facts))
        (folder / "events.jsonl").touch()
        events = EventFile(stack.enter_context((folder / "events.jsonl").open()))

        def handle_new_events() -> None:
            for event in events.read_new():
                found.update(event.get("scenario", {}))
                on_event(event)

        link = None if rate is None else stack.enter_context(Link(nodes or ranks, rate))
        start = stack.enter_context(launcher(engine, ranks, link))
        run_ranks(start, [*program, str(folder), *arguments], folder, handle_new_events)
    return found


class EventFile:
    """File to which rank 0 appends events, a line each, while it is read."""

    def __init__(self, file: TextIO):
        self.file = file
        self.incomplete = ""
        """Last line, if it is half written."""

    def read_new(self) -> list[Event]:
        """Return the events that were written since the last call."""
        *lines, self.incomplete = (self.incomplete + self.file.read()).split("\n")
        return list(map(json.loads, lines))


def run_ranks(launcher: RankLauncher, program: Sequence[str], folder: Path, meanwhile: Callable[[], None]) -> None:
    """Run a Python program on all ranks, and return when they have ended; ``meanwhile`` is called again and again.

    The folder gets their stderr: ``launcher.log``, and a file of each rank that has joined the run.

    Raises:
        WorkerError: a rank failed; the others are ended.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; all are ended.
    """
    processes: list[subprocess.Popen] = []
    with (folder / "launcher.log").open("w") as log, signals_raise():
        try:
            for process in launcher.processes:
                own = {**launcher.defaults, **os.environ, **process.environment, "GRACE_BACKEND": launcher.engine}
                command = [*process.command, *program]
                # a session of its own, so that Ctrl-C reaches only us and the ranks end without tracebacks
                processes.append(
                    subprocess.Popen(
                        command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
            failed = _failed(processes)
            while not failed and any(process.poll() is None for process in processes):
                time.sleep(0.1)  # seldom: this process shares the cores with the ranks that it measures
                meanwhile()
                failed = _failed(processes)
            failed = failed or _failed(processes)  # the last ones may have failed after the look at them
            if failed:
                _wait(processes, LAST_WORDS)
        finally:
            end(*processes)
    meanwhile()  # events of the last 0.1 s
    if failed:
        code = next(iter(failed.values()))
        raise WorkerError(f"the ranks failed (exit code {code})\n{_complaints(launcher, failed, folder)}")


def _failed(processes: list[subprocess.Popen]) -> dict[int, int]:
    """Return the exit codes of the processes that have failed, by their numbers."""
    return {i: process.returncode for i, process in enumerate(processes) if process.poll()}


def _wait(processes: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _complaints(launcher: RankLauncher, failed: dict[int, int], folder: Path) -> str:
    """Return the ranks' stderr, and the ranks that a signal ended; if there is none, the launcher's log."""
    log = (folder / "launcher.log").read_text(errors="replace").strip()
    messages = []
    for path in sorted(folder.glob("rank*.log")):
        text = path.read_text(errors="replace").strip()
        if text:
            messages.append(f"rank {path.stem.removeprefix('rank')}:\n{text}")
    if launcher.engine == "mpi":  # the exit code is mpirun's, and its log names the rank
        first = first_failure(log)
        failed = {} if first is None else {first[0]: first[1]}
    messages += [f"rank {rank} was ended by {signal.Signals(-code).name}" for rank, code in failed.items() if code < 0]
    return "\n".join(messages) or log
