"""Linux network namespaces that belong to a process, and are removed with all that runs inside."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from grace.bench.common.errors import LinkError

FOLDER = Path("/var/run/netns")
"""Where ``ip`` keeps their names."""
PREFIX = "grace"


def prefix() -> str:
    """How the names of this process's namespaces begin.

    A number that was given to a later process again must not protect what the earlier one left, so the time at which
    the process started is in it too.
    """
    return f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"


def starting(start: str) -> list[str]:
    """The namespaces that are there and whose names begin so."""
    return [name for name in _names() if name.startswith(f"{start}-")]


def remove(names: list[str]) -> None:
    """Kill what runs inside, and delete them.

    Raises:
        LinkError: some are still there; all have been tried.
    """
    complaints = []
    for name in names:
        with contextlib.suppress(LinkError):  # a name without a namespace is all that an interrupted start left
            _empty(name)
        try:
            call("ip", "netns", "delete", name)
        except LinkError as error:
            if name in _names():
                complaints.append(str(error))
    if complaints:
        raise LinkError("; ".join(complaints))


def remove_stale() -> None:
    """Remove what processes have left that were killed."""
    owners = {name: re.match(rf"{PREFIX}-(\d+)-(\d+)-", name) for name in _names()}
    remove([name for name, owner in owners.items() if owner and _started(int(owner[1])) != owner[2]])


def call(*command: str, script: str = "") -> str:
    """Run ``ip`` or ``tc``, and return what it says.

    Args:
        command: the command line.
        script: for ``-batch -``.

    Raises:
        LinkError: it failed; with its complaint.
    """
    # a session of its own, so that Ctrl-C does not end what is just removing a namespace
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise LinkError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _empty(name: str) -> None:
    """Kill all processes in a namespace; those that are killed may have started others meanwhile."""
    deadline = time.monotonic() + 5
    while (inside := call("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _names() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty if it does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
