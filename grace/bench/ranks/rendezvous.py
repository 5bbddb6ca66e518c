"""Rendezvous server of the ranks of Horovod over Gloo, when no horovodrun starts them.

python -m grace.bench.ranks.rendezvous RANKS    prints its port, and serves until its input ends
"""

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def main(ranks: int) -> None:
    """Start the server, and stop it at the end of stdin. Each rank is a host of its own to Horovod, which makes no
    difference to its collectives."""
    hosts = parse_hosts(",".join(f"rank{rank}:1" for rank in range(ranks)))
    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(hosts, ranks))
    print(port, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
