"""Times of encoding and decoding in whole steps, at once and variable by variable.

    python -m benchmarks.whole_buckets

One rank, one thread, no network. Both ways take turns; the least time of each is shown, in ms and in multiples of the
least time of a ``copy_`` of as many float32s in the same run.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from grace.bench.common.options import methods as listed
from grace.bench.workloads.models import workload
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.session.bucketing import Limits
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner

METHODS = "none,fp16,fp16/residual,topk(ratio=0.01),efsignsgd,signsgd,qsgd,qsgd/residual,powersgd(rank=4)"
WARMING = 3


class Steps:
    """Steps of gradients of some shapes by one method.

    Args:
        method: a compressor's spec, and behind a slash a memory's if it is not the default.
        at_once: False to go variable by variable.
    """

    def __init__(self, method: str, shapes: Sequence[tuple[int, ...]], at_once: bool):
        compressor, _, memory = method.partition("/")
        found = [Variable(f"v{i}", shape, device="cpu") for i, shape in enumerate(shapes)]
        plan = UniformPlan(compressor, memory or None, None, Limits())
        self.runner = build_step_runner(lambda: found, lambda: plan, LocalBackend(), Context())
        generator = torch.Generator().manual_seed(0)
        self.fresh = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]
        self.gradients = {v.name: x.clone() for v, x in zip(found, self.fresh, strict=True)}
        for bucket in self.runner.buckets:
            bucket.fuses = at_once

    def step(self) -> tuple[float, float]:
        """Milliseconds to encode, memory included, and to decode."""
        began = time.perf_counter()
        for bucket in self.runner.buckets:
            mine = [self.gradients[variable.name] for variable in bucket.variables]
            self.runner.start_round_trip(bucket, mine, [True] * len(mine))
        half = time.perf_counter()
        self.runner.finish_step(lambda bucket: [self.gradients[variable.name] for variable in bucket.variables])
        ended = time.perf_counter()
        for gradient, x in zip(self.gradients.values(), self.fresh, strict=True):
            gradient.copy_(x)
        return (half - began) * 1e3, (ended - half) * 1e3


def measured(method: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """The least times of both ways, and of a copy."""
    ways = {"at once": Steps(method, shapes, True), "apart": Steps(method, shapes, False)}
    source = torch.randn(sum(torch.Size(shape).numel() for shape in shapes))
    target, copies = torch.empty_like(source), list[float]()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(WARMING + rounds):
        began = time.perf_counter()
        target.copy_(source)
        copies.append((time.perf_counter() - began) * 1e3)
        for way, steps in ways.items():
            times[way].append(steps.step())
    least = {way: [min(column) for column in zip(*found[WARMING:], strict=True)] for way, found in times.items()}
    return {"copy": min(copies[WARMING:]), **least}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50", help="a model of grace bench step, or a number of elements")
    parser.add_argument("--methods", default=METHODS, help="compressors; behind a slash a memory, if not the default")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model.isdecimal():
        shapes: list[tuple[int, ...]] = [(int(given.model),)]
    else:
        shapes = [tuple(p.shape) for p in workload(given.model, 0).model.parameters()]
    table = Table(
        Column("method", no_wrap=True),
        "way",
        *(f"{what}, ms" for what in ("copy", "encode", "decode", "sum")),
        "copies",
    )
    for method in listed(given.methods):
        found = measured(method, shapes, given.rounds)
        for way in ("at once", "apart"):
            encode, decode = found[way]
            cells = (found["copy"], encode, decode, encode + decode, (encode + decode) / found["copy"])
            table.add_row(method, way, *(f"{cell:.1f}" for cell in cells))
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    main()
