"""One rank of a training benchmark; started by torchrun, see :mod:`grace.bench.training`.

Usage: torchrun ... -m grace.bench.worker SETTINGS.json RUNS.jsonl
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

import grace
from grace.bench.task import Task, task_class
from grace.bench.training import Settings
from grace.errors import GraceError
from grace.exchanger import build_communicator

WARMUP_STEPS = 3
"""Run on a throw-away copy of the network first: kernels are compiled and buffers allocated there."""


def train(method: str, seed: int, settings: Settings, task: Task, report: Any = None) -> dict[str, Any]:
    """Train from the seed's initial weights with one method; returns what was measured on this rank."""
    _steps(method, seed, settings, task, limit=WARMUP_STEPS)
    return _steps(method, seed, settings, task, report=report)


def _steps(
    method: str, seed: int, settings: Settings, task: Task, limit: int | None = None, report: Any = None
) -> dict[str, Any]:
    model = task.network(seed)
    lr, epochs = settings.rates.get(method, task.lr), settings.epochs or task.epochs
    # a memory that has the momentum wants an optimizer without
    momentum = 0.0 if build_communicator(method, None, None).memory.owns_momentum else task.momentum
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        model.named_parameters(),
        compressor=method,
        seed=seed,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    traffic = optimizer.traffic
    marks = {round(1.15**power) for power in range(100)}
    step_seconds, codec_seconds, curve = [], [], []
    for epoch in range(1 if limit else epochs):
        for share in task.shares(grace.size(), grace.rank(), seed, epoch)[:limit]:
            codec_before = traffic.codec_seconds
            began = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model, share).backward()
            if task.clip is not None:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            step_seconds.append(time.perf_counter() - began)
            codec_seconds.append(traffic.codec_seconds - codec_before)
            if traffic.steps in marks:
                curve.append((traffic.sent_bytes, task.quality(model)))
        schedule.step()
        if report is not None:
            report(task.quality(model))
    curve.append((traffic.sent_bytes, task.quality(model)))
    return {
        "method": method,
        "seed": seed,
        "lr": lr,
        "steps": traffic.steps,
        "quality": curve[-1][1],
        "sent_bytes_per_step": traffic.sent_bytes / traffic.steps,
        "bits_per_element": traffic.bits_per_element,
        "codec_ms": 1e3 * statistics.median(codec_seconds),
        "step_ms": 1e3 * statistics.median(step_seconds),
        "curve": curve,
    }


def main(settings_file: str, runs_file: str) -> None:
    """Train with every method and seed; rank 0 shows the progress and records each run."""
    settings = Settings(**json.loads(Path(settings_file).read_text()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    grace.init("torch")
    task = task_class(settings.task)()
    first = grace.rank() == 0
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[quality]:>7}"),
        TimeElapsedColumn(),
    )
    console = Console(quiet=not first, highlight=False)
    live = console.is_terminal
    with Progress(*columns, console=console, disable=not live) as progress, Path(runs_file).open("a") as runs:
        for method in settings.methods:
            total = (settings.epochs or task.epochs) * len(settings.seeds)
            bar = progress.add_task(method, total=total, quality="")

            def report(quality: float, bar: Any = bar) -> None:
                progress.update(bar, advance=1, quality=_shown(task, quality))

            for seed in settings.seeds:
                result = train(method, seed, settings, task, report)
                if first:
                    runs.write(json.dumps(result) + "\n")
                    runs.flush()
                    if not live:
                        console.print(f"{method}, seed {seed}: {task.metric} {_shown(task, result['quality'])}")
    grace.shutdown()


def _shown(task: Task, quality: float) -> str:
    return f"{task.scale * quality:.4g} {task.unit}".rstrip()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except GraceError as error:
        sys.exit(f"{type(error).__name__}: {error}")
