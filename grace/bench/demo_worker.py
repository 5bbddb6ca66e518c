"""One rank of the demo; started by torchrun, see :mod:`grace.bench.demo`.

Usage: torchrun ... -m grace.bench.demo_worker SETTINGS.json RESULTS.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn.functional import cross_entropy

import grace
from grace.bench import digits
from grace.bench.demo import Settings
from grace.errors import GraceError

LR, MOMENTUM, BATCH = 0.1, 0.9, 64
"""The same for every method; the learning rate falls to 0 along a cosine."""
WARMUP_STEPS = 3
"""Run on a throw-away copy of the network first: kernels are compiled and buffers allocated there."""


def train(method: str, seed: int, settings: Settings, data: digits.Digits, report: Any = None) -> dict[str, Any]:
    """Train from the seed's initial weights with one method; returns what was measured on this rank."""
    _steps(method, seed, data, epochs=1, limit=WARMUP_STEPS)
    return _steps(method, seed, data, epochs=settings.epochs, report=report)


def _steps(
    method: str, seed: int, data: digits.Digits, epochs: int, limit: int | None = None, report: Any = None
) -> dict[str, Any]:
    model = digits.network(seed)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        model.named_parameters(),
        compressor=method,
        seed=seed,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    traffic = optimizer.traffic
    marks = {round(1.15**power) for power in range(100)}
    step_seconds, codec_seconds, curve = [], [], []
    for epoch in range(epochs):
        shares = digits.batches(len(data.train_x), BATCH, grace.size(), grace.rank(), seed, epoch)
        for share in shares[:limit]:
            x, y, codec_before = data.train_x[share], data.train_y[share], traffic.codec_seconds
            began = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            step_seconds.append(time.perf_counter() - began)
            codec_seconds.append(traffic.codec_seconds - codec_before)
            if traffic.steps in marks:
                curve.append((traffic.sent_bytes, digits.accuracy(model, data)))
        schedule.step()
        if report is not None:
            report(digits.accuracy(model, data))
    curve.append((traffic.sent_bytes, digits.accuracy(model, data)))
    return {
        "method": method,
        "seed": seed,
        "steps": traffic.steps,
        "accuracy": curve[-1][1],
        "sent_bytes_per_step": traffic.sent_bytes / traffic.steps,
        "bits_per_element": traffic.bits_per_element,
        "codec_ms": 1e3 * statistics.median(codec_seconds),
        "step_ms": 1e3 * statistics.median(step_seconds),
        "curve": curve,
    }


def main(settings_file: str, results_file: str) -> None:
    """Train with every method and seed; rank 0 shows the progress and writes the results."""
    settings = Settings(**json.loads(Path(settings_file).read_text()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    grace.init("torch")
    data = digits.load()
    first = grace.rank() == 0
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[accuracy]:>7}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=Console(quiet=not first)) as progress:
        for method in settings.methods:
            bar = progress.add_task(method, total=settings.epochs * len(settings.seeds), accuracy="")

            def report(accuracy: float, bar: Any = bar) -> None:
                progress.update(bar, advance=1, accuracy=f"{accuracy:.1%}")

            runs += [train(method, seed, settings, data, report) for seed in settings.seeds]
    if first:
        Path(results_file).write_text(json.dumps(runs))
    grace.shutdown()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except GraceError as error:
        sys.exit(f"{type(error).__name__}: {error}")
