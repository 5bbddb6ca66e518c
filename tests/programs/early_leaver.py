"""Trains with staleness; rank 1 makes one step fewer than the others.

Usage: early_leaver.py shutdown|exit
"""

import sys

import torch

import grace
from grace.core import watch


def main(how: str) -> None:
    torch.set_num_threads(1)
    watch.GIVE_UP_SECONDS = 1.0  # ranks that wait over MPI poll
    grace.init()
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(
        optimizer, model.named_parameters(), communicator="reduce_broadcast(staleness=2)"
    )
    for _ in range(6 - grace.rank()):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    print("trained", flush=True)
    if how == "shutdown":
        grace.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
