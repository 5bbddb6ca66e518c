"""One rank of a training benchmark; started as :mod:`grace.bench.ranks.run` does.

Usage: python -m grace.bench.train.worker FOLDER, where FOLDER holds settings.json; rank 0 writes events.jsonl:

    {"method"}             it begins with a method, and its optimizer if there are several
    {"quality"}            after each epoch
    {"run": {...}}         after each run
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grace
from grace.bench.ranks.events import write_event
from grace.bench.ranks.run import as_rank, redirect_stderr
from grace.bench.train.settings import Settings
from grace.bench.workloads.task import Task, in_optimizer, task_class, trainer_class
from grace.communicators.choice import build_communicator
from grace.session.momentum import momentum_owners

WARMUP_STEPS = 3
"""Run on a throw-away copy of the network first: kernels are compiled and buffers allocated there."""


def train(
    method: str,
    optimizer: str,
    seed: int,
    settings: Settings,
    task: Task,
    report: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Train from the seed's initial weights with one method; returns what was measured on this rank."""
    _steps(method, optimizer, seed, settings, task, limit=WARMUP_STEPS)
    return _steps(method, optimizer, seed, settings, task, report=report)


def _steps(
    method: str,
    optimizer: str,
    seed: int,
    settings: Settings,
    task: Task,
    limit: int | None = None,
    report: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    lr, epochs = settings.rates.get(method, task.rate(optimizer)), settings.epochs or task.epochs
    # a memory or compressor that has the momentum wants an optimizer without
    alone = "compressor" in in_optimizer(method) and bool(momentum_owners([build_communicator(method, None, None)]))
    momentum = 0.0 if alone else task.momentum
    trainer = trainer_class(settings.framework)(task, method, seed, lr, momentum, optimizer)
    marks = {round(1.15**power) for power in range(100)}
    step_seconds, codec_seconds, curve = [], [], []
    trained, per_epoch = 0.0, 1
    for epoch in range(1 if limit else epochs):
        shares = task.shares(grace.size(), grace.rank(), seed, epoch)[:limit]
        per_epoch = len(shares)
        for i, share in enumerate(shares, start=1):
            trainer.set_lr(lr * task.schedule(epoch * per_epoch + i - 1, epochs * per_epoch))
            codec_before = trainer.traffic.codec_seconds
            began = time.perf_counter()
            trainer.step(share)
            step_seconds.append(time.perf_counter() - began)
            trained += step_seconds[-1]
            traffic = trainer.traffic
            codec_seconds.append(traffic.codec_seconds - codec_before)
            if traffic.steps in marks or i == per_epoch:
                curve.append((epoch + i / per_epoch, traffic.sent_bytes, trained, trainer.quality()))
        if report is not None:
            report(curve[-1][-1])
    traffic = trainer.traffic
    return {
        "method": method,
        "optimizer": optimizer,
        "seed": seed,
        "lr": lr,
        "steps": traffic.steps,
        "parameters": traffic.elements // traffic.steps,
        "quality": curve[-1][-1],
        "sent_bytes_per_step": traffic.sent_bytes / traffic.steps,
        "bits_per_element": traffic.bits_per_element,
        "codec_ms": 1e3 * statistics.median(codec_seconds),
        "step_ms": 1e3 * statistics.median(step_seconds),
        "train_seconds": trained,
        "samples_per_s": traffic.steps * task.batch / trained,
        "curve": curve,
    }


def main(folder: str) -> None:
    """Train with every method and seed; rank 0 tells of the progress and of each run."""
    redirect_stderr(Path(folder))
    settings = Settings(**json.loads(Path(folder, "settings.json").read_text()))
    trainer_class(settings.framework).join(int(os.environ.get("OMP_NUM_THREADS", "1")))
    task = task_class(settings.task, settings.framework, settings.size)()

    def record(event: dict[str, Any]) -> None:
        if grace.rank() == 0:
            write_event(Path(folder, "events.jsonl"), event)

    for optimizer, method in itertools.product(settings.optimizers, settings.methods):
        record({"method": settings.label(method, optimizer)})
        for seed in settings.seeds:
            run = train(method, optimizer, seed, settings, task, lambda quality: record({"quality": quality}))
            record({"run": run})
    grace.shutdown()


if __name__ == "__main__":
    as_rank(main)
