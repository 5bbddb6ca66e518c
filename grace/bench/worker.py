"""One rank of a training benchmark; started by a launcher, see :mod:`grace.bench.launch`.

Usage: LAUNCHER ... -m grace.bench.worker FOLDER RUNS.jsonl, where FOLDER holds settings.json
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grace
from grace.bench.follow import tell
from grace.bench.launch import redirect_stderr
from grace.bench.task import Task, task_class, trainer_class
from grace.bench.training import Settings
from grace.errors import GraceError
from grace.plans import build_communicator

WARMUP_STEPS = 3
"""Run on a throw-away copy of the network first: kernels are compiled and buffers allocated there."""


def train(
    method: str, seed: int, settings: Settings, task: Task, report: Callable[[float], None] | None = None
) -> dict[str, Any]:
    """Train from the seed's initial weights with one method; returns what was measured on this rank."""
    _steps(method, seed, settings, task, limit=WARMUP_STEPS)
    return _steps(method, seed, settings, task, report=report)


def _steps(
    method: str,
    seed: int,
    settings: Settings,
    task: Task,
    limit: int | None = None,
    report: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    lr, epochs = settings.rates.get(method, task.lr), settings.epochs or task.epochs
    # a memory that has the momentum wants an optimizer without
    momentum = 0.0 if build_communicator(method, None, None).memory.owns_momentum else task.momentum
    trainer = trainer_class(settings.framework)(task, method, seed, lr, momentum)
    marks = {round(1.15**power) for power in range(100)}
    step_seconds, codec_seconds, curve = [], [], []
    for epoch in range(1 if limit else epochs):
        trainer.set_lr(lr * (1 + math.cos(math.pi * epoch / epochs)) / 2)
        for share in task.shares(grace.size(), grace.rank(), seed, epoch)[:limit]:
            codec_before = trainer.traffic.codec_seconds
            began = time.perf_counter()
            trainer.step(share)
            step_seconds.append(time.perf_counter() - began)
            traffic = trainer.traffic
            codec_seconds.append(traffic.codec_seconds - codec_before)
            if traffic.steps in marks:
                curve.append((traffic.sent_bytes, trainer.quality()))
        if report is not None:
            report(trainer.quality())
    traffic = trainer.traffic
    curve.append((traffic.sent_bytes, trainer.quality()))
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


def main(folder: str, runs_file: str) -> None:
    """Train with every method and seed; rank 0 records the progress and each run."""
    redirect_stderr(Path(folder))
    settings = Settings(**json.loads(Path(folder, "settings.json").read_text()))
    trainer_class(settings.framework).join(int(os.environ.get("OMP_NUM_THREADS", "1")))
    task = task_class(settings.task, settings.framework)()

    def record(file: str | Path, fact: dict[str, Any]) -> None:
        if grace.rank() == 0:
            tell(Path(file), fact)

    progress = Path(folder, "progress.jsonl")
    for method in settings.methods:
        record(progress, {"method": method})
        for seed in settings.seeds:
            result = train(method, seed, settings, task, lambda quality: record(progress, {"quality": quality}))
            record(runs_file, result)
            record(progress, {key: result[key] for key in ("method", "seed", "quality")})
    grace.shutdown()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except GraceError:
        sys.tracebacklimit = 0
        raise
