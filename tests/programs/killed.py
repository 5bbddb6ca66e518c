"""Trains until rank 1 ends in the middle of a step; the others say how they ended. Started by a launcher.

Usage: killed.py METHOD kill|raise
"""

import os
import signal
import sys
import time

import torch

import grace


def main(method: str, how: str) -> None:
    torch.set_num_threads(1)
    grace.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=method)
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        if step == 5 and grace.rank() == 1:
            print(f"killed at {time.time()}", flush=True)
            if how == "raise":
                raise ValueError("a mistake on rank 1")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
