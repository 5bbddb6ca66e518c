"""Limits of the time that a test waits for what must come."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANGS = 900.0
"""Seconds after which something that has not come is taken to hang. No test is expected to come near it, on however
busy a machine: it ends waiting, and decides nothing. It lies below pytest's own limit for a test."""


def until(told: Callable[[], Any], process: subprocess.Popen | None = None) -> Any:
    """Wait for what ``told`` answers to be true, and return it; ``process`` must not end meanwhile."""
    ends = time.monotonic() + HANGS
    while not (found := told()):
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < ends, "it hangs"
        time.sleep(0.02)
    return found


def gone(*pids: int | str) -> bool:
    """Return True if none of some processes is there."""
    return not any(Path("/proc", str(pid)).exists() for pid in pids)
