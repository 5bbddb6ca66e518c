"""The watch's server on rank 0: it receives how ranks end and where they wait, and passes it on to all ranks."""

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

Message = dict[str, Any]
"""Message of a rank or of the server, which JSON has read: its values may be anything."""
Position = tuple[list[str], str, list[int]]
"""Operations that some ranks wait in, the current line of their program, and the ranks."""
Offer = tuple[list[str], int, str]
"""Hosts and port of the server, and the token that it wants."""
LONGEST = 1 << 20
"""Largest number of bytes of a line from a rank."""
LONGEST_HELLO = 1 << 10
"""Largest number of bytes of a line from a connection that has not authenticated."""
DEEPEST = 8
"""Largest depth of nested lists and objects in a message."""
MOST_UNAUTHENTICATED = 256
"""Largest number of connections that have not authenticated; if there are more, the oldest is closed."""
ANSWER_SECONDS = 10.0
"""Time in which a rank must answer a request for its position. A thread of the rank answers within milliseconds, unless
its machine is overloaded, or another thread holds Python's global lock."""
MERGED_SECONDS = 1.0
"""Time after a request for positions within which further requests get the same answers."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection to an address."""
WELCOME_SECONDS = 30.0
"""Longest wait for rank 0's answer over a new connection."""
SEND_SECONDS = 5.0
"""Longest wait for room in the socket's buffer."""
LOST = "was lost (killed, or its machine is gone)"
SILENT = "does not answer (stopped, or its machine hangs)"


def parse_message(line: bytes) -> Message | None:
    """Return the message in a line; None if the line, which may hold any bytes, is no message.

    >>> parse_message(b'{"rank": 1}'), parse_message(b"[" * 100_000), parse_message(b"[1]"), parse_message(b"\\xff")
    ({'rank': 1}, None, None, None)
    """
    # Check the depth before json.loads, whose recursion a deeply nested line would exhaust.
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
    """Connection over which both sides send lines of JSON. Nothing is ever unpickled."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.buffer = b""
        """Bytes of a line that is not complete yet."""
        self.rank = -1
        """Number of the rank at the other end; -1 until it has authenticated."""
        self.longest = LONGEST_HELLO
        self.lock = threading.Lock()
        # A rank that is stopped must not block the server's only thread in sendall().
        connection.settimeout(SEND_SECONDS)
        # Operations wait for these messages, which are small: TCP must not collect them.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message: object) -> None:
        """Send a message, and ignore that the other end may have gone."""
        with contextlib.suppress(OSError), self.lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived, once there is something to read; None if the connection has ended, or
        a line is too long or no message."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if not data or max(map(len, [*lines, self.buffer])) > self.longest:
            return None
        messages = [message for message in map(parse_message, lines) if message is not None]
        return messages if len(messages) == len(lines) else None

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


class WatchServer:
    """Server that accepts one connection of each rank, and then no more.

    Args:
        size: number of ranks.
        alone: True if all ranks run on this machine.
        token: secret that a rank must send first.
    """

    def __init__(self, size: int, alone: bool, token: str):
        self.size = size
        self.token = token
        both = not alone and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        # Other machines must not reach the port unless they have ranks.
        where = ("127.0.0.1" if alone else "", 0)
        self.listener = socket.create_server(where, family=family, backlog=size, dualstack_ipv6=both)
        self.port = self.listener.getsockname()[1]
        self.ranks: dict[int, Line] = {}
        self.unauthenticated: dict[Line, None] = {}
        """Connections that have not authenticated, in the order of their arrival; empty once all ranks are
        connected."""
        self.ended: dict[int, str] = {}
        """Descriptions of how ranks ended."""
        self.meetings: dict[int, dict[int, tuple[str, str]]] = {}
        """Kind and name of the operation on each rank, by the operation's number, until all ranks have reported it."""
        self.asking: list[tuple[Line, int]] = []
        """Connections that requested positions, with the numbers of their requests."""
        self.answers: dict[int, tuple[list[str], str]] = {}
        """Positions of ranks: the operations that they wait in, and the current line of the program."""
        self.polled = 0
        """Number of the current poll of positions."""
        self.polled_at = 0.0
        self.deadline = 0.0
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
            # While positions are awaited, wake up for the deadline: a stopped rank sends nothing.
            for key, _ in self.selector.select(0.1 if self.asking else None):
                key.data()
            awaited = self.ranks.keys() - self.answers.keys() - self.ended.keys()
            if self.asking and (time.monotonic() > self.deadline or not awaited):
                self._send_positions()
        self.close_sockets()

    def _accept(self) -> None:
        if len(self.unauthenticated) >= MOST_UNAUTHENTICATED:
            self._drop(next(iter(self.unauthenticated)))
        with contextlib.suppress(OSError):
            line = Line(self.listener.accept()[0])
            self.unauthenticated[line] = None
            self.selector.register(line.socket, selectors.EVENT_READ, lambda: self._read(line))

    def _read(self, line: Line) -> None:
        """Read and handle the messages of a connection. This thread survives any input, since all ranks depend on
        it."""
        # An event of a connection that an earlier event of this round has closed.
        messages = None if line.rank < 0 and line not in self.unauthenticated else line.receive()
        for message in messages or ():
            if line.rank < 0 and not self._authenticate(line, message):
                messages = None
                break
            with contextlib.suppress(Exception):  # a message of another version of Grace is skipped
                self._handle(line, message)
        if messages is None:
            self._drop(line)

    def _drop(self, line: Line) -> None:
        """Close a connection, which may have been closed before."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.socket)
        line.close()
        self.unauthenticated.pop(line, None)
        if line.rank >= 0:
            self._end(line.rank, LOST)

    def _authenticate(self, line: Line, message: Message) -> bool:
        """Return True if a connection's first message has the number of a missing rank and the run's token. Register
        that rank; once all ranks are registered, close the listener and all other connections."""
        rank, token = message.get("rank"), message.get("token")  # True is an int
        if type(rank) is not int or rank in self.ranks or not 0 <= rank < self.size or not isinstance(token, str):
            return False
        # compare_digest takes the same time for any wrong token; backslashreplace keeps halves of surrogate pairs.
        if not hmac.compare_digest(token.encode(errors="backslashreplace"), self.token.encode()):
            return False
        line.rank = rank
        # A stranger could fill the memory by long lines, so only ranks may send them.
        line.longest = LONGEST
        self.ranks[rank] = line
        self.unauthenticated.pop(line, None)
        if len(self.ranks) == self.size:
            self.selector.unregister(self.listener)
            self.listener.close()
            for stranger in list(self.unauthenticated):
                self._drop(stranger)
        line.send(welcome=rank)
        return True

    def _handle(self, line: Line, message: Message) -> None:
        if "end" in message:
            self._end(line.rank, str(message["end"]))
        elif "meet" in message:
            self._compare_operation(int(message["meet"]), line.rank, str(message["kind"]), str(message["name"]))
        elif "ask" in message:
            now = time.monotonic()
            # The first request starts a poll; later ones join it, and ask again if positions may have changed.
            if not self.asking:
                self.polled += 1
                self.answers = {}
                self.deadline = now + ANSWER_SECONDS
            if not self.asking or now - self.polled_at > MERGED_SECONDS:
                self.polled_at = now
                self._broadcast(where=self.polled)
            self.asking.append((line, message["ask"]))
        elif message.get("answer") == self.polled:  # others belong to an earlier poll
            self.answers[line.rank] = ([str(place) for place in message["places"]], str(message["line"]))

    def _broadcast(self, **message: object) -> None:
        # Rank 0 is last: it closes the server when it receives the report of its own end.
        for rank in sorted(self.ranks, reverse=True):
            self.ranks[rank].send(**message)

    def _end(self, rank: int, how: str) -> None:
        if rank not in self.ended:
            self.ended[rank] = how
            self._broadcast(ended=rank, how=how)

    def _compare_operation(self, number: int, rank: int, kind: str, name: str) -> None:
        """Register a rank's operation; once all ranks have one, tell them the names of operations that differ."""
        operations = self.meetings.setdefault(number, {})
        operations[rank] = (kind, name)
        if len(operations) < self.size:
            return
        del self.meetings[number]
        kinds: dict[str, list[int]] = {}
        for member, (other, _) in operations.items():
            kinds.setdefault(other, []).append(member)
        said = [[operations[ranks[0]][1], sorted(ranks)] for ranks in kinds.values()]
        self._broadcast(met=number, said=said if len(kinds) > 1 else None)

    def _send_positions(self) -> None:
        """Send the positions of all ranks to the ranks that requested them; equal positions are merged."""
        found: dict[str, Position] = {}
        for rank in self.ranks:
            places, line = self.answers.get(rank, ([], SILENT))
            if rank not in self.ended:
                found.setdefault(json.dumps([places, line]), (places, line, []))[2].append(rank)
        asking, self.asking = self.asking, []
        for asker, number in asking:
            asker.send(places=list(found.values()), answer=number)

    def close(self) -> None:
        """Stop the server's thread, which closes all sockets."""
        self.closing = True
        with contextlib.suppress(OSError):  # the thread may have woken up by itself, and closed the socket
            self.wake.send(b"!")
        # No longer, since a program that ends must not wait for a socket.
        self.thread.join(2)

    def close_sockets(self) -> None:
        """Close all sockets. A forked child, which has no part in the watch, calls only this."""
        for line in [*self.ranks.values(), *self.unauthenticated]:
            line.close()
        for end in (self.listener, self.wake, self.waking):
            end.close()


def machine_id() -> str:
    """Return an identifier that is equal for ranks that reach each other over loopback: host name, boot and network
    namespace."""
    found = socket.gethostname()
    with contextlib.suppress(OSError):  # only Linux has /proc
        with open("/proc/sys/kernel/random/boot_id") as file:
            found += file.read()
        found += str(os.stat("/proc/self/ns/net").st_ino)
    return found


def local_addresses() -> list[str]:
    """Return the host names and addresses by which other machines may reach this one."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; tells by which address this machine goes out
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    return [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]


def connect(offer: Offer | None, rank: int) -> Line:
    """Connect to the server, and return the connection.

    Raises:
        OSError: the server cannot be reached.
    """
    if offer is None:
        raise OSError("it cannot listen")
    hosts, port, token = offer
    # Rank 0 reaches itself, whatever its names resolve to.
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
