"""Two processes that find each other by the environment alone, where no launcher starts them."""

import socket
import subprocess
from pathlib import Path

from tests.support.engine_pools import environment
from tests.support.limits import HANGS


def started_by_hand(command: list[str], folder: Path | None = None, **variables: str) -> list[tuple[int, str]]:
    """Run a command as ranks 0 and 1; their exit codes, and what they printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", **variables}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [
        subprocess.Popen(
            command, cwd=folder, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True, **pipes
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=HANGS)[0] for rank in ranks]
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]
