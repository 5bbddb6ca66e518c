"""Contestants of ``grace bench step``: Grace's methods, and exchanges that people use without Grace."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import grace
import grace.torch
from grace.bench.step.settings import BOUND
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
    """Row of the benchmark, before it is measured.

    Attributes:
        name: its name in tables.
        kind: "bound", "baseline" or "grace".
        build: takes a model and its optimizer, and returns those that train over ranks.
        method: the compressor, if it is Grace's.
    """

    name: str
    kind: str
    build: Callable[[nn.Module, torch.optim.Optimizer], Trained]
    method: str | None = None


class Stepper:
    """Contestant with a model of its own: a call makes one training step, with plain SGD."""

    def __init__(self, contestant: Contestant, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]):
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.contestant = contestant
        self.loss = loss
        self.model, self.optimizer, self.exchange = contestant.build(model, optimizer)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()

    @property
    def planning(self) -> bool:
        """True if ``strategy="auto"`` has not chosen yet, or not checked its choice."""
        auto = getattr(getattr(self.exchange, "_grace", None), "auto", None)
        return auto is not None and not auto.settled

    @property
    def traffic(self) -> Traffic | None:
        """Counts of Grace's exchange; None for other contestants."""
        return getattr(self.exchange, "traffic", None)


def bound() -> Contestant:
    """Return the contestant whose ranks train alone: no exchange can be faster."""
    return Contestant(BOUND, "bound", lambda model, optimizer: (model, optimizer, None))


def torch_baselines() -> list[Contestant]:
    """Return the contestants with DistributedDataParallel: plain, and with torch's own hooks for 16 bits and
    PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def hooked(hook: Any, state: Callable[[], Any] = lambda: None, **options: Any) -> Callable[..., Trained]:
        def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
            wrapped = _ddp(model, **options)
            wrapped.register_comm_hook(state(), hook)
            return wrapped, optimizer, None

        return build

    def power() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)

    return [
        Contestant("DDP", "baseline", lambda model, optimizer: (_ddp(model), optimizer, None)),
        Contestant("DDP fp16 hook", "baseline", hooked(default_hooks.fp16_compress_hook)),
        Contestant("DDP bf16 hook", "baseline", hooked(default_hooks.bf16_compress_hook)),
        Contestant(
            f"DDP PowerSGD({POWERSGD_RANK}) hook",
            "baseline",
            hooked(powerSGD_hook.powerSGD_hook, power, bucket_cap_mb=ONE_BUCKET),
        ),
    ]


def horovod_baselines() -> list[Contestant]:
    """Return the contestants with Horovod's optimizer: plain, and with its 16-bit compression."""
    import horovod.torch as hvd

    def build(compression: Any) -> Callable[..., Trained]:
        def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            names = model.named_parameters()
            return model, hvd.DistributedOptimizer(optimizer, names, compression=compression), None

        return wrap

    return [
        Contestant("Horovod", "baseline", build(hvd.Compression.none)),
        Contestant("Horovod fp16", "baseline", build(hvd.Compression.fp16)),
    ]


def method(spec: str, bucket_bytes: int | None = None) -> Contestant:
    """Return the contestant of a compressor with its default memory and communicator, in Grace's optimizer."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        names = model.named_parameters()
        optimizer = grace.DistributedOptimizer(optimizer, names, compressor=spec, bucket_bytes=bucket_bytes)
        return model, optimizer, optimizer

    return Contestant(spec, "grace", build, spec)


def in_hook(spec: str, bucket_bytes: int | None = None) -> Contestant:
    """Return the contestant of a compressor in a communication hook of DistributedDataParallel."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        wrapped = _ddp(model)
        state = grace.torch.register_ddp_hook(wrapped, spec, bucket_bytes=bucket_bytes)
        return wrapped, optimizer, state

    return Contestant(f"{spec} in DDP's hook", "grace", build, spec)


def strategy(spec: str) -> Contestant:
    """Return the contestant of a strategy, of a file or a builder, in Grace's optimizer."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), strategy=spec)
        return model, optimizer, optimizer

    return Contestant(f"strategy {spec}", "grace", build, None)


def _ddp(model: nn.Module, **options: Any) -> Any:
    return nn.parallel.DistributedDataParallel(model, **options)
