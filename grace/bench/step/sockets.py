"""Bytes that have crossed this process's TCP connections, as Linux counts them."""

import contextlib
import os
import socket
import struct
import sys

ACKNOWLEDGED, RECEIVED = 120, 128
"""Offsets in TCP_INFO (linux/tcp.h) of ``tcpi_bytes_acked`` and ``tcpi_bytes_received``, 64 bits each."""


def tcp_bytes(between_nodes: bool = False) -> tuple[int, int] | None:
    """Return the bytes sent (and acknowledged) and received so far by all open TCP connections, without headers; None
    where they cannot be known.

    With ``between_nodes`` only connections whose ends have different addresses count, and None means that no connection
    leaves this node.
    """
    if sys.platform != "linux":
        return None
    sent = received = found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if between_nodes and connection.getpeername()[:1] == connection.getsockname()[:1]:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) >= RECEIVED + 8:
                found += 1
                sent += struct.unpack_from("Q", info, ACKNOWLEDGED)[0]
                received += struct.unpack_from("Q", info, RECEIVED)[0]
    return None if between_nodes and not found else (sent, received)
