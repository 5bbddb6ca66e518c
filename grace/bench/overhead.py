"""What the exchange costs beside DistributedDataParallel, or plain Horovod: step times side by side, in one run.

    torchrun --standalone --nproc-per-node 2 -m grace.bench.overhead --strategy all_reduce --strategy partitioned_ps
    horovodrun -np 2 python -m grace.bench.overhead

Both sides train the same model on the same data over the same engine. Blocks of steps alternate, so that
what the machine does meanwhile hits both alike; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import grace
import grace.torch


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The demo's network and one of its batches."""
    from grace.bench.torch_tasks import network

    return network(seed=0), torch.rand(64, 64), torch.randint(10, (64,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """16.9 M parameters: 4 encoder layers of width 512, and a vocabulary of 4096."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(4096, 512), body, nn.Linear(512, 4096))
    return model, torch.randint(4096, (4, 32)), torch.randint(4096, (4, 32))


def stepper(kind: str, build, compressor: str):
    """A function that does one training step the given way."""
    torch.manual_seed(0)
    model, x, y = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "hook":
        model = nn.parallel.DistributedDataParallel(model)
        grace.torch.register_ddp_hook(model, compressor)
    elif kind == "horovod":
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    elif kind == "grace":
        optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor)
    else:
        optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), strategy=kind)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


def main() -> None:
    """Print one line per model: median milliseconds of each side, and their ratio to the first's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of steps per side")
    parser.add_argument(
        "--strategy", action="append", default=[], help="a file or a builder's spec; may be given several times"
    )
    options = parser.parse_args()
    engine = grace.init()
    kinds = [*(("horovod", "grace") if engine.name == "horovod" else ("ddp", "grace", "hook")), *options.strategy]
    for name, build, steps in (("demo MLP", mlp, 100), ("17 M transformer", transformer, 3)):
        run = {kind: stepper(kind, build, options.compressor) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 1):
            for kind in kinds:
                for _ in range(steps):
                    began = time.perf_counter()
                    run[kind]()
                    if number:  # the first block warms up
                        times[kind].append(time.perf_counter() - began)
        medians = {kind: statistics.median(values) * 1e3 for kind, values in times.items()}
        if grace.rank() == 0:
            cells = ", ".join(f"{kind} {ms:.2f} ms ({ms / medians[kinds[0]]:.2f}x)" for kind, ms in medians.items())
            print(f"{name}, {grace.size()} ranks, {options.compressor}: {cells}", flush=True)
    grace.shutdown()


if __name__ == "__main__":
    main()
