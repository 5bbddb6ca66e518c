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
from grace.bench.kernels.timing import Exchanged
from grace.bench.workloads.models import workload

METHODS = "none,fp16,fp16/residual,topk(ratio=0.01),efsignsgd,signsgd,qsgd,qsgd/residual,powersgd(rank=4)"
WARMING = 3


def steps_of(method: str, shapes: Sequence[tuple[int, ...]], at_once: bool) -> Exchanged:
    """Return steps of gradients of some shapes by one method.

    Args:
        method: a compressor's spec, and behind a slash a memory's if it is not the default.
        shapes: shapes of the gradients.
        at_once: False to go variable by variable.
    """
    compressor, _, memory = method.partition("/")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]
    steps = Exchanged(compressor, memory or None, gradients, [torch.empty_like(x) for x in gradients])
    for bucket in steps.runner.buckets:
        bucket.fuses = at_once
    return steps


def timed(steps: Exchanged) -> tuple[float, float]:
    """Make a step; return the milliseconds to encode, memory included, and to decode."""
    began = time.perf_counter()
    steps.start()
    half = time.perf_counter()
    steps.finish()
    return (half - began) * 1e3, (time.perf_counter() - half) * 1e3


def measured(method: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Return the least times of both ways, and of a copy."""
    ways = {"at once": steps_of(method, shapes, True), "apart": steps_of(method, shapes, False)}
    source = torch.randn(sum(torch.Size(shape).numel() for shape in shapes))
    target, copies = torch.empty_like(source), list[float]()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(WARMING + rounds):
        began = time.perf_counter()
        target.copy_(source)
        copies.append((time.perf_counter() - began) * 1e3)
        for way, steps in ways.items():
            times[way].append(timed(steps))
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
