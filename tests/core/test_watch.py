"""Timeouts of ranks, and their messages beside the engine."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import grace
from grace.core import watch, watch_server
from grace.core.waits import Wait
from grace.core.waits import waits as current_waits
from grace.core.watch_server import LOST, Line, WatchServer
from tests.support import warm
from tests.support.limits import HANGS
from tests.support.pools import on_ranks, ranks_of


@pytest.mark.parametrize("timeout", [0, -3, float("nan"), float("inf"), "soon", True, 1e300])
def test_a_timeout_that_is_no_positive_number_is_refused(timeout, monkeypatch):
    grace.shutdown()
    with pytest.raises(grace.ConfigError, match=r"timeout=.*: give a number of seconds above 0"):
        grace.init("local", timeout=timeout)
    monkeypatch.setenv("GRACE_TIMEOUT", str(timeout))
    if timeout is not True:
        with pytest.raises(grace.ConfigError, match=r"GRACE_TIMEOUT=.*: give a number of seconds above 0"):
            grace.init("local")


@on_ranks()
def test_the_timeout_is_the_arguments_or_the_environments_and_channels_have_it():
    """The default, the environment and an argument; of ranks the smallest wins."""
    from grace.backends.torch_distributed import TorchBackend

    found = []
    for text, argument in [("", None), ("90", None), ("90", 40 + 10 * grace.rank())]:
        grace.shutdown()
        os.environ["GRACE_TIMEOUT"] = text
        backend = grace.init("torch", timeout=argument)
        backend.allgather_object("the first question")
        beside = backend.duplicate()
        found.append(
            (backend.timeout, beside.timeout, beside.group._get_backend(beside_device()).options._timeout.seconds)
        )
        assert isinstance(backend, TorchBackend)
    del os.environ["GRACE_TIMEOUT"]
    assert found == [(600, 600, 600), (90, 90, 90), (40, 40, 40)]


def beside_device():
    import torch

    return torch.device("cpu")


def stopped():
    """Rank 1 stops itself; rank 0 asks where it is."""
    backend = grace.init("torch")
    watch_server.ANSWER_SECONDS = 1.0
    pids = backend.allgather_object(os.getpid())
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    while Path(f"/proc/{pids[1]}/stat").read_text().rsplit(") ", 1)[1][0] != "T":
        time.sleep(0.01)
    try:
        absent, there = watch._current.locate_ranks("a place")
        return absent, there
    finally:
        os.kill(pids[1], signal.SIGCONT)


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="how processes are is read from /proc")
def test_a_rank_that_is_stopped_is_said_not_to_answer():
    pool = ranks_of(2)
    (absent, there), _ = pool.run(stopped)
    pool.stop()  # others may answer later
    assert any(re.search(r"\b1 does not answer \(stopped, or its machine hangs\)", said) for said in absent), absent
    assert there == []


class Looked(float):
    """A time that says when somebody has looked at it."""

    def __rsub__(self, other):
        self.seen.set()
        return other - float(self)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError(), ValueError("a mistake")])
def test_an_error_is_reported_by_its_class_and_message_if_it_has_one(error, monkeypatch, capsys):
    monkeypatch.setattr(watch, "NEWS_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = watch.Watch(0, Line(socket.create_connection(server.getsockname())), None)
        here.report_failure(type(error), error)
        here.disconnect()
    said = f"{type(error).__name__}: {error}" if error.args else type(error).__name__
    assert f"rank 0 failed first: {said}\n" in capsys.readouterr().err


def test_a_wait_that_is_over_is_not_kept(monkeypatch):
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.04)  # of which a quarter passes between two looks
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()))
    here = watch.Watch(0, line, None)
    began = Looked(time.monotonic())
    began.seen = threading.Event()
    wait = Wait(lambda: "a place", began=began, warned=True)
    gone = weakref.ref(wait)
    try:
        current_waits["a test"] = wait
        assert began.seen.wait(HANGS)
        del current_waits["a test"], wait
        ends = time.monotonic() + 5
        while gone() is not None and time.monotonic() < ends:
            time.sleep(0.01)
        assert gone() is None
    finally:
        here.disconnect()


def trained(pipe):
    """Exchange with all ranks, then apart, then with all; rank 0 asks in between where the others are."""
    backend, absent = grace.init("torch"), None
    backend.allgather_object("a question")
    if backend.rank == 0:
        with pipe.open("w"):  # which waits until rank 1 reads
            absent, _ = watch._current.locate_ranks("a place")
    else:
        os.read(os.open(pipe, os.O_RDONLY), 1)  # where it is
    backend.allgather_object("another question")
    return absent


def trained_in_a_thread(pipe):
    """Train in a thread, as Ray Train's workers do."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(trained, pipe).result()


@pytest.mark.ranks
def test_where_a_rank_is_that_trains_beside_its_main_thread_is_the_line_that_trains(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    absent, _ = ranks_of(2).run(trained_in_a_thread, tmp_path / "pipe")
    lines = Path(__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if text.endswith("# where it is")]
    assert f"rank 1 is at test_watch.py:{line}, in no exchange" in absent


def test_a_thread_that_has_trained_to_its_end_is_said_to_be_there():
    program = """
import threading
from grace.core import waits as waiting
thread = threading.Thread(target=waiting.register_training_thread)
thread.start(), thread.join()
print(waiting.current_position())
"""
    done = subprocess.run([warm.REAL, "-c", program], capture_output=True, text=True)
    assert done.stdout == "([], 'the end of the thread that trained')\n", done.stderr


@on_ranks()
def test_a_run_that_begins_anew_leaves_no_threads():
    for _ in range(5):
        grace.shutdown()
        grace.init("torch").allgather_object("a question")
    threads = [thread.name for thread in threading.enumerate()]
    assert threads.count("grace watch") <= 2
    assert threads.count("grace watch server") <= 1


def test_a_rank_on_a_busy_machine_has_seconds_to_answer(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(watch_server, "time", clock)
    asked = WatchServer(2, True, "a secret")
    zero, one = [watch_server.connect((["127.0.0.1"], asked.port, "a secret"), rank) for rank in range(2)]
    for seconds, line in ((9.0, "train.py:7"), (11.0, watch_server.SILENT)):
        zero.send(ask=seconds)
        (question,) = zero.receive()
        assert one.receive() == [question]
        zero.send(answer=question["where"], places=[], line="train.py:3")
        while 0 not in asked.answers:  # before time goes on
            time.sleep(0.001)
        clock.now += seconds
        if line != watch_server.SILENT:
            one.send(answer=question["where"], places=[], line=line)
        (answer,) = zero.receive()
        assert answer == {"places": [[[], "train.py:3", [0]], [[], line, [1]]], "answer": seconds}
    asked.close()


def test_the_hub_takes_ranks_of_the_run_only_and_tells_who_was_lost():
    hub = WatchServer(2, True, "a secret")

    def joined(**hello):
        line = Line(socket.create_connection(("127.0.0.1", hub.port)))
        line.send(**hello)
        return line, line.receive()

    assert joined(rank=0, token="guessed")[1] is None
    assert joined(rank=0, token="\ud800")[1] is None
    held = socket.create_connection(("127.0.0.1", hub.port))
    assert joined(rank=7, token="a secret")[1] is None
    assert joined(end="no hello")[1] is None
    raw = socket.create_connection(("127.0.0.1", hub.port))
    raw.sendall(b"\x80\x04no JSON\n")
    assert raw.recv(1) == b""
    zero, welcome = joined(rank=0, token="a secret")
    assert welcome == [{"welcome": 0}]
    assert joined(rank=0, token="a secret")[1] is None  # twice
    one, _ = joined(rank=1, token="a secret")
    assert held.recv(1) == b""  # all have come
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", hub.port))
    one.socket.sendall(json.dumps({"meet": "x"}).encode() + b"\n[1]\n")  # not of this Grace, and no message
    assert zero.receive() == [{"ended": 1, "how": LOST}]
    hub.close()
