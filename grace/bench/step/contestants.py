"""Contestants of ``grace bench step``: Grace's methods, and exchanges that people use without Grace."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import grace
import grace.torch
from grace.bench.step.step_settings import BOUND
from grace.exchange.bucket import Traffic

LR = 1e-4
"""Learning rate: so small that no method diverges in the steps that are timed."""
ONE_BUCKET = 100_000
"""MB of a bucket that holds any model: torch's PowerSGD hook may pair the collectives of several buckets wrongly over
gloo, and abort."""
POWERSGD_RANK = 4

Trained = tuple[nn.Module, torch.optim.Optimizer, Any]
"""Model and optimizer that train over ranks, and the object with ``traffic``."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Row of the benchmark, before it is measured: its kind is "bound", "baseline" or "grace"; ``build`` takes a model
    and its optimizer, and returns those that train over ranks; ``method`` is the compressor, if it is Grace's."""

    name: str
    kind: str
    build: Callable[[nn.Module, torch.optim.Optimizer], Trained]
    method: str | None = None


class Stepper:
    """Contestant with a model of its own: a call makes one training step, with plain SGD."""

    def __init__(self, contestant: Contestant, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]):
        model = copy.deepcopy(model)  # contestants take turns, each from the same weights
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.contestant = contestant
        self.loss = loss
        # FSDP2 gives back another optimizer: its parameters are new tensors
        self.model, self.optimizer, self.exchange = contestant.build(model, optimizer)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()

    @property
    def planning(self) -> bool:
        """True if ``strategy="auto"`` has not chosen yet, or not checked its choice."""
        driver = getattr(getattr(self.exchange, "_grace", None), "driver", None)
        return driver is not None and not driver.settled

    @property
    def period(self) -> int:
        """Number of steps after which the same work comes again: that between outer rounds, if ranks train alone."""
        runner = getattr(getattr(self.exchange, "_grace", None), "runner", None)
        return math.lcm(*(shard.period or 1 for shard in runner.shards.values())) if runner is not None else 1

    @property
    def traffic(self) -> Traffic | None:
        """Counts of Grace's exchange; None for other contestants."""
        return getattr(self.exchange, "traffic", None)


def bound() -> Contestant:
    """Return the contestant whose ranks train alone: no exchange can be faster."""
    return Contestant(BOUND, "bound", lambda model, optimizer: (model, optimizer, None))


def in_optimizer(name: str, method: str | None = None, **choices: Any) -> Contestant:
    """Return a contestant in Grace's optimizer; ``method`` is its compressor, if it has one for all variables."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        optimizer = grace.DistributedOptimizer(optimizer, model, **choices)  # which finds its sparse embeddings
        return model, optimizer, optimizer

    return Contestant(name, "grace", build, method)


def in_hook(spec: str, bucket_bytes: int | None = None) -> Contestant:
    """Return the contestant of a compressor in a communication hook of DistributedDataParallel."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        wrapped = DistributedDataParallel(model)
        state = grace.torch.register_ddp_hook(wrapped, spec, bucket_bytes=bucket_bytes)
        return wrapped, optimizer, state

    return Contestant(f"{spec} in DDP's hook", "grace", build, spec)


def torch_baselines() -> list[Contestant]:
    """Return the contestants with plain DistributedDataParallel, and with torch's hooks: 16 bits, PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def build(model: nn.Module, optimizer: torch.optim.Optimizer, hook: Any, rank: int = 0, **options: Any) -> Trained:
        wrapped = DistributedDataParallel(model, **options)
        if hook is not None:
            state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2) if rank else None
            wrapped.register_comm_hook(state, hook)
        return wrapped, optimizer, None

    power = {"hook": powerSGD_hook.powerSGD_hook, "rank": POWERSGD_RANK, "bucket_cap_mb": ONE_BUCKET}
    choices: dict[str, dict[str, Any]] = {
        "DDP": {"hook": None},
        "DDP fp16 hook": {"hook": default_hooks.fp16_compress_hook},
        "DDP bf16 hook": {"hook": default_hooks.bf16_compress_hook},
        f"DDP PowerSGD({POWERSGD_RANK}) hook": power,
    }
    return [Contestant(name, "baseline", functools.partial(build, **chosen)) for name, chosen in choices.items()]


def horovod_baselines() -> list[Contestant]:
    """Return the contestants with Horovod's optimizer: plain, and with its 16-bit compression."""
    import horovod.torch as hvd

    def build(compression: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), None

    choices = {"Horovod": hvd.Compression.none, "Horovod fp16": hvd.Compression.fp16}
    return [Contestant(name, "baseline", functools.partial(build, chosen)) for name, chosen in choices.items()]
