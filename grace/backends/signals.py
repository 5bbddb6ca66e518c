"""SIGTERM, by which a launcher ends ranks."""

import os
import signal
import sys
import threading
from typing import Any

from grace.core.backend import Backend
from grace.errors import RankError

WAKE_SECONDS = 4.0
"""Time that the main thread has to come back to Python when the launcher ends this rank; horovodrun waits 5 seconds
before it kills, mpirun 1."""


class Sigterm:
    """Lets SIGTERM be an error that says what was under way, of this process alone.

    Python's handlers wait for the main thread, which may be inside a graph: a thread hears of signals at once, through
    a pipe. A handler that the program sets later takes this one's place, and then the thread has nothing to say. A
    child made by fork has neither: it shares the pipe, so that a signal of its own would end this process.

    Args:
        backend: whose rank this is.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.message = f"the launcher ended rank {backend.rank} of {backend.size} (SIGTERM)"
        self.raised = threading.Event()
        self.mask = threading.local()
        self.receive, self.send = os.pipe()

    def install(self) -> None:
        """Begin to listen. A wakeup descriptor that somebody else has set stays."""
        signal.signal(signal.SIGTERM, self.end)
        os.set_blocking(self.send, False)
        self._exchange_wakeup(-1, self.send)
        os.register_at_fork(before=self.hold, after_in_parent=self.release, after_in_child=self.forget)
        threading.Thread(target=self.listen, daemon=True, name="grace-sigterm").start()

    def end(self, number: int, frame: Any) -> None:
        """The handler, in the main thread."""
        self.raised.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise RankError(self.message)

    @property
    def concerns_us(self) -> bool:
        """True unless the program has set a handler of its own."""
        return self.raised.is_set() or signal.getsignal(signal.SIGTERM) == self.end

    def listen(self) -> None:
        """Say at once that this rank is ended, since mpirun kills it a second later; and end it if nobody else does."""
        while os.read(self.receive, 1) != bytes([signal.SIGTERM]) or not self.concerns_us:
            pass
        bucket = self.backend.began
        last = "" if bucket is None else f"; the last exchange that it began is that of {bucket.describe()}"
        print(f"{self.message}{last}", file=sys.stderr, flush=True)
        if not self.raised.wait(WAKE_SECONDS):
            os._exit(128 + signal.SIGTERM)

    def hold(self) -> None:
        """Before a fork: let a signal to the child wait until it has let go of the pipe."""
        self.mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def release(self) -> None:
        """After it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask.before)

    def forget(self) -> None:
        """Let SIGTERM end a child that no launcher has started, as Python has it, or as the program has."""
        if signal.getsignal(signal.SIGTERM) == self.end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._exchange_wakeup(self.send, -1)
        self.release()

    @staticmethod
    def _exchange_wakeup(old: int, new: int) -> None:
        """Set the descriptor that signals are written to; not if it is another than ``old``."""
        found = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
        if found != old:
            signal.set_wakeup_fd(found)


def raise_on_sigterm(backend: Backend) -> None:
    """Let SIGTERM, by which a launcher that lost a rank ends the others, be an error which says what was under way; not
    where the program has a handler of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and backend.size > 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        Sigterm(backend).install()
