"""A pool of rank processes that stays up between tests, so that a test costs milliseconds."""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.limits import HANGS
from tests.support.warm import collect_seldom

MOST_THREADS = 192
"""Largest number of a rank's threads; Gloo has two and more for each process group."""


class RankFailure(AssertionError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """``size`` processes joined by gloo. ``run(function, *args)`` calls a module-level function on every rank
    and returns the list of results; ``rank`` and ``size`` come from ``grace``. A rank that raises, dies or
    outlasts ``timeout`` fails the test, which says where ranks that hang stand, and the processes are replaced.

    Between calls ranks are stopped by a signal: Gloo's threads look all the time whether something has come, Horovod's
    ask each other whether there is work, and MPI waits for answers without sleep.
    """

    def __init__(self, size: int):
        self.size, self.processes, self.pipes = size, [], []
        self.pids: list[int] = []
        self.stacks = ""

    def run(self, function: Callable, *args: Any, timeout: float = HANGS) -> list[Any]:
        """Call ``function(*args)`` on every rank."""
        if not self.processes:
            self._start()
        self._signal(signal.SIGCONT)
        try:
            return self._answers(function, args, timeout)
        finally:
            self._signal(signal.SIGSTOP)

    def crowded(self) -> bool:
        """True if process groups that tests have left behind keep many threads busy, which slow all that follows."""
        tasks = [f"/proc/{pid}/task" for pid in self.pids]
        return any(len(os.listdir(threads)) > MOST_THREADS for threads in tasks if os.path.exists(threads))

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _answers(self, function: Callable, args: tuple[Any, ...], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(pickle.dumps((function, args)))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(timeout):
                    raise EOFError(f"no answer within {timeout} s\n{self._stacks()}")
                answers.append(pickle.loads(pipe.recv()))
            except (EOFError, OSError) as error:
                answers += [pickle.loads(other.recv()) for other in self.pipes[rank + 1 :] if other.poll()]
                failed = "".join(f"\nanother rank failed:\n{value}" for ok, value in answers if not ok)
                self.stop()
                raise RankFailure(f"rank {rank} of {self.size} died or hangs: {error}{failed}") from error
            except BaseException:  # the test's own timeout: nobody is to be given these answers
                self.stop()
                raise
        for rank, (ok, value) in enumerate(answers):
            if not ok:
                self.stop()  # its process group may hold half a collective
                raise RankFailure(f"rank {rank} of {self.size}:\n{value}")
        return [value for _, value in answers]

    def _save_coverage(self) -> None:
        """When `make coverage` runs: those that still answer save what they have run."""
        if "COVERAGE_PROCESS_START" in os.environ:
            for pipe in self.pipes:
                with contextlib.suppress(EOFError, OSError):
                    pipe.send(pickle.dumps((save_coverage, ())))
                    while pipe.poll(5) and pickle.loads(pipe.recv()) != (True, "saved"):
                        pass  # an answer that nobody took

    def _stacks(self) -> str:
        """Return the stacks of all ranks."""
        file = Path(self.stacks)
        for pid in self.pids:
            before = file.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                for _ in range(10):  # all write to one file, one after the other; a busy machine takes its time
                    time.sleep(0.5)
                    if file.stat().st_size > before:
                        break
        return file.read_text()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = tempfile.mktemp(prefix="grace-ranks-")
        self.stacks = f"{store}.stacks"
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.size, store, self.stacks), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)
        self.pids = [pipe.recv() for pipe in self.pipes]  # a process may be the caller of a fork: see warm.py

    def stop(self) -> None:
        """End the processes; the next ``run`` starts new ones."""
        self._signal(signal.SIGCONT)
        self._save_coverage()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pids, self.pipes = [], [], []
        if self.stacks:
            Path(self.stacks).unlink(missing_ok=True)
            self.stacks = ""


def save_coverage() -> str:
    """Write what this rank has run into coverage's file, before it is ended."""
    import coverage

    if (measured := coverage.Coverage.current()) is not None:
        measured.save()
    return "saved"


def tell_stacks(file: str) -> None:
    """Append to a file, when SIGUSR1 comes, where all threads are. To be called before each function: Lightning's
    Trainer puts all signals' handlers back that Python knows of, and it does not know of this one.
    """
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, Path(file).open("a"), all_threads=True)  # noqa: SIM115


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Give a function, in this context, Grace's settings of its own: variables that it sets would hold for the ranks'
    next functions, those of other tests."""
    before = {name: value for name, value in os.environ.items() if name.startswith("GRACE_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("GRACE_")]:
            del os.environ[name]
        os.environ.update(before)


def _serve(pipe: Any, rank: int, size: int, store: str, stacks: str) -> None:
    pipe.send(os.getpid())
    tell_stacks(stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    import grace

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pickle.loads(pipe.recv())
            tell_stacks(stacks)
            collect_seldom()
            try:
                grace.shutdown()
                grace.init("torch")
                with own_settings():
                    answer = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(pickle.dumps(answer))
