"""Answers that go once to each node, over Horovod: prints whether all ranks end with plain training's weights."""

import os

import torch

import grace

REPLICATED = "reduce_broadcast(destination=1, local_replication=True)"


def trained(**options):
    """The weights of a small layer after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(9, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 9), 1.0 + step + grace.rank())).square().sum().mul(1e-3).backward()
        optimizer.step()
    return model.weight.detach()


def main():
    """The ranks are two on one node, and one on another."""
    os.environ["GRACE_NODE"] = "b" if os.environ["HOROVOD_RANK"] == "2" else "a"
    backend = grace.init("horovod")
    same = torch.allclose(trained(communicator=REPLICATED), trained(), rtol=1e-5, atol=1e-6)
    stale = trained(compressor="topk(ratio=0.5)", communicator=REPLICATED.replace(")", ", staleness=1)"))
    everyone = backend.allgather_object((same, stale.tolist()))
    if grace.rank() == 0:
        print("the same:", all(one for one, _ in everyone), all(value == everyone[0][1] for _, value in everyone))
    grace.shutdown()


if __name__ == "__main__":
    main()
