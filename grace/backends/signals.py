"""SIGTERM, by which a launcher ends ranks."""

import os
import signal
import sys
import threading
from typing import Any

from grace.core.backend import Backend
from grace.errors import RankError

WAKE_SECONDS = 1.0
"""How long the main thread may take to come back to Python when the launcher ends this rank."""


def raise_on_sigterm(backend: Backend) -> None:
    """A launcher that lost a rank ends the others by SIGTERM: let that be an error which says what was under way."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or backend.size == 1 or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    message = f"the launcher ended rank {backend.rank} of {backend.size} (SIGTERM)"
    raised = threading.Event()

    def ended(number: int, frame: Any) -> None:
        raised.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise RankError(message)

    def speak(pipe: int) -> None:
        while os.read(pipe, 1) != bytes([signal.SIGTERM]):
            pass
        bucket = backend.began
        last = "" if bucket is None else f"; the last exchange that it began is that of {bucket.describe()}"
        print(f"{message}{last}", file=sys.stderr, flush=True)  # at once: mpirun kills a second later
        if not raised.wait(WAKE_SECONDS):
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)
    # Python's handlers wait for the main thread, which may be inside a graph: this thread hears of signals at once
    receive, send = os.pipe()
    os.set_blocking(send, False)
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)  # somebody else's
        return
    threading.Thread(target=speak, args=(receive,), daemon=True, name="grace-sigterm").start()
