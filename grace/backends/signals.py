"""Handling of SIGTERM, by which a launcher ends ranks."""

import os
import signal
import sys
import threading
from types import FrameType

from grace.core.backend import Backend
from grace.errors import RankError

WAKE_SECONDS = 4.0
"""Seconds that the main thread has to return to Python when the launcher ends this rank; horovodrun waits 5 seconds
before it kills, mpirun 1."""


class Sigterm:
    """Handler that turns SIGTERM into an error with the exchange under way, in this process alone.

    Python's handlers wait for the main thread, which may be inside a graph: so a thread learns of signals at once,
    through a pipe. If the program sets a handler later, that takes this one's place, and the thread does nothing. A
    child made by fork has neither: it shares the pipe, so that a signal of its own would end this process.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.message = f"the launcher ended rank {backend.rank} of {backend.size} (SIGTERM)"
        self.raised = threading.Event()
        self.mask = threading.local()
        self.receive, self.send = os.pipe()

    def install(self) -> None:
        """Set the handler and start the thread. A wakeup descriptor that the program has set stays."""
        signal.signal(signal.SIGTERM, self.handle)
        os.set_blocking(self.send, False)  # set_wakeup_fd demands it
        self._exchange_wakeup(-1, self.send)
        os.register_at_fork(before=self.block, after_in_parent=self.unblock, after_in_child=self.uninstall)
        threading.Thread(target=self.listen, daemon=True, name="grace-sigterm").start()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise RankError in the main thread. This is the signal's handler; a second SIGTERM ends the process."""
        self.raised.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise RankError(self.message)

    @property
    def is_installed(self) -> bool:
        """True unless the program has set a handler of its own."""
        return self.raised.is_set() or signal.getsignal(signal.SIGTERM) == self.handle

    def listen(self) -> None:
        """Print at once that this rank is ended, since mpirun kills it a second later; and end it if the main thread
        does not."""
        while os.read(self.receive, 1) != bytes([signal.SIGTERM]) or not self.is_installed:
            pass
        bucket = self.backend.last_started
        last = "" if bucket is None else f"; the last exchange that it began is that of {bucket.describe()}"
        # In one piece: the main thread may print its error meanwhile.
        print(f"{self.message}{last}\n", end="", file=sys.stderr, flush=True)
        if not self.raised.wait(WAKE_SECONDS):
            os._exit(128 + signal.SIGTERM)  # not sys.exit: only this thread would end

    def block(self) -> None:
        """Block SIGTERM before a fork, so that a signal to the child waits until the child has left the pipe."""
        self.mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def unblock(self) -> None:
        """Restore the signal mask after the fork."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask.before)

    def uninstall(self) -> None:
        """Remove the handler in a forked child, which no launcher has started; a handler of the program's stays."""
        if signal.getsignal(signal.SIGTERM) == self.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._exchange_wakeup(self.send, -1)
        self.unblock()

    @staticmethod
    def _exchange_wakeup(old: int, new: int) -> None:
        """Set the descriptor that signals are written to, unless it is another than ``old``."""
        found = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
        if found != old:  # the program's own, which stays
            signal.set_wakeup_fd(found)


def raise_on_sigterm(backend: Backend) -> None:
    """Turn SIGTERM, by which a launcher that lost a rank ends the others, into an error with the exchange under way,
    unless the program has a handler of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and backend.size > 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        Sigterm(backend).install()
