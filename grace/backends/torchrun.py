"""A store of its own for each start of a group by torchrun."""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from grace.errors import ExchangeError

LOOK = 0.01
"""Seconds between looks for ranks that are new."""


def store_of_this_start(timeout: float) -> dict[str, Any]:
    """What ``init_process_group`` is given where torchrun's own store serves the ranks: the store, under a name that
    only the ranks of this start know.

    A group that torchrun starts anew finds the same store, and in it what earlier ranks have left: their addresses, to
    which new ranks would connect (as torch 2.13's do). Nothing that torchrun tells them differs between starts on all
    machines alike. So rank 0 draws a name, and tells it to every rank that says hello by a word of its own: ranks of
    earlier starts have said other words, and do not answer.

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
    name = _named(store, size, timeout) if rank == 0 else _heard(store, rank, timeout)
    return {"store": dist.PrefixStore(f"grace/{name}", store), "rank": rank, "world_size": size}


def _named(store: Any, size: int, timeout: float) -> str:
    """The name, when all other ranks know it."""
    name, answered, began = uuid.uuid4().hex, dict[int, str](), time.monotonic()
    missing = set(range(1, size))
    while missing:
        for rank in sorted(missing):
            hello = f"grace/hello/{rank}"
            if store.check([f"grace/{name}/heard/{rank}"]):
                missing.remove(rank)
            elif store.check([hello]) and (word := store.get(hello).decode()) != answered.get(rank):
                store.set(f"grace/answer/{word}", name)
                answered[rank] = word
        if missing and time.monotonic() - began > timeout:
            raise ExchangeError(
                f"rank 0 of {size}: rank {', '.join(map(str, sorted(missing)))} did not come to torchrun's store "
                f"within {timeout:g} s"
            )
        time.sleep(LOOK if missing else 0)
    return name


def _heard(store: Any, rank: int, timeout: float) -> str:
    """The name, as rank 0 tells it."""
    word = uuid.uuid4().hex
    store.set(f"grace/hello/{rank}", word)
    try:
        name: str = store.get(f"grace/answer/{word}").decode()
    except RuntimeError as error:
        raise ExchangeError(f"rank {rank}: rank 0 did not come to torchrun's store within {timeout:g} s") from error
    store.set(f"grace/{name}/heard/{rank}", "")
    return name
