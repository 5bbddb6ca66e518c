"""Trains until rank 1 goes another way than the others; each says how it ended. Started by a launcher.

Usage: apart.py FOLDER broadcast|object|state|sleep [TIMEOUT [WARN_SECONDS]]
"""

import importlib
import sys
import time
from pathlib import Path

import torch

import grace
from grace.core import watch

CALLS = ("broadcast", "object", "state")
"""Ways in which rank 1 waits for rank 0, and has an error of its own."""


def main(folder: str, how: str, timeout: str = "", warn: str = "") -> None:
    torch.set_num_threads(1)
    watch.WARN_SECONDS = float(warn or watch.WARN_SECONDS)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    importlib.import_module("grace.torch")
    grace.init(timeout=float(timeout) if timeout else None)  # last: ranks come here together, and no timeout is short
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor="topk(ratio=0.1)")
    try:
        for step in range(10_000):
            if step == 5:
                print(f"rank {grace.rank()} parts at {time.time()}", flush=True)
                if grace.rank() == 1:
                    other_way(how, model, optimizer)
                    return
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    except grace.GraceError as error:
        print(f"rank {grace.rank()} ended at {time.time()}: {type(error).__name__}: {error}", flush=True)
        Path(folder, str(grace.rank())).touch()
        until = time.monotonic() + 10  # launchers end the others when the first has ended
        while how in CALLS and len(list(Path(folder).iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        raise


def other_way(how, model, optimizer):
    """Do something else on rank 1 while the others exchange."""
    if how == "sleep":
        time.sleep(60)
    if how == "broadcast":
        grace.broadcast_parameters(model)
    if how == "object":
        grace.from_root(lambda: "a word")
    if how == "state":
        optimizer.full_state_dict()


if __name__ == "__main__":
    main(*sys.argv[1:])
