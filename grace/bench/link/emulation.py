"""Emulated network between the ranks of a benchmark, on one Linux machine.

Each rank gets a network namespace with one interface, which is joined to a bridge in a further namespace, as machines
are joined by a switch. Token buckets limit the traffic from a rank and to it. Nothing of the machine's own network
changes.
"""

import atexit
import contextlib
import ctypes
import itertools
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grace.bench.common.ending import LinkError
from grace.bench.link import namespaces
from grace.errors import ConfigError
from grace.launch.processes import signals_deferred, signals_raise

MTU = 9000
"""Bytes of a jumbo frame: headers are under 1 % of it, and 10 Gbit/s do not take all of the processor."""
BURST_SECONDS = 0.002
"""Seconds of traffic that a bucket holds: enough for a timer that is late, and little beside the measured traffic."""
# Two frames, each with 14 bytes of Ethernet's header: a token bucket drops frames that are larger than itself.
SMALLEST_BURST = 2 * (MTU + 14)
QUEUE_SECONDS = 0.05
SMALLEST_QUEUE = 1 << 20
"""Bytes of the shortest queue: a shorter one drops packets of a stream that has just begun, which takes long to recover
on slow links."""
WARM_UP = 0.3
"""Seconds that a stream gets to reach its speed."""
FEWEST_PACKETS = 50
"""Number of packets that a measurement of a rate takes at least."""
CHUNK = 1 << 16
"""Bytes that are copied at once; they stay in the cache."""
PATIENCE = 30
"""Seconds to wait for the other end of a stream."""
PORT = 29500
PROGRAMS = ("ip", "tc", "unshare")
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bits of Linux's capabilities: to change networks, and to make namespaces."""

_numbers = itertools.count()


def possible() -> str:
    """Return the reason why a link cannot be emulated here, or an empty text if it can: a small one is tried."""
    if sys.platform != "linux":
        return f"it needs Linux's network namespaces, and this is {sys.platform}"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        named = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        return f"{named} cannot be found (Debian: apt-get install iproute2 util-linux)"
    lacking = [name for name, bit in CAPABILITIES.items() if not _effective() >> bit & 1]
    if lacking:
        return f"it needs root: this process lacks {' and '.join(lacking)}"
    try:
        # For the same reason as when a link is entered.
        with signals_deferred(), contextlib.closing(Link(ranks=1, rate=1e9)) as link:
            link._build()
    except LinkError as error:
        return str(error)
    return ""


class Link:
    """Network of ranks, which exists inside a ``with`` block.

    It is removed, with all processes inside, when the block or the process ends; the next link removes networks of
    processes that were killed. Meanwhile SIGTERM and SIGHUP raise KeyboardInterrupt.

    Args:
        ranks: the number of ranks; each is like a machine of its own.
        rate: bits per second of each rank's connection, in both directions at once. Headers count.

    Raises:
        ConfigError: these numbers make no network.
        LinkError: a network cannot be emulated here.

    >>> Link(ranks=3, rate=1e9).address(2)
    '10.77.0.3'
    >>> Link(ranks=2, rate=1e9).environment(1)["GLOO_SOCKET_IFNAME"]
    'link0'
    """

    interface = "link0"
    """Name of the connection's interface on every rank."""

    def __init__(self, ranks: int = 2, rate: float = 1e9) -> None:
        if not 1 <= ranks <= 1000:
            raise ConfigError(f"a link joins 1 to 1000 ranks, not {ranks}")  # a bridge has 1023 ports
        if not 1e3 <= rate <= 1e12:
            raise ConfigError(f"a link's rate is between 1 kbit/s and 1000 Gbit/s, not {rate:g} bit/s")
        self.ranks = ranks
        self.rate = rate
        self._prefix = ""
        self._process = 0
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> "Link":
        self._signals.enter_context(signals_raise())
        try:
            # a command that is interrupted as it starts would be left alone, and make its namespace later
            with signals_deferred():
                if reason := possible():
                    raise LinkError(f"a link cannot be emulated here: {reason}")
                namespaces.remove_stale()
                self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the network; processes that still run inside are killed."""
        if self._prefix and self._process == os.getpid():  # not in a fork, whose parent still uses the network
            with signals_deferred():
                namespaces.remove(namespaces.starting(self._prefix))
            self._prefix = ""
            atexit.unregister(self.close)
        self._signals.close()

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs another one as this rank, on its side of the link.

        Its host name is its address there: a program that looks its own name up finds the link, and no two ranks are
        one host.
        """
        name = ["unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"', self.address(rank)]
        return ["ip", "netns", "exec", self._namespace(rank), *name, *argv]

    def address(self, rank: int) -> str:
        """Return the rank's IP address."""
        return "10.77.{}.{}".format(*divmod(self._checked(rank) + 1, 250))

    def socket(self, rank: int) -> socket.socket:
        """Return a TCP socket on the rank's side of the link, for this process."""

        def enter_and_open() -> socket.socket:
            with Path(namespaces.FOLDER, self._namespace(self._checked(rank))).open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                    raise LinkError(f"cannot enter the link: {os.strerror(ctypes.get_errno())}")
            return socket.socket()

        with ThreadPoolExecutor(1) as thread:  # only this thread is in the namespace; a socket stays in its own
            opened = thread.submit(enter_and_open).result()
        opened.settimeout(PATIENCE)
        return opened

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torch.distributed needs when the rank is started without torchrun."""
        return {
            "RANK": str(self._checked(rank)),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": self.interface,
            # Ranks are machines of their own to hierarchies, too, though all are processes here.
            "GRACE_NODE": f"rank{rank}",
        }

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"the link has ranks 0 to {self.ranks - 1}, not {rank}")
        return rank

    def _namespace(self, rank: int | str) -> str:
        if not self._prefix:
            raise LinkError("the link is not up: use it in a `with` block")
        return f"{self._prefix}-{rank}"

    def _build(self) -> None:
        self._prefix = f"{namespaces.prefix()}-{next(_numbers)}"
        self._process = os.getpid()
        atexit.register(self.close)
        hub = self._namespace("hub")
        for name in [hub, *map(self._namespace, range(self.ranks))]:
            namespaces.call("ip", "netns", "add", name)
        up = f"addrgenmode none mtu {MTU} up"  # IPv6 would take a second to find its addresses, and is not used
        ports = ["link add bridge type bridge", f"link set bridge {up}"]
        limits = []
        for rank in range(self.ranks):
            ports.append(f"link add rank{rank} type veth peer name {self.interface} netns {self._namespace(rank)}")
            ports.append(f"link set rank{rank} master bridge {up}")
            limits.append(self._limit(f"rank{rank}"))
        namespaces.call("ip", "-netns", hub, "-batch", "-", script="\n".join(ports))
        namespaces.call("tc", "-netns", hub, "-batch", "-", script="\n".join(limits))
        for rank in range(self.ranks):
            address = f"address add {self.address(rank)}/16 dev {self.interface}"
            script = "\n".join(["link set lo up", f"link set {self.interface} {up}", address])
            namespaces.call("ip", "-netns", self._namespace(rank), "-batch", "-", script=script)
            namespaces.call("tc", "-netns", self._namespace(rank), "-batch", "-", script=self._limit(self.interface))

    def _limit(self, interface: str) -> str:
        """Return the command of ``tc`` for an interface."""
        burst = max(SMALLEST_BURST, round(self.rate / 8 * BURST_SECONDS))
        queue = max(SMALLEST_QUEUE, round(self.rate / 8 * QUEUE_SECONDS)) + burst
        return f"qdisc add dev {interface} root tbf rate {self.rate:.0f}bit burst {burst} limit {queue}"


def measure(link: Link, seconds: float = 1.0, sender: int = 0, receiver: int = 1) -> float:
    """Return the bits per second that one rank receives from another, by TCP.

    They are counted for so many seconds, after the stream has reached its speed; longer on links so slow that few
    packets would be counted. Both times end with bytes that arrived. A LinkError says that none arrive.
    """
    if link.ranks < 2:
        raise ConfigError("throughput is measured between two ranks, and the link has one")
    with link.socket(receiver) as server, link.socket(sender) as sending:
        server.bind((link.address(receiver), 0))
        server.listen()
        try:
            sending.connect(server.getsockname())
            receiving, _ = server.accept()
            receiving.settimeout(PATIENCE)
            thread = threading.Thread(target=_send, args=(sending,), daemon=True)
            thread.start()
            with receiving:
                _receive(receiving, WARM_UP)
                received, took = _receive(receiving, max(seconds, FEWEST_PACKETS * MTU * 8 / link.rate))
        except TimeoutError:
            raise LinkError("the stream stands still") from None
        thread.join()
    return 8 * received / took


def _receive(stream: socket.socket, seconds: float) -> tuple[int, float]:
    """Return the bytes that arrive in so many seconds, and the seconds until the last of them."""
    buffer, received = bytearray(CHUNK), 0
    began = now = time.perf_counter()
    while now - began < seconds:
        received += stream.recv_into(buffer)
        now = time.perf_counter()
    return received, now - began


def _send(stream: socket.socket) -> None:
    """Send until the receiver closes the stream."""
    chunk = bytes(CHUNK)
    with contextlib.suppress(OSError):
        while True:
            stream.sendall(chunk)


def _effective() -> int:
    """Return the capabilities of this process, as bits."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
