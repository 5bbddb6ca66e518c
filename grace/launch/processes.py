"""Processes that start others: ending all of them, whichever ends first, and however.

This file is also a program, which needs nothing but Python: see :func:`guarded`.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

GRACE_PERIOD = 10
"""Seconds that a launcher gets to end its ranks."""
KILLING = 2
"""Seconds that it takes to kill processes that did not end."""


@contextlib.contextmanager
def _handled(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Return a context in which signals have a handler; not in other threads, where Python sets none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Return a context in which SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that our child processes
    end too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Return a context at whose end signals that end a program have their effect, so that commands that are started in
    it are awaited."""
    came = list[int]()
    try:
        with _handled(lambda number, frame: came.append(number), signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def end(*launchers: subprocess.Popen) -> None:
    """End launchers, which end their ranks; processes that are left of their sessions are killed."""
    for launcher in launchers:  # first all get the signal: then they end at the same time
        if launcher.poll() is None:
            launcher.terminate()
    for launcher in launchers:
        if launcher.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_PERIOD + KILLING)
        with contextlib.suppress(ProcessLookupError):  # all of them were started with start_new_session
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """Kill, at the end, every process that was started meanwhile by us or by those we started.

    Launchers give ranks sessions of their own, and one that is killed leaves them behind. On Linux a process can ask
    to become the parent of its descendants' orphans; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        yield
        return
    adopt = 36  # PR_SET_CHILD_SUBREAPER
    libc = ctypes.CDLL(None)
    libc.prctl(adopt, 1, 0, 0, 0)
    before = _children()
    try:
        yield
    finally:
        while ours := _children() - before:
            for pid in ours:  # the kernel makes their children ours, which the next round kills
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        libc.prctl(adopt, 0, 0, 0, 0)


def guarded(argv: Sequence[str]) -> list[str]:
    """Return the command line that runs another one and ends all processes that it started.

    They are ended when it ends, when it receives SIGTERM, and when its parent is gone, even killed. It must be started
    with ``stdin=subprocess.PIPE``: the parent's end shows as the end of that pipe.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *argv]


def _run_guarded(argv: Sequence[str]) -> int:
    """Run a command, and return its exit code, or a signal's number below zero."""
    child = None
    with no_orphans():
        try:
            with signals_raise():
                child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
                threading.Thread(target=_wait_for_parent, args=(os.getpid(),), daemon=True).start()
                return child.wait()
        except KeyboardInterrupt:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the end
            if child is not None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(GRACE_PERIOD)
            return -signal.SIGKILL


def _wait_for_parent(pid: int) -> None:
    """Wait for the end of stdin, which nobody writes to, and send SIGTERM to this process."""
    while os.read(0, 1):
        pass
    os.kill(pid, signal.SIGTERM)


def _children() -> set[int]:
    """Return the child processes of this process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # behind the name in parentheses, which may have spaces
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


if __name__ == "__main__":
    code = _run_guarded(sys.argv[1:])
    if code < 0:  # end by the same signal as the command
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its core already
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
