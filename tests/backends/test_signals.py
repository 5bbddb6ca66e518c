"""SIGTERM over Horovod and MPI: of the launcher, of the program, and of processes that the program forks."""

import multiprocessing
import signal
import subprocess
import sys
import time

import pytest

import grace
from tests.support.drawing import THOROUGH
from tests.support.limits import HANGS
from tests.support.pools import launched
from tests.support.training import distributed, loss_of, net

pytestmark = pytest.mark.ranks
BEGIN = """
import array, fcntl, multiprocessing, os, signal, sys, termios
from concurrent.futures import ProcessPoolExecutor
from grace.backends import signals
from grace.core.backend import LocalBackend

def taken():
    # the thread that listens has heard of all signals so far
    left = array.array("i", [1])
    while left[0]:
        fcntl.ioctl(pipe, termios.FIONREAD, left)


rank = LocalBackend().copy_with(size=2)
{before}
signals.raise_on_sigterm(rank)
signals.WAKE_SECONDS = 0
signal.set_wakeup_fd(pipe := signal.set_wakeup_fd(-1))
{then}
print("to the end")
"""


def ended(then, before=""):
    """Run a program of one rank, and return its exit code and what it prints."""
    program = BEGIN.format(then=then, before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS)
    return done.returncode, done.stdout.strip(), done.stderr


FORKED = {
    "before it ran": "child = multiprocessing.Process(target=signal.pause); child.start(); child.terminate()",
    "a pool": """
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
    child = pool._pool[0]
""",
    "an executor's": """
pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
assert list(pool.map(abs, [-1])) == [1]
(child,) = pool._processes.values()
child.terminate()
pool.shutdown()
""",
    "with asyncio's pipe": """
import asyncio
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    child = multiprocessing.Process(target=signal.pause)
    child.start(), child.terminate()
    return child
child = asyncio.run(main())
""",
}


@pytest.mark.parametrize("child", FORKED.values(), ids=FORKED)
def test_a_child_made_by_fork_is_ended_by_its_signal_alone(child):
    then = f"multiprocessing.set_start_method('fork')\nfor _ in range(5):\n  exec({child!r})\n  child.join()\n  "
    then += "assert child.exitcode in (-signal.SIGTERM, 0), child.exitcode\n  taken()"
    assert ended(then) == (0, "to the end", "")


def test_a_child_made_by_fork_keeps_the_programs_own_handler_and_pipe():
    then = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of every fork beside a thread
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
here, there = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(there)
dropped = "asyncio" in sys.modules and sys.version_info >= (3, 12)  # by asyncio, in every child
if (child := os.fork()) == 0:
    assert signal.set_wakeup_fd(-1) == (-1 if dropped else there)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""
    assert ended(then) == (0, "to the end", "")


OWN = "said = []; signal.signal(signal.SIGTERM, lambda *_: said.append('asked'))"
KILL = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ("", f"{OWN}; {KILL}; taken(); assert said == ['asked']"),
        (OWN, f"assert pipe == -1; {KILL}; assert said == ['asked']"),
        ("", f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {KILL}; taken()"),
        (
            "",
            f"""
import asyncio
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    {KILL}
    await asked.wait()
asyncio.run(main())
""",
        ),
    ],
    ids=["set later", "set before", "ignored", "asyncio's"],
)
def test_a_program_with_a_handler_of_its_own_ends_when_it_wants_to(before, then):
    assert ended(then, before) == (0, "to the end", "")


def test_without_one_the_signal_is_an_error_of_the_program_or_ends_what_does_not_listen():
    code, said, printed = ended(f"signals.WAKE_SECONDS = {HANGS}; {KILL}")
    assert (code, said) == (1, "")
    said = "the launcher ended rank 0 of 2 (SIGTERM)\n"
    # The thread that listens says it at any time, in the middle of the error's lines, too.
    assert "grace.errors.RankError" in printed.replace(said, "", 1)
    assert said in printed
    code, said, printed = ended(BUSY)
    assert (code, said) == (128 + signal.SIGTERM, "")
    assert printed == "the launcher ended rank 0 of 2 (SIGTERM)\n"


BUSY = "import ctypes; ctypes.CDLL(None).system(b'kill -TERM $PPID; exec sleep 60 >/dev/null 2>&1')"
"""A main thread that is not back in Python for long, whatever signals come."""


def with_children():
    """Bits of weights after steps before and after children were made and ended; and those of a run without them."""
    bits = []
    for children in (True, False):
        model = net()
        optimizer = distributed(model, "topk(ratio=0.1)")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if children:
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    assert pool.map(abs, [-step]) == [step]
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
                child.start()
                child.terminate()
                child.join()
                assert child.exitcode == -signal.SIGTERM
        bits.append([p.tolist() for p in model.parameters()])
    return bits[0] == bits[1], grace.rank()


@pytest.mark.parametrize("engine", ["mpirun-mpi", *(["horovodrun-gloo"] if THOROUGH else [])])
def test_ranks_train_on_beside_pools_and_processes_that_they_end(engine):
    for _ in range(2):  # the second time those that a signal would have ended by now
        for rank, (same, number) in enumerate(launched(engine, 2).run(with_children)):
            assert same
            assert number == rank
