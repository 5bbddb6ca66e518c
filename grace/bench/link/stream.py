"""One end of a TCP stream whose throughput is measured; run by its path, so that it starts without importing Grace.

python stream.py receive WARM_UP SECONDS    prints a port to send to, and then bits per second
python stream.py send ADDRESS PORT          sends until the receiver closes the stream
"""

import contextlib
import socket
import sys
import time

CHUNK = 1 << 16
"""Bytes that are copied at once; they stay in the cache."""
PATIENCE = 30
"""Seconds to wait for the other end."""


def receive(warm_up: str, seconds: str) -> None:
    """Print the received bits per second after the warm-up; both times end with bytes that arrived, however slow the
    link is."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(PATIENCE)
        print(server.getsockname()[1], flush=True)
        stream, _ = server.accept()
    stream.settimeout(PATIENCE)
    buffer = bytearray(CHUNK)

    def count(until: float) -> tuple[int, float]:
        received, now = 0, time.perf_counter()
        while now < until:
            received += stream.recv_into(buffer)
            now = time.perf_counter()
        return received, now

    _, began = count(time.perf_counter() + float(warm_up))
    received, ended = count(began + float(seconds))
    print(8 * received / (ended - began))


def send(address: str, port: str) -> None:
    """Send until the receiver closes the stream."""
    chunk = bytes(CHUNK)
    with contextlib.suppress(ConnectionError), socket.create_connection((address, int(port)), PATIENCE) as stream:
        while True:
            stream.sendall(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(*sys.argv[2:])
    else:
        send(*sys.argv[2:])
