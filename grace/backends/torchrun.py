"""Separate store for each start of a group by torchrun."""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from grace.errors import ExchangeError

POLL_SECONDS = 0.01
"""Seconds between looks for new ranks."""


def private_store(timeout: float) -> dict[str, Any]:
    """Return arguments of ``init_process_group`` with a store that only the ranks of this start of the group share.

    Returns:
        torchrun's store under a name of this start, with rank and size; empty where torchrun's own store does not serve
        the ranks.

    A group that torchrun restarts finds the same store, and in it entries of earlier ranks: their addresses, to which
    new ranks would connect (as torch 2.13's do). Nothing that torchrun tells the ranks differs between starts on all
    machines alike. So rank 0 draws a name, and answers with it to every rank that registers by a random word: ranks of
    earlier starts have registered by other words, and do not answer.

    Args:
        timeout: seconds that ranks wait for each other.

    Raises:
        ExchangeError: some ranks did not come.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout))
    name = _announce_name(store, size, timeout) if rank == 0 else _receive_name(store, rank, timeout)
    return {"store": dist.PrefixStore(f"grace/{name}", store), "rank": rank, "world_size": size}


def _announce_name(store: dist.Store, size: int, timeout: float) -> str:
    """Draw the name on rank 0, and return it when all other ranks know it."""
    name = uuid.uuid4().hex
    answered: dict[int, str] = {}
    began = time.monotonic()
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            hello = f"grace/hello/{rank}"
            if store.check([f"grace/{name}/heard/{rank}"]):
                missing.remove(rank)
            elif store.check([hello]):
                word = store.get(hello).decode()
                if word != answered.get(rank):  # a word that was answered may be of an earlier start: a new one follows
                    store.set(f"grace/answer/{word}", name)
                    answered[rank] = word
        if missing and time.monotonic() - began > timeout:
            raise ExchangeError(
                f"rank 0 of {size}: rank {', '.join(map(str, sorted(missing)))} did not come to torchrun's store "
                f"within {timeout:g} s"
            )
        time.sleep(POLL_SECONDS if missing else 0)
    return name


def _receive_name(store: dist.Store, rank: int, timeout: float) -> str:
    """Return the name that rank 0 has drawn."""
    word = uuid.uuid4().hex
    store.set(f"grace/hello/{rank}", word)
    try:
        name: str = store.get(f"grace/answer/{word}").decode()
    except RuntimeError as error:
        raise ExchangeError(f"rank {rank}: rank 0 did not come to torchrun's store within {timeout:g} s") from error
    store.set(f"grace/{name}/heard/{rank}", "")
    return name
