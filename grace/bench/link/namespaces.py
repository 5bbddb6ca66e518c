"""Linux network namespaces that belong to a process, and are removed with all processes inside."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from grace.bench.common.ending import LinkError

FOLDER = Path("/var/run/netns")
"""Folder in which ``ip`` keeps the names of namespaces."""
PREFIX = "grace"


def prefix() -> str:
    """Return the prefix of the names of this process's namespaces.

    It has the time at which the process started, since a later process with the same number must not protect namespaces
    that an earlier one left.
    """
    return f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"


def starting(start: str) -> list[str]:
    """Return the existing namespaces whose names have this prefix."""
    return [name for name in _names() if name.startswith(f"{start}-")]


def remove(names: list[str]) -> None:
    """Kill all processes in namespaces, and delete the namespaces; a LinkError says that some still exist."""
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
    """Remove namespaces of processes that were killed."""
    owners = {name: re.match(rf"{PREFIX}-(\d+)-(\d+)-", name) for name in _names()}
    remove([name for name, owner in owners.items() if owner and _started(int(owner[1])) != owner[2]])


def call(*command: str, script: str = "") -> str:
    """Run ``ip`` or ``tc`` with an input for ``-batch -``, and return its output; a LinkError has its error."""
    # a session of its own, so that Ctrl-C does not end a command that removes a namespace
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode != 0:
        raise LinkError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _empty(name: str) -> None:
    """Kill all processes in a namespace, and those that they start meanwhile."""
    deadline = time.monotonic() + 5
    inside = call("ip", "netns", "pids", name).split()
    while inside and time.monotonic() < deadline:
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
        inside = call("ip", "netns", "pids", name).split()


def _names() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []


def _started(pid: int) -> str:
    """Return the time at which a process started, in ticks since the machine did; empty if it does not run."""
    try:
        # behind the name in parentheses, which may have spaces; 22nd field of man 5 proc_pid_stat
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
