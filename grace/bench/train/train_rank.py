"""One rank of a training benchmark.

Usage: python -m grace.bench.train.train_rank FOLDER, where FOLDER holds settings.json; rank 0 writes events.jsonl,
a line for each :class:`~grace.bench.common.events.Event`: the number of epochs of all runs, and again without methods
that refuse the task; qualities after epochs, and runs.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import grace
from grace.bench.common.results import Row
from grace.bench.ranks.rank_program import join_run, run_as_rank
from grace.bench.train.train_command import TrainSettings
from grace.bench.workloads.task import Task, in_optimizer
from grace.bench.workloads.tasks import task_class
from grace.bench.workloads.torch_tasks import Trainer
from grace.communicators.choice import build_communicator
from grace.errors import ConfigError, ExchangeError, RankError
from grace.session.hyperparameters import momentum_owners

WARMUP_STEPS = 3
"""Steps on a throw-away copy of the network before each run: kernels are compiled and buffers allocated there."""


def train(
    method: str,
    optimizer: str,
    seed: int,
    settings: TrainSettings,
    task: Task,
    limit: int | None = None,
    report: Callable[[float], None] | None = None,
) -> Row:
    """Train from the seed's initial weights with one method, and return the measurements of this rank.

    With a limit it is so many steps of a single epoch; ``report`` is called with the quality after each epoch. The
    curve has points (epochs, bytes sent, seconds of training, quality), the first before any step. The last step ends
    with a last outer round, where ranks train alone.
    """
    lr = settings.rates.get(method, task.rate(optimizer))
    epochs = 1 if limit else settings.epochs or task.epochs
    # a memory or compressor that has the momentum wants an optimizer without
    alone = "compressor" in in_optimizer(method) and bool(momentum_owners([build_communicator(method, None, None)]))
    momentum = 0.0 if alone else task.momentum
    trainer = Trainer(task, method, seed, lr, momentum, optimizer)
    marks = {round(1.15**power) for power in range(100)}  # steps with a point of the curve: evenly on a log axis
    step_seconds, codec_seconds = [], []
    curve = [(0.0, 0, 0.0, trainer.quality())]
    trained, per_epoch = 0.0, 1
    for epoch in range(epochs):
        shares = task.shares(grace.size(), grace.rank(), seed, epoch)[:limit]
        per_epoch = len(shares)
        for i, share in enumerate(shares, start=1):
            trainer.set_lr(lr * task.schedule(epoch * per_epoch + i - 1, epochs * per_epoch))
            codec_before = trainer.traffic.codec_seconds
            began = time.perf_counter()  # evaluations below do not count
            trainer.step(share)
            if (epoch + 1, i) == (epochs, per_epoch):
                trainer.optimizer.flush()  # a last outer round, where ranks train alone
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
        # means, not medians: most steps of ranks that train alone exchange nothing
        "codec_ms": 1e3 * statistics.fmean(codec_seconds),
        "step_ms": 1e3 * statistics.fmean(step_seconds),
        "train_seconds": trained,
        "samples_per_s": traffic.steps * task.batch / trained,
        "curve": curve,
    }


def main(folder: str) -> None:
    """Train with every method and seed; rank 0 writes the progress and each run."""
    with join_run(folder, TrainSettings) as (settings, _, emit):
        task = task_class(settings.task, settings.size)()
        runs = list(itertools.product(settings.optimizers, settings.methods, settings.seeds))
        epochs = settings.epochs or task.epochs
        skipped: dict[str, str] = {}
        emit({"blocks": len(runs) * epochs})
        for optimizer, method, seed in runs:
            name = settings.name_of(method, optimizer)
            if name in skipped:
                continue
            try:
                train(method, optimizer, seed, settings, task, limit=WARMUP_STEPS)
            except (ConfigError, RankError) as error:
                if isinstance(error, ExchangeError):  # else all ranks refuse the method, and none waits for this one
                    raise
                skipped[name] = str(error).splitlines()[0]
                left = len(runs) - len(skipped) * len(settings.seeds)
                emit({"facts": {"skipped": skipped}, "blocks": left * epochs})
                continue
            run = train(method, optimizer, seed, settings, task, report=lambda quality: emit({"quality": quality}))
            emit({"run": run})


if __name__ == "__main__":
    run_as_rank(main)
