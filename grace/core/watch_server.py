"""The watch's server: rank 0 hears how ranks end and where they wait, and hands it on."""

import contextlib
import hmac
import json
import os
import re
import selectors
import socket
import threading
import time
from typing import Any

LONGEST, LONGEST_HELLO, DEEPEST = 1 << 20, 1 << 10, 8
"""Bytes that a line may have, and one of somebody who may be no rank; lists and objects in each other."""
MOST_STRANGERS = 256
"""Connections of those who have not said who they are; of more the oldest is closed."""
ANSWER_SECONDS = 10.0
"""Time that a rank has to say where it is, which a thread of its own does: milliseconds, unless its machine is busy
with other things, or its threads wait for one that keeps Python to itself."""
MERGED_SECONDS = 1.0
"""Questions of ranks that come within that time of another one get its answers."""
CONNECT_SECONDS, WELCOME_SECONDS, SEND_SECONDS = 5.0, 30.0, 5.0
"""Longest waits for an address, for rank 0's answer there, and for room to send."""
LOST = "was lost (killed, or its machine is gone)"
SILENT = "does not answer (stopped, or its machine hangs)"


def parsed(line: bytes) -> dict[str, Any] | None:
    """The message in a line; None if it is none, whatever it is.

    >>> parsed(b'{"rank": 1}'), parsed(b"[" * 100_000), parsed(b"[1]"), parsed(b"\\xff")
    ({'rank': 1}, None, None, None)
    """
    nested = re.sub(rb"[^][{}]+", b"", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", line))
    for _ in range(DEEPEST):
        nested = nested.replace(b"[]", b"").replace(b"{}", b"")
    if nested:
        return None
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Line:
    """A connection over which lines of JSON go both ways; nothing is ever unpickled."""

    def __init__(self, connection: socket.socket):
        self.socket, self.held, self.rank = connection, b"", -1
        self.longest = LONGEST_HELLO
        self.lock = threading.Lock()
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message: Any) -> None:
        """Send a message; to one who has gone, nothing."""
        with contextlib.suppress(OSError), self.lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come, once there is something to read; None at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self.held = (self.held + data).split(b"\n")
        if not data or max(map(len, [*lines, self.held])) > self.longest:
            return None
        messages = [message for line in lines if (message := parsed(line)) is not None]
        return messages if len(messages) == len(lines) else None

    def close(self) -> None:
        """End it."""
        self.socket.close()


class WatchServer:
    """Accepts one connection of each rank, and then no more.

    Args:
        size: how many ranks there are.
        alone: whether they all run on this machine.
        token: what a rank has to say first.
    """

    def __init__(self, size: int, alone: bool, token: str):
        self.size, self.token = size, token
        both = not alone and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        where = ("127.0.0.1" if alone else "", 0)
        self.listener = socket.create_server(where, family=family, backlog=size, dualstack_ipv6=both)
        self.port = self.listener.getsockname()[1]
        self.ranks: dict[int, Line] = {}
        self.strangers: dict[Line, None] = {}
        """Connections over which no rank and token came yet, in their order; none once all ranks have come."""
        self.ended: dict[int, str] = {}
        self.meetings: dict[int, dict[int, tuple[str, str]]] = {}
        self.asking: list[tuple[Line, int]] = []
        self.answers: dict[int, tuple[list[str], str]] = {}
        self.polled, self.polled_at, self.deadline = 0, 0.0, 0.0
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.closing = False
        self.wake, waking = socket.socketpair()
        self.selector.register(waking, selectors.EVENT_READ, lambda: waking.recv(1))
        self.waking = waking
        self.thread = threading.Thread(target=self._run, name="grace watch server", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.closing:
            for key, _ in self.selector.select(0.1 if self.asking else None):
                key.data()
            if self.asking and (time.monotonic() > self.deadline or not self._awaited()):
                self._tell_places()
        self.forget()

    def _accept(self) -> None:
        if len(self.strangers) >= MOST_STRANGERS:
            self._drop(next(iter(self.strangers)))
        with contextlib.suppress(OSError):
            line = Line(self.listener.accept()[0])
            self.strangers[line] = None
            self.selector.register(line.socket, selectors.EVENT_READ, lambda: self._read(line))

    def _read(self, line: Line) -> None:
        """Take what has come. Whatever it is, this thread goes on: from it ranks hear of each other."""
        messages = None if line.rank < 0 and line not in self.strangers else line.receive()
        for message in messages or ():
            if line.rank < 0 and not self._joins(line, message):
                messages = None
                break
            with contextlib.suppress(Exception):  # of another Grace: passed over
                self._handle(line, message)
        if messages is None:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        """Hang up, on one who may have been dropped before."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.socket)
        line.close()
        self.strangers.pop(line, None)
        if line.rank >= 0:
            self._end(line.rank, LOST)

    def _joins(self, line: Line, message: dict[str, Any]) -> bool:
        """Whether this is a rank of the run, which must say so first."""
        rank, token = message.get("rank"), message.get("token")
        if type(rank) is not int or rank in self.ranks or not 0 <= rank < self.size or not isinstance(token, str):
            return False
        if not hmac.compare_digest(token.encode(errors="backslashreplace"), self.token.encode()):
            return False
        line.rank, line.longest, self.ranks[rank] = rank, LONGEST, line
        self.strangers.pop(line, None)
        if len(self.ranks) == self.size:
            self.selector.unregister(self.listener)
            self.listener.close()
            for stranger in list(self.strangers):
                self._drop(stranger)
        line.send(welcome=rank)
        return True

    def _handle(self, line: Line, message: dict[str, Any]) -> None:
        if "end" in message:
            self._end(line.rank, str(message["end"]))
        elif "meet" in message:
            self._meet(int(message["meet"]), line.rank, str(message["kind"]), str(message["name"]))
        elif "ask" in message:
            now = time.monotonic()
            if not self.asking:
                self.polled, self.answers, self.deadline = self.polled + 1, {}, now + ANSWER_SECONDS
            if not self.asking or now - self.polled_at > MERGED_SECONDS:
                self.polled_at = now
                self._all(where=self.polled)
            self.asking.append((line, message["ask"]))
        elif message.get("answer") == self.polled:
            self.answers[line.rank] = ([str(place) for place in message["places"]], str(message["line"]))

    def _all(self, **message: Any) -> None:
        for rank in sorted(self.ranks, reverse=True):  # rank 0 last, which hangs up when it has heard that it ended
            self.ranks[rank].send(**message)

    def _end(self, rank: int, how: str) -> None:
        if rank not in self.ended:
            self.ended[rank] = how
            self._all(ended=rank, how=how)

    def _meet(self, number: int, rank: int, kind: str, name: str) -> None:
        here = self.meetings.setdefault(number, {})
        here[rank] = (kind, name)
        if len(here) == self.size:
            del self.meetings[number]
            kinds: dict[str, list[int]] = {}
            for who, (told, _) in here.items():
                kinds.setdefault(told, []).append(who)
            said = [[here[ranks[0]][1], sorted(ranks)] for ranks in kinds.values()]
            self._all(met=number, said=said if len(kinds) > 1 else None)

    def _awaited(self) -> set[int]:
        return self.ranks.keys() - self.answers.keys() - self.ended.keys()

    def _tell_places(self) -> None:
        """Tell those who asked where everybody is; ranks that are at the same place once."""
        found: dict[str, Any] = {}
        for rank in self.ranks:
            places, line = self.answers.get(rank, ([], SILENT))
            if rank not in self.ended:
                found.setdefault(json.dumps([places, line]), [places, line, []])[2].append(rank)
        asking, self.asking = self.asking, []
        for asker, number in asking:
            asker.send(places=list(found.values()), answer=number)

    def close(self) -> None:
        """Hang up."""
        self.closing = True
        with contextlib.suppress(OSError):  # it may have woken up by itself, and closed this
            self.wake.send(b"!")
        self.thread.join(2)

    def forget(self) -> None:
        """Close what it has open; alone in a child made by fork, which has no part in it."""
        for line in [*self.ranks.values(), *self.strangers]:
            line.close()
        for end in (self.listener, self.wake, self.waking):
            end.close()


def machine() -> str:
    """What two ranks on one machine, which reach each other over loopback, have in common."""
    found = socket.gethostname()
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            found += file.read()
        found += str(os.stat("/proc/self/ns/net").st_ino)
    return found


def addresses() -> list[str]:
    """Where other machines may reach this one."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; tells by which address this machine goes out
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    return [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]


def connected(offer: Any, rank: int) -> Line:
    """A line to the server.

    Raises:
        OSError: it cannot be reached.
    """
    if offer is None:
        raise OSError("it cannot listen")
    hosts, port, token = offer
    for host in ["127.0.0.1", *hosts] if rank == 0 else hosts:
        with contextlib.suppress(OSError):
            line = Line(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
            line.longest = LONGEST
            line.send(rank=rank, token=token)
            line.socket.settimeout(WELCOME_SECONDS)
            welcome = line.receive()
            line.socket.settimeout(SEND_SECONDS)
            if welcome == [{"welcome": rank}]:
                return line
            line.close()
    raise OSError(f"no answer at {', '.join(hosts)}, port {port}")
