"""The watch: what ranks tell each other beside the engine, of where they wait and how they end.

An engine tells a rank that waits at most that nothing comes. So every rank keeps one connection to rank 0
(:mod:`grace.core.watch_server`), served by threads that sleep. Over it a rank tells how it ends (normally, or by which
error) and, if asked, where it is: in which exchange, or at which line of the program. And before something that all
ranks do together, other than exchanges, they compare what it is (:func:`meet`).

Nothing depends on it: where it cannot be opened Grace says so once, and its messages say less.
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
from typing import Any

from grace.core import watch_server
from grace.core.waits import Wait, here, program_is_here, waits
from grace.core.watch_server import LOST, SILENT, Line, WatchServer, addresses, connected, machine
from grace.errors import RankError

WARN_SECONDS = 30.0
"""After so long a wait, one line says which ranks have not come."""
GIVE_UP_SECONDS, GIVE_UP_AT_MOST = 5.0, 30.0
"""How long a wait goes on after a rank has left that may have done its part before; at most, where others took long."""
NEWS_SECONDS = 1.0
"""How long to listen for how another rank ended, when the engine says that one did."""
LOOK_SECONDS = 0.5
FOLLOWED = "failed after that"
LEFT = "has left (its program ended, or called grace.shutdown())"
ALL_THERE = "all ranks wait there: the network is slow, or broken"

_current: "Watch | None" = None
_tried = False


class Patience:
    """Call it again and again while a wait goes on: it raises when that has taken too long, or is in vain.

    Args:
        backend: that the wait is for.
        began: the time (``time.monotonic()``) when it began; now, if left out.
    """

    def __init__(self, backend: Any, began: float | None = None):
        self.backend = backend
        self.began = time.monotonic() if began is None else began
        self.look = min(LOOK_SECONDS, backend.timeout / 4)
        self.next = self.began + self.look

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + self.look
        if now - self.began > self.backend.timeout:
            raise TimeoutError(no_answer(self.backend.timeout))
        if _current is not None:
            _current.check(self.began, self.backend.members)


class Watch:
    """One rank's end of it.

    Args:
        rank: this one.
        line: to the server.
        server: on rank 0.
    """

    def __init__(self, rank: int, line: Line, server: WatchServer | None):
        self.rank, self.line, self.server = rank, line, server
        self.ended: dict[int, tuple[str, float]] = {}
        """How ranks ended, and when that was heard, in this order."""
        self.news = threading.Condition()
        self.answers: dict[int, Any] = {}
        self.asked = self.meetings = self.met = 0
        self.said: Any = None
        self.closing, self.hung_up = False, threading.Event()
        threading.Thread(target=self._listen, name="grace watch", daemon=True).start()

    # -- what comes ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        alive, ready = True, selectors.DefaultSelector()
        ready.register(self.line.socket, selectors.EVENT_READ)
        while not self.closing:
            tick = min(1.0, WARN_SECONDS / 4)
            if not alive:
                self.hung_up.wait(tick)
            elif ready.select(tick):
                messages = self.line.receive()
                alive = messages is not None
                for message in [{"ended": 0, "how": LOST}] if messages is None else messages:
                    with contextlib.suppress(Exception):  # of another Grace: passed over
                        self._hear(message)
            for wait in list(waits.values()):
                seconds = time.monotonic() - wait.began
                if not wait.warned and seconds > WARN_SECONDS:
                    wait.warned = True
                    threading.Thread(target=self._warn, args=(wait,), daemon=True).start()
                if seconds > wait.timeout:
                    wait.timeout = math.inf
                    threading.Thread(target=self._give_up, args=(wait,), daemon=True).start()
        self.line.close()

    def _hear(self, message: dict[str, Any]) -> None:
        if "where" in message:
            places, line = here()
            self.line.send(answer=message["where"], places=[place[:1000] for place in places], line=line[:200])
            return
        with self.news:
            if "ended" in message:
                self.ended.setdefault(int(message["ended"]), (str(message["how"]), time.monotonic()))
            elif "met" in message:
                self.met, self.said = int(message["met"]), message["said"]
            elif "places" in message:
                self.answers[int(message["answer"])] = message["places"]
            self.news.notify_all()

    def _warn(self, wait: Wait) -> None:
        place, seconds = wait.place(), time.monotonic() - wait.began
        absent, there = self.elsewhere(place)
        if wait in waits.values() and self.rank == min([*there, self.rank]):  # else it is over, or another rank says it
            self.say(f"rank {self.rank} has waited {seconds:.0f} s in {place}; {'; '.join(absent) or ALL_THERE}")

    def _give_up(self, wait: Wait) -> None:
        place, seconds = wait.place(), time.monotonic() - wait.began
        absent, _ = self.elsewhere(place)
        if wait in waits.values():
            self.say(f"rank {self.rank} gives up {place} after {seconds:.0f} s; {'; '.join(absent) or ALL_THERE}")
            wait.give_up()

    def say(self, text: str) -> None:
        """Tell the user."""
        with contextlib.suppress(OSError, ValueError):
            print(f"grace: {text}", file=sys.stderr, flush=True)

    # -- what is asked and told ------------------------------------------------------------------------

    def elsewhere(self, place: str) -> tuple[list[str], list[int]]:
        """In words, the ranks that have ended or are not in this place, and where they are; and those that are."""
        with self.news:
            self.asked += 1
            number = self.asked
            self.line.send(ask=number)
            self.news.wait_for(lambda: number in self.answers or self.closing, 2 * watch_server.ANSWER_SECONDS)
            answers = self.answers.pop(number, [[[], SILENT, [0]]] if 0 not in self.ended else [])
        absent, there = [f"rank {rank} {how}" for rank, (how, _) in list(self.ended.items())], []
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

    def check(self, began: float, members: Sequence[int] | None) -> None:
        """Give up a wait in which nothing comes any more, since a rank has ended.

        That may have done its part: then what remains is a matter of seconds, unless another is on its way still.

        Raises:
            ConnectionError: nothing comes any more.
        """
        ended = {r: told for r, told in list(self.ended.items()) if members is None or r in members}
        if not ended:
            return
        heard = max(when for _, when in ended.values())
        seconds = time.monotonic() - max(heard, began)
        if seconds < max(GIVE_UP_SECONDS, min(heard - began, GIVE_UP_AT_MOST)):
            return
        if all(how == LEFT for how, _ in ended.values()) and 0 not in ended:
            wait = waits.get(threading.get_ident())
            absent = [] if wait is None else self.elsewhere(wait.place())[0]
            if wait is None or len(absent) > len(self.ended):
                return
        raise ConnectionError(f"nothing has come for {seconds:.0f} s, and {self.ends(ended)}")

    def ends(self, ended: dict[int, tuple[str, float]] | None = None) -> str:
        """How ranks ended, in words."""
        said = [f"rank {rank} {how}" for rank, (how, _) in list((ended or self.ended).items()) if FOLLOWED not in how]
        return "; ".join([*said[:2], *([f"{len(said) - 2} more have ended"] if len(said) > 2 else [])])

    def hear_of_an_end(self) -> None:
        """The engine says that a rank has ended: listen for how."""
        with self.news:
            self.news.wait_for(lambda: self.ended or self.closing, NEWS_SECONDS)

    def tell_end(self, how: str) -> None:
        """Tell all how this rank ends, and see to it that they have heard before their engines do."""
        with self.news:
            if self.rank not in self.ended:
                self.line.send(end=how)
                self.news.wait_for(lambda: self.rank in self.ended or 0 in self.ended or self.closing, NEWS_SECONDS)

    def fail(self, kind: type, value: Any) -> None:
        """An error that nobody catches ends this rank: tell the others, and the user which rank was first."""
        follows = issubclass(kind, RuntimeError) or kind.__module__.startswith("tensorflow")
        if follows:  # perhaps, from how another rank ended
            self.hear_of_an_end()
        text = " ".join(f"{kind.__name__}: {value}".split())[:500]
        failed = {rank: how for rank, (how, _) in list(self.ended.items()) if how != LEFT}
        first, left = (
            next(iter(failed), self.rank),
            [rank for rank, (how, _) in list(self.ended.items()) if how == LEFT],
        )
        self.tell_end(f"{FOLLOWED if follows and self.ended else 'failed'}: {text}")
        if follows and left and not failed:
            self.say(f"rank {self.rank} failed after rank {left[0]} {LEFT}")
            return
        how = text if first == self.rank else failed[first].removeprefix(f"{FOLLOWED}: ").removeprefix("failed: ")
        self.say(f"rank {first} failed first: {f'it {LOST}' if how == LOST else how}")

    def close(self) -> None:
        """Leave."""
        self.tell_end(LEFT)
        self.hang_up()

    def hang_up(self) -> None:
        """End it without a word."""
        self.closing = True
        self.hung_up.set()
        with contextlib.suppress(OSError):
            self.line.socket.shutdown(socket.SHUT_RDWR)
        if self.server is not None:
            self.server.close()

    def forget(self) -> None:
        """In a child made by fork, which is no rank."""
        self.closing = True
        self.line.close()
        if self.server is not None:
            self.server.forget()


def _ranks(ranks: Sequence[int]) -> str:
    """For people.

    >>> _ranks([3]), _ranks([0, 2])
    ('rank 3', 'ranks 0, 2')
    """
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


# -- for the rest of Grace ---------------------------------------------------------------------------------------------


def meet(backend: Any, kind: str, name: str) -> None:
    """Before all ranks do something together: come together, and see that it is the same.

    Args:
        kind: what the engine is about to do.
        name: what the program called, for people.

    Raises:
        RankError: ranks are about to do different things.
    """
    watch = _opened(backend)
    if watch is None or backend.members is not None:
        return
    program_is_here()
    patience = Patience(backend)
    with watch.news:
        watch.meetings += 1
        number = watch.meetings
        watch.line.send(meet=number, kind=kind, name=name)
    while watch.met < number:
        with watch.news:
            watch.news.wait_for(lambda: watch.met >= number, patience.look)
        patience()
    if watch.said:
        told = "; ".join(f"{_ranks(ranks)} {_are(ranks)} in {name}" for name, ranks in watch.said)
        raise RankError(f"the ranks do different things: {told}. All of them must call the same, with the same")


def timed_out(error: BaseException) -> bool:
    """True of a wait that took too long, whether this was noticed by Grace's clock or by the engine's."""
    return isinstance(error, TimeoutError) or re.search("timed out|timeout", str(error), re.IGNORECASE) is not None


def no_answer(seconds: float) -> str:
    """The words for that, whoever noticed."""
    return f"no answer from the other ranks within {seconds:g} s"


def explain(place: str, error: BaseException) -> str:
    """Why the engine failed while this rank was in this place, as far as other ranks have told."""
    if _current is None:
        return "other ranks did not come in time" if timed_out(error) else "another rank probably ended"
    if not timed_out(error):
        _current.hear_of_an_end()
        if _current.ended:
            return _current.ends()
    absent, _ = _current.elsewhere(place)
    if timed_out(error):
        return "; ".join(absent) or ALL_THERE
    return _current.ends() or "; ".join(["no rank has said that it ended", *absent])


def leave() -> None:
    """This rank takes part in nothing any more."""
    global _current, _tried
    watch, _current, _tried = _current, None, False
    if watch is not None:
        watch.close()


def _opened(backend: Any) -> Watch | None:
    """The run's watch; all ranks open it when they first do something together."""
    global _current, _tried
    if not _tried and backend.watched:
        _tried = True
        _current = _open(backend)
        _tell_uncaught_errors()
    return _current


def _open(backend: Any) -> Watch | None:
    told = backend.all_objects((machine(), backend.timeout))
    backend.timeout = min(timeout for _, timeout in told)
    alone = len({place for place, _ in told}) == 1
    server, offer, watch, error = None, None, None, ""
    if backend.rank == 0:
        with contextlib.suppress(OSError):
            token = secrets.token_hex(16)
            server = WatchServer(backend.size, alone, token)
            offer = (["127.0.0.1"] if alone else addresses(), server.port, token)
    offer = backend.all_objects(offer)[0]
    try:
        line = connected(offer, backend.rank)
        watch = Watch(backend.rank, line, server)
    except OSError as raised:
        error = f"rank {backend.rank} does not reach rank 0: {raised}"
    errors = [told for told in backend.all_objects(error) if told]
    if not errors:
        return watch
    if watch is not None:
        watch.hang_up()
    elif server is not None:
        server.close()
    if backend.rank == 0:
        print(
            f"grace: ranks cannot tell each other where they wait and how they end ({errors[0]}); all else works",
            file=sys.stderr,
        )
    return None


def _tell_uncaught_errors() -> None:
    before = sys.excepthook
    if getattr(before, "tells", False):
        return

    def hook(kind: Any, value: Any, trace: Any) -> None:
        if _current is not None:
            _current.fail(kind, value)
        before(kind, value, trace)

    hook.tells = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _forget() -> None:
    global _current
    if _current is not None:
        _current.forget()
    _current = None


os.register_at_fork(after_in_child=_forget)
