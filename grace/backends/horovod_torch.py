"""Horovod backend for torch: named operations, which find each other in whatever order ranks start them."""

import functools
import os
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet

from grace.backends.horovod import HorovodBackend, Operation, alltoall_output
from grace.core.backend import Handle
from grace.core.watch import TimeoutCheck
from grace.errors import ConfigError, ExchangeError

POLL_SECONDS = 50e-6
"""Seconds between two looks at an operation; Horovod itself looks every millisecond."""


class HorovodExchangeError(ExchangeError, HorovodInternalError):
    """Error of a collective from which Horovod's elastic mode recovers."""


class TorchHorovodBackend(HorovodBackend):
    """Collectives of one Horovod process set."""

    hvd = hvd
    framework = "torch"
    failure = HorovodExchangeError

    def rejoin(self) -> None:
        self.elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        super().rejoin()
        self._calls = 0

    @classmethod
    def named(cls, call_prefix: str) -> "TorchHorovodBackend":
        """Return a backend over all ranks, for one call from outside of Grace, whose operations have this name."""
        backend = cls()
        backend._call_prefix = call_prefix
        return backend

    @property
    def label(self) -> str:  # type: ignore[override]
        """Prefix of the names of the next operations. Their numbers start again with every assignment, because ranks
        may start exchanges in any order."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = label
        self._in_label = 0

    _label = ""
    _in_label = 0
    _optimizers: ClassVar[weakref.WeakKeyDictionary[ProcessSet, int]] = weakref.WeakKeyDictionary()
    """Number of optimizers by process set."""

    def count_optimizer(self) -> int:
        """Return the number of one more optimizer over this process set: operations of two must have different
        names."""
        self._optimizers[self.process_set] = number = self._optimizers.get(self.process_set, 0) + 1
        return number

    def _name(self) -> str:
        """Return a name that every rank gives the same operation: the exchange's, or a number in the order of calls."""
        if self.label:
            self._in_label += 1
            return f"{self.label}.{self._in_label}"
        self._calls += 1
        return f"{self._call_prefix}{self._calls}"

    def start(self, operation: Operation) -> Handle:
        return Handle(OperationWait(self, operation), later=operation.result)

    def begin(self, operation: Operation, name: str) -> int:
        """Begin an operation under a name, and return Horovod's handle."""
        options = {"name": name, "process_set": self.process_set}
        tensor = operation.tensor
        if operation.kind == "allreduce" and tensor.dtype == torch.bfloat16:
            # Horovod does not know bfloat16: each rank sums a part in float32, and gathers the others'
            padded = tensor.new_zeros(self.size * -(-tensor.numel() // self.size))
            padded[: tensor.numel()] = tensor.view(-1)
            return hvd.alltoall_async(padded.view(torch.uint8), **options)
        if operation.kind == "allreduce":
            return hvd.allreduce_async_(tensor, op=hvd.Sum, **options)
        sent = _as_bytes(tensor)
        if operation.kind == "broadcast":
            return hvd.broadcast_async_(sent, self._global(operation.root), **options)
        if operation.kind == "allgather":
            return hvd.allgather_async(sent, **options)
        splits = None
        if operation.kind == "gather":
            splits = torch.zeros(self.size, dtype=torch.int32, device="cpu")
            splits[operation.root] = sent.numel()
        return hvd.alltoall_async(sent, splits, **options)

    def receive(self, operation: Operation, name: str, output: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Set the received tensor of an operation from Horovod's output."""
        tensor, received = operation.tensor, alltoall_output(output)
        if operation.kind == "allreduce" and tensor.dtype == torch.bfloat16:
            parts = received.view(torch.bfloat16).view(self.size, -(-tensor.numel() // self.size))
            total = parts.sum(0, dtype=torch.float32).to(torch.bfloat16).view(torch.uint8)
            whole = hvd.allgather(total, name=f"{name}.totals", process_set=self.process_set)
            tensor.view(-1).copy_(whole.view(torch.bfloat16)[: tensor.numel()])
        in_place = operation.kind in ("allreduce", "broadcast")
        operation.received = tensor if in_place else received.view(tensor.dtype)

    def split(self, ranks: Sequence[int]) -> "TorchHorovodBackend | None":
        process_set = _process_set(tuple(self._global(rank) for rank in ranks))
        if self.rank not in ranks:
            return None
        other = TorchHorovodBackend(process_set)
        other.timeout = self.timeout
        other._call_prefix = f"grace.split{other.count_optimizer()}.call"  # there may be others over the same set
        return other

    def tensor_of(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device="cpu")


@functools.cache
def _process_set(ranks: tuple[int, ...]) -> ProcessSet:
    """Return Horovod's set of these ranks, of which there must be only one."""
    if ranks == tuple(range(hvd.size())):
        return hvd.global_process_set
    try:
        return hvd.add_process_set(list(ranks))
    except Exception as error:
        raise ConfigError(
            f"Horovod makes no set of the ranks {list(ranks)}: {error} Start it with HOROVOD_DYNAMIC_PROCESS_SETS=1"
        ) from error


class OperationWait:
    """Wait for an operation that was begun; only the first call waits."""

    def __init__(self, backend: TorchHorovodBackend, operation: Operation):
        self.backend = backend
        self.operation = operation
        self.name = backend._name()
        self.work: int | None = backend.begin(operation, self.name)

    def __call__(self) -> None:
        if self.work is None:
            return
        check = TimeoutCheck(self.backend)
        while not hvd.poll(self.work):
            time.sleep(POLL_SECONDS)
            check()
        work = self.work
        self.work = None  # a second call must not wait for Horovod's handle again
        self.backend.receive(self.operation, self.name, hvd.synchronize(work))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as bytes, in the same memory, if Horovod does not know its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bool, torch.bfloat16) else tensor
