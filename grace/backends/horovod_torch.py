"""Horovod backend for torch: named operations, which find each other in whatever order ranks start them."""

import functools
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from grace.backends.horovod import OverHorovod, alltoall_output
from grace.core.backend import Handle
from grace.core.watch import Patience
from grace.errors import ConfigError, ExchangeError

POLL_SECONDS = 50e-6
"""Seconds between two looks at an operation; Horovod itself looks every millisecond."""


class HorovodExchangeError(ExchangeError, HorovodInternalError):
    """Error of a collective from which Horovod's elastic mode recovers."""


class HorovodBackend(OverHorovod):
    """Collectives of one Horovod process set."""

    hvd = hvd
    framework = "torch"
    failure = HorovodExchangeError

    def rejoin(self) -> None:
        self.elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        super().rejoin()
        self._calls = 0

    @classmethod
    def named(cls, calls_are: str) -> "HorovodBackend":
        """Return a backend over all ranks, for one call from outside of Grace, whose operations have this name."""
        backend = cls()
        backend._calls_are = calls_are
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
    _optimizers: ClassVar[weakref.WeakKeyDictionary[Any, int]] = weakref.WeakKeyDictionary()
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
        return f"{self._calls_are}{self._calls}"

    def allreduce(self, tensor: torch.Tensor) -> Handle:
        self.count(2 * (self.size - 1) / self.size * tensor.nbytes)
        if tensor.dtype == torch.bfloat16:
            return self._sum_bfloats(tensor)
        work = hvd.allreduce_async_(tensor, name=self._name(), op=hvd.Sum, process_set=self.process_set)
        return Handle(Operation(self, work, lambda output: None), tensor)

    def _sum_bfloats(self, tensor: torch.Tensor) -> Handle:
        """Sum bfloat16, which Horovod does not know: each rank sums a part of the tensor in float32, and gathers the
        others'."""
        name = self._name()
        length = -(-tensor.numel() // self.size)
        padded = tensor.new_zeros(self.size * length)
        padded[: tensor.numel()] = tensor.view(-1)
        work = hvd.alltoall_async(padded.view(torch.uint8), name=name, process_set=self.process_set)

        def gather(output: Any) -> None:
            parts = alltoall_output(output).view(torch.bfloat16).view(self.size, length)
            total = parts.sum(0, dtype=torch.float32).to(torch.bfloat16).view(torch.uint8)
            whole = hvd.allgather(total, name=f"{name}.totals", process_set=self.process_set)
            tensor.view(-1).copy_(whole.view(torch.bfloat16)[: tensor.numel()])

        return Handle(Operation(self, work, gather), tensor)

    def allgather(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) * tensor.nbytes)
        work = hvd.allgather_async(_as_bytes(tensor), name=self._name(), process_set=self.process_set)
        gathered: list[torch.Tensor] = []

        def collect(output: Any) -> None:
            gathered.extend(output.view(tensor.dtype).view(self.size, -1).unbind())

        return Handle(Operation(self, work, collect), gathered)

    def concatenate(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) * tensor.nbytes)
        work = hvd.allgather_async(tensor, name=self._name(), process_set=self.process_set)
        gathered: list[torch.Tensor] = []
        return Handle(Operation(self, work, gathered.append), gathered)

    def alltoall(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) / self.size * tensor.nbytes)
        work = hvd.alltoall_async(_as_bytes(tensor), name=self._name(), process_set=self.process_set)
        parts: list[torch.Tensor] = []

        def collect(output: Any) -> None:
            parts.extend(alltoall_output(output).view(tensor.dtype).view(self.size, -1).unbind())

        return Handle(Operation(self, work, collect), parts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * tensor.nbytes)
        work = hvd.broadcast_async_(
            _as_bytes(tensor), self._global(root), name=self._name(), process_set=self.process_set
        )
        return Handle(Operation(self, work, lambda output: None), tensor)

    def gather(self, tensor: torch.Tensor, root: int) -> Handle:
        if root != self.rank:
            self.count(tensor.nbytes)
        splits = torch.zeros(self.size, dtype=torch.int32)
        sent = _as_bytes(tensor)
        splits[root] = sent.numel()
        work = hvd.alltoall_async(sent, splits, name=self._name(), process_set=self.process_set)
        gathered: list[torch.Tensor] = []

        def collect(output: Any) -> None:
            if root == self.rank:
                gathered.extend(alltoall_output(output).view(tensor.dtype).view(self.size, -1).unbind())

        return Handle(Operation(self, work, collect), gathered)

    def duplicate(self) -> "HorovodBackend":
        other = HorovodBackend(self.process_set)
        other.timeout = self.timeout
        other._calls_are = f"{self._calls_are}.duplicate"
        return other

    def split(self, ranks: Sequence[int]) -> "HorovodBackend | None":
        process_set = _process_set(tuple(self._global(rank) for rank in ranks))
        if self.rank not in ranks:
            return None
        other = HorovodBackend(process_set)
        other.timeout = self.timeout
        other._calls_are = f"grace.split{other.count_optimizer()}.call"  # there may be others over the same set
        return other

    def allgather_object(self, value: Any) -> list[Any]:
        with self.checked_operation("allgather_object"):
            return self.allgather_pickled(value)

    def tensor_of(self, array: Any) -> torch.Tensor:
        return torch.tensor(array)


@functools.cache
def _process_set(ranks: tuple[int, ...]) -> Any:
    """Return Horovod's set of these ranks, of which there must be only one."""
    if ranks == tuple(range(hvd.size())):
        return hvd.global_process_set
    try:
        return hvd.add_process_set(list(ranks))
    except Exception as error:
        raise ConfigError(
            f"Horovod makes no set of the ranks {list(ranks)}: {error} Start it with HOROVOD_DYNAMIC_PROCESS_SETS=1"
        ) from error


class Operation:
    """Waiting for a Horovod operation, whose output is passed on once.

    Args:
        backend: the operation's backend.
        work: Horovod's handle.
        done: called with the output.
    """

    def __init__(self, backend: HorovodBackend, work: int, done: Any):
        self.backend = backend
        self.work = work
        self.done = done

    def __call__(self) -> None:
        if self.done is None:
            return
        patience = Patience(self.backend)
        while not hvd.poll(self.work):
            time.sleep(POLL_SECONDS)
            patience()
        output = hvd.synchronize(self.work)
        done = self.done
        self.done = None  # a second call must not wait for Horovod's handle again
        done(output)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as bytes, in the same memory, if Horovod does not know its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.bool, torch.bfloat16) else tensor
