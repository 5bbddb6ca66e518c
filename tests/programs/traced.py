"""Trains a small network on torch for a few steps; rank 0 prints its traffic. Started by a launcher.

Usage: traced.py COMPRESSOR [STEPS [the step that fails on rank 1]]
"""

import json
import sys

import torch

import grace


def main(compressor: str, steps: str = "6", fails: str = "") -> None:
    torch.set_num_threads(1)
    grace.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=compressor)
    for step in range(int(steps)):
        if str(step) == fails and grace.rank() == 1:
            raise ValueError("a mistake on rank 1")
        optimizer.zero_grad()
        model(torch.full((8, 16), 1.0 + grace.rank())).square().mean().backward()
        optimizer.step()
    if grace.rank() == 0:
        print("PAYLOAD", json.dumps(optimizer.traffic.payload_bytes), flush=True)
        print("WEIGHTS", float(model[0].weight.detach().double().sum()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
