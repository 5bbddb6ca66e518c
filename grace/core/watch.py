"""The watch, a watchdog without heartbeats: a connection of every rank to rank 0, beside the engine, by which ranks
learn which rank is a straggler, hangs or is dead, and at which line.

An engine tells a waiting rank no more than that no data arrives. So every rank keeps one connection to rank 0
(:mod:`grace.core.watch_server`), served by threads that sleep. Over it a rank reports how it ends (normally, or by
which error) and, on request, its position: the exchange that it waits in, or the current line of the program. Before a
collective operation that is no exchange, ranks compare its name over the watch (:func:`check_same_operation`).

Training does not depend on the watch: if it cannot be opened, Grace warns once, and error messages have fewer facts.
"""

import contextlib
import math
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from grace.core import watch_server
from grace.core.at_exit import call_as_child_ends
from grace.core.waits import Wait, current_position, register_training_thread, waits
from grace.core.watch_server import (
    LOST,
    SILENT,
    Line,
    Message,
    Offer,
    Position,
    WatchServer,
    connect,
    local_addresses,
    machine_id,
)
from grace.errors import RankError, in_one_line

WARN_SECONDS = 30.0
"""Length of a wait after which a line on stderr names the ranks that are missing."""
GIVE_UP_SECONDS = 5.0
"""Least time that a wait goes on after a rank has ended, because that rank may have sent its part before."""
GIVE_UP_AT_MOST = 30.0
"""Largest such time. In between it is the time that the wait had already taken when the rank ended."""
NEWS_SECONDS = 1.0
"""Time to wait for the report of how another rank ended, once the engine has failed."""
POLL_SECONDS = 0.5
"""Time between two checks of a wait."""
FOLLOWED = "failed after that"
LEFT = "has left (its program ended, or called grace.shutdown())"
ALL_THERE = "all ranks wait there: the network is slow, or broken"

_current: "Watch | None" = None
_tried = False


class TimeoutCheck:
    """Check of a wait, to be called repeatedly while the wait goes on. It raises an error if the wait has taken too
    long, or if a rank has ended that the wait needs.

    Args:
        backend: the backend that the wait is for.
        began: the time (``time.monotonic()``) at which the wait began; now, if left out.
    """

    def __init__(self, backend: Any, began: float | None = None):
        self.backend = backend
        self.began = time.monotonic() if began is None else began
        # A short timeout must not be exceeded by a whole poll.
        self.interval = min(POLL_SECONDS, backend.timeout / 4)
        self.next = self.began + self.interval

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + self.interval
        if now - self.began > self.backend.timeout:
            raise TimeoutError(timeout_message(self.backend.timeout))
        if _current is not None:
            _current.give_up_if_ended(self.began, self.backend.members)


class Watch:
    """One rank's end of the watch.

    Args:
        rank: the number of this rank.
        line: the connection to the server.
        server: the server, on rank 0; else None.
    """

    def __init__(self, rank: int, line: Line, server: WatchServer | None):
        self.rank = rank
        self.line = line
        self.server = server
        self.ended: dict[int, tuple[str, float]] = {}
        """Descriptions of how ranks ended, and the times at which the reports arrived, in the order of reports."""
        self.news = threading.Condition()
        """Condition that is notified of every message, and that guards the attributes below."""
        self.answers: dict[int, list[Position]] = {}
        """Positions of all ranks, by the number of the request."""
        self.asked = 0
        """Number of requests for positions."""
        self.meetings = 0
        """Number of operations that this rank has reported for comparison."""
        self.met = 0
        """Number of operations that were compared on all ranks."""
        self.said: list[tuple[str, list[int]]] | None = None
        """Names of the last compared operations with their ranks, if they differ; else None."""
        self.closing = False
        self.disconnected = threading.Event()
        threading.Thread(target=self._listen, name="grace watch", daemon=True).start()

    # -- messages that arrive --------------------------------------------------------------------------

    def _listen(self) -> None:
        alive = True
        ready = selectors.DefaultSelector()
        ready.register(self.line.socket, selectors.EVENT_READ)
        while not self.closing:
            tick = min(1.0, WARN_SECONDS / 4)
            if not alive:
                # Without rank 0 no news comes, but long waits are still noticed.
                self.disconnected.wait(tick)
            elif ready.select(tick):
                messages = self.line.receive()
                alive = messages is not None
                for message in [{"ended": 0, "how": LOST}] if messages is None else messages:
                    with contextlib.suppress(Exception):  # a message of another version of Grace is skipped
                        self._handle_message(message)
            self._check_waits()
        self.line.close()

    def _check_waits(self) -> None:
        """Warn of waits that take long, and end those that take too long.

        A function of its own: a local variable of the loop above would keep the last wait's exchange alive."""
        # A copy: other threads begin and end waits meanwhile.
        for wait in list(waits.values()):
            seconds = time.monotonic() - wait.began
            if not wait.warned and seconds > WARN_SECONDS:
                # In a thread, because locate_ranks() waits for an answer that the listening thread receives.
                wait.warned = True
                threading.Thread(target=self._warn, args=(wait,), daemon=True).start()
            if seconds > wait.timeout:
                wait.timeout = math.inf  # it is given up once
                threading.Thread(target=self._give_up, args=(wait,), daemon=True).start()

    def _handle_message(self, message: Message) -> None:
        if "where" in message:
            places, line = current_position()
            # Cut, because the server closes connections that send longer lines.
            self.line.send(answer=message["where"], places=[place[:1000] for place in places], line=line[:200])
            return
        with self.news:
            if "ended" in message:
                # The first report counts: the connection of a rank that failed is lost a moment later.
                self.ended.setdefault(int(message["ended"]), (str(message["how"]), time.monotonic()))
            elif "met" in message:
                self.met, self.said = int(message["met"]), message["said"]
            elif "places" in message:
                self.answers[int(message["answer"])] = message["places"]
            self.news.notify_all()

    def _warn(self, wait: Wait) -> None:
        place, seconds = wait.place(), time.monotonic() - wait.began
        absent, there = self.locate_ranks(place)
        # The wait may have ended meanwhile; of the ranks that wait in one operation the lowest prints the warning.
        if wait in waits.values() and self.rank == min([*there, self.rank]):
            missing = "; ".join(absent) or ALL_THERE
            self.print_message(f"rank {self.rank} has waited {seconds:.0f} s in {place}; {missing}")

    def _give_up(self, wait: Wait) -> None:
        place, seconds = wait.place(), time.monotonic() - wait.began
        absent, _ = self.locate_ranks(place)
        if wait in waits.values():
            missing = "; ".join(absent) or ALL_THERE
            self.print_message(f"rank {self.rank} gives up {place} after {seconds:.0f} s; {missing}")
            wait.give_up()

    def print_message(self, text: str) -> None:
        """Print a message on stderr."""
        with contextlib.suppress(OSError, ValueError):
            # This runs in threads and hooks, also when the program has closed stderr.
            print(f"grace: {text}", file=sys.stderr, flush=True)

    # -- requests and reports --------------------------------------------------------------------------

    def locate_ranks(self, place: str) -> tuple[list[str], list[int]]:
        """Return descriptions of the ranks that have ended or are in another operation than ``place`` describes, and
        the ranks that are in this one."""
        with self.news:
            self.asked += 1
            number = self.asked
            self.line.send(ask=number)
            # The server answers after ANSWER_SECONDS even if ranks do not, and a poll under way may delay it as long.
            self.news.wait_for(lambda: number in self.answers or self.closing, 2 * watch_server.ANSWER_SECONDS)
            # No answer at all: then rank 0 is silent, unless its end is among those that are known.
            answers = self.answers.pop(number, [([], SILENT, [0])] if 0 not in self.ended else [])
        absent = [f"rank {rank} {how}" for rank, (how, _) in list(self.ended.items())]
        there = []
        for places, line, ranks in answers:
            where = f" ({line})" if line else ""
            if place in places:
                there += ranks
            elif line == SILENT:
                absent.append(f"{_ranks(ranks)} {SILENT if len(ranks) == 1 else SILENT.replace('does', 'do', 1)}")
            elif places:
                absent.append(f"{_ranks(ranks)} {_are(ranks)} in {places[0]}{where}")
            else:
                absent.append(f"{_ranks(ranks)} {_are(ranks)} at {line or 'a line of no script'}, in no exchange")
        return absent, there

    def give_up_if_ended(self, began: float, members: Sequence[int] | None) -> None:
        """Raise if no data arrived for some seconds after the end of a rank that a wait needs.

        The ended rank may have sent its part before. Then the wait ends within seconds, unless another rank is late.

        Raises:
            ConnectionError: no data arrived for some seconds after a rank ended.
        """
        ended = {r: told for r, told in list(self.ended.items()) if members is None or r in members}
        if not ended:
            return
        heard = max(when for _, when in ended.values())  # the last report
        seconds = time.monotonic() - max(heard, began)
        if seconds < max(GIVE_UP_SECONDS, min(heard - began, GIVE_UP_AT_MOST)):
            return
        # Ranks that left normally may all have done their part: go on as long as a rank that lives is elsewhere, since
        # that rank is late. Without rank 0 no position can be asked for.
        if all(how == LEFT for how, _ in ended.values()) and 0 not in ended:
            wait = waits.get(threading.get_ident())
            absent = [] if wait is None else self.locate_ranks(wait.place())[0]
            if wait is None or len(absent) > len(self.ended):
                return
        raise ConnectionError(f"nothing has come for {seconds:.0f} s, and {self.describe_ends(ended)}")

    def describe_ends(self, ended: dict[int, tuple[str, float]] | None = None) -> str:
        """Return a description of how ranks ended, without those that failed because another one had."""
        said = [f"rank {rank} {how}" for rank, (how, _) in list((ended or self.ended).items()) if FOLLOWED not in how]
        return "; ".join([*said[:2], *([f"{len(said) - 2} more have ended"] if len(said) > 2 else [])])

    def wait_for_end_report(self) -> None:
        """Wait for the report of how a rank ended. Called when the engine fails."""
        with self.news:
            self.news.wait_for(lambda: self.ended or self.closing, NEWS_SECONDS)

    def report_end(self, how: str) -> None:
        """Report how this rank ends, and wait until the server has passed it on, so that ranks know it before their
        engines fail."""
        with self.news:
            if self.rank not in self.ended:
                self.line.send(end=how)
                # Without rank 0 nobody passes the report on.
                self.news.wait_for(lambda: self.rank in self.ended or 0 in self.ended or self.closing, NEWS_SECONDS)

    def report_failure(self, kind: type[BaseException], value: object) -> None:
        """Report an uncaught error, which ends this rank, and print which rank failed first."""
        # Engines raise errors of these classes when another rank has ended.
        follows = issubclass(kind, RuntimeError) or kind.__module__.startswith("tensorflow")
        if follows:
            self.wait_for_end_report()
        text = in_one_line(f"{kind.__name__}: {value}").removesuffix(":")  # of an error without a message
        failed = {rank: how for rank, (how, _) in list(self.ended.items()) if how != LEFT}
        # Reports stand in the order in which they came.
        first = next(iter(failed), self.rank)
        left = [rank for rank, (how, _) in list(self.ended.items()) if how == LEFT]
        self.report_end(f"{FOLLOWED if follows and self.ended else 'failed'}: {text}")
        if follows and left and not failed:
            self.print_message(f"rank {self.rank} failed after rank {left[0]} {LEFT}")
            return
        how = text if first == self.rank else failed[first].removeprefix(f"{FOLLOWED}: ").removeprefix("failed: ")
        self.print_message(f"rank {first} failed first: {f'it {LOST}' if how == LOST else how}")

    def close(self) -> None:
        """Report that this rank leaves, and disconnect."""
        self.report_end(LEFT)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection, and the server on rank 0, without a report."""
        self.closing = True
        self.disconnected.set()
        with contextlib.suppress(OSError):
            self.line.socket.shutdown(socket.SHUT_RDWR)
        if self.server is not None:
            self.server.close()

    def close_after_fork(self) -> None:
        """Close the sockets in a forked child, which is no rank."""
        self.closing = True
        self.line.close()
        if self.server is not None:
            self.server.close_sockets()


def _ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text for messages.

    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


# -- functions for other modules ---------------------------------------------------------------------------------------


def check_same_operation(backend: Any, kind: str, name: str) -> None:
    """Wait until all ranks are about to start an operation, and check that it is the same on all of them.

    Args:
        kind: the engine's operation, which is compared.
        name: the function that the program called, for messages.

    Raises:
        RankError: ranks are about to start different operations.
    """
    watch = _open_once(backend)
    # The server compares once all ranks of the run have reported, and here only some of them come.
    if watch is None or backend.members is not None:
        return
    register_training_thread()
    check = TimeoutCheck(backend)
    with watch.news:
        watch.meetings += 1
        number = watch.meetings
        watch.line.send(meet=number, kind=kind, name=name)
    while watch.met < number:
        with watch.news:
            watch.news.wait_for(lambda: watch.met >= number, check.interval)
        # Without the lock: it may ask for positions, and wait for the answer.
        check()
    if watch.said:
        told = "; ".join(f"{_ranks(ranks)} {_are(ranks)} in {name}" for name, ranks in watch.said)
        raise RankError(f"the ranks do different things: {told}. All of them must call the same, with the same")


def timed_out(error: BaseException) -> bool:
    """Return True if an error says that a wait took too long, whether Grace or the engine raised it."""
    # Engines raise errors of other classes, and say it in their text.
    return isinstance(error, TimeoutError) or re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def timeout_message(seconds: float) -> str:
    """Return the message for a wait that took too long."""
    return f"no answer from the other ranks within {seconds:g} s"


def explain(place: str, error: BaseException) -> str:
    """Return the reason why the engine failed during the operation that ``place`` describes, as far as the other ranks'
    reports tell it."""
    if _current is None:
        return "other ranks did not come in time" if timed_out(error) else "another rank probably ended"
    if not timed_out(error):
        _current.wait_for_end_report()
        if _current.ended:
            return _current.describe_ends()
    absent, _ = _current.locate_ranks(place)
    if timed_out(error):
        return "; ".join(absent) or ALL_THERE
    return _current.describe_ends() or "; ".join(["no rank has said that it ended", *absent])


def leave() -> None:
    """Report that this rank leaves, and close the watch."""
    global _current, _tried
    watch, _current, _tried = _current, None, False
    if watch is not None:
        watch.close()


def _open_once(backend: Any) -> Watch | None:
    """Return the run's watch; None if there is none. All ranks open it together, at their first operation with it."""
    global _current, _tried
    if not _tried and backend.watched:
        _tried = True
        _current = _open(backend)
        _install_excepthook()
    return _current


def _open(backend: Any) -> Watch | None:
    """Open the watch on all ranks; return None if a rank cannot, on all of them."""
    # Every rank runs the same three all-gathers, whatever fails on it, so that no rank waits in vain.
    hosts = backend.allgather_pickled((machine_id(), backend.timeout))
    backend.timeout = min(timeout for _, timeout in hosts)  # else ranks would give up at different times
    alone = len({host for host, _ in hosts}) == 1
    server, watch, error = None, None, ""
    offer: Offer | None = None
    if backend.rank == 0:
        with contextlib.suppress(OSError):
            token = secrets.token_hex(16)
            server = WatchServer(backend.size, alone, token)
            offer = (["127.0.0.1"] if alone else local_addresses(), server.port, token)
    offer = backend.allgather_pickled(offer)[0]
    try:
        line = connect(offer, backend.rank)
        watch = Watch(backend.rank, line, server)
    except OSError as raised:
        error = f"rank {backend.rank} does not reach rank 0: {raised}"
    errors = [text for text in backend.allgather_pickled(error) if text]
    if not errors:
        return watch
    if watch is not None:
        watch.disconnect()
    elif server is not None:
        server.close()
    if backend.rank == 0:
        print(
            f"grace: ranks cannot tell each other where they wait and how they end ({errors[0]}); all else works",
            file=sys.stderr,
        )
    return None


def _install_excepthook() -> None:
    """Report uncaught errors to the other ranks, before the program's own hook shows them."""
    call_as_child_ends(_report_error_of_child, priority=1)  # before the functions that leave the run
    before = sys.excepthook
    # The hook stays when a run ends: a second one would report every error twice.
    if getattr(before, "tells", False):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if _current is not None:
            _current.report_failure(kind, value)
        before(kind, value, trace)

    hook.tells = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _report_error_of_child() -> None:
    """Report the error that ends a process of multiprocessing, which calls no excepthook."""
    error = sys.exc_info()[1]
    # torch.multiprocessing keeps the error for the parent process, and exits while it handles it.
    while isinstance(error, SystemExit) and error.code:
        error = error.__context__
    if isinstance(error, Exception) and _current is not None:
        _current.report_failure(type(error), error)


def _close_after_fork() -> None:
    """Drop the parent's watch in a forked child."""
    global _current
    if _current is not None:
        _current.close_after_fork()
    _current = None


os.register_at_fork(after_in_child=_close_after_fork)
