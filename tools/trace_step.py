"""Print the way of a gradient on two ranks: the functions of grace/ that one step calls, in order.

    torchrun --nproc-per-node 2 tools/trace_step.py [SPEC] [STEPS_BEFORE]

SPEC is a compressor ("topk(ratio=0.1)" if left out). STEPS_BEFORE steps run before the one that is printed: 3 if left
out, which shows a usual step; 0 shows the first.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import torch

import grace

ROOT = Path(grace.__file__).resolve().parents[1]


class Calls:
    """The calls of Grace's functions, as a profiler is told of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        inside = code.co_filename.startswith(f"{ROOT}/grace/")
        if event == "call" and inside and not code.co_name.startswith("<"):
            self.seen.append((code.co_filename[len(str(ROOT)) + 1 :], code.co_name, code.co_firstlineno))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one training step."""
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().sum().backward()
    optimizer.step()


def main() -> None:
    """Run the steps, and print the calls of the last one on rank 0."""
    spec = sys.argv[1] if len(sys.argv) > 1 else "topk(ratio=0.1)"
    before = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    grace.init("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compressor=spec
    )
    for _ in range(before):
        step(model, optimizer)
    calls = Calls()
    threading.setprofile(calls)  # autograd calls hooks in a thread of its own
    sys.setprofile(calls)
    step(model, optimizer)
    sys.setprofile(None)
    threading.setprofile(None)
    if grace.rank() == 0:
        for name, function, line in dict.fromkeys(calls.seen):
            print(f"{name}:{line} {function}")
        files, functions = {name for name, *_ in calls.seen}, set(calls.seen)
        print(f"{spec}, step {before + 1}: {len(files)} files, {len(functions)} functions, {len(calls.seen)} calls")
    grace.shutdown()


if __name__ == "__main__":
    main()
