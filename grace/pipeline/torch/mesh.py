"""The mesh of a pipeline: this rank's stage and replica, and the groups of ranks that it communicates with."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from grace.backends.torch_distributed import TorchBackend
from grace.core.backend import Backend
from grace.core.waits import waiting
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.torch.initial_sync import as_bytes

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...] | str, Backend | None]] = (
    weakref.WeakKeyDictionary()
)
"""Groups that were made over a process group. Later pipelines reuse them, since freeing one is a collective."""


Overlap = tuple[int, int, int]
"""Rows that this replica shares with a replica of another stage: the other's rank, first row, and number of rows."""


def overlaps(replica: int, replicas: int, others: Sequence[int], rows: int) -> list[Overlap]:
    """Return the rows that a replica of a stage, with so many rows, shares with each replica of another stage, whose
    ranks are given. Replica r of R has rows [r M/R, (r+1) M/R) of M.

    >>> overlaps(0, 1, (1, 2), 8), overlaps(1, 2, (0,), 4)
    ([(1, 0, 4), (2, 4, 4)], [(0, 0, 4)])
    """
    first = rows * replica
    found = []
    for q, rank in enumerate(others):
        other_rows = rows * replicas // len(others)
        low = max(first, q * other_rows)
        high = min(first + rows, (q + 1) * other_rows)
        if low < high:
            found.append((rank, low - first, high - low))
    return found


class Mesh:
    """The ranks of a plan, which must be for as many ranks as the run has. Every rank must make one.

    Attributes:
        stage: number of this rank's stage.
        replica: number of this rank's replica of the stage.
        replicas: number of replicas of each stage.
        ranks: ranks of each stage.
        stage_backend: the backend of the ranks that have this rank's stage.
        group: process group of all ranks, for messages between stages; None in a run of one process.
        device: the device that this rank computes on.
    """

    def __init__(self, plan: PipelinePlan, backend: Backend, device: torch.device):
        self.backend = backend
        self.device = device
        self.rank = backend.rank
        self.stage, self.replica = plan.stage_and_replica(backend.rank)
        self.replicas = plan.replicas
        self.ranks = [stage.ranks for stage in plan.stages]
        self.equal_replicas = len(set(self.replicas)) == 1
        self.stage_backend = backend
        self.channel: Backend | None = None
        self.group: dist.ProcessGroup | None = None
        if isinstance(backend, TorchBackend) and backend.size > 1:
            self.groups = _groups.setdefault(backend.group or dist.group.WORLD, {})  # type: ignore[arg-type]
            # messages between stages must not mix with the collectives of the user's group
            self.channel = self.groups.get("all") or backend.duplicate()
            self.group = self.channel.group  # type: ignore[attr-defined]  # a duplicate is of the same class
            self.groups["all"] = self.channel
            for ranks in self.ranks:
                group = self.split(ranks)  # a collective: all ranks make all groups
                self.stage_backend = group if group is not None else self.stage_backend

    def split(self, ranks: tuple[int, ...]) -> Backend | None:
        """Return a backend of some ranks, None on all others. Every rank must call it."""
        assert self.channel is not None  # one rank has no tied copies elsewhere, and calls no split
        if ranks not in self.groups:
            self.groups[ranks] = self.channel.split(list(ranks))
        return self.groups[ranks]

    @contextlib.contextmanager
    def naming_failed_rank(self, what: str) -> Iterator[None]:
        """Return a context that raises ExchangeError if the engine fails, which names the rank that has ended, or where
        each rank is."""
        with waiting(lambda: what) as wait:
            try:
                yield
            except RuntimeError as error:
                if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                    raise  # an error of the user's model
                raise self.backend.engine_error(wait.place(), "", error) from error

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum over all ranks. Every rank must call it."""
        if self.channel is None:
            return value
        tensor = self.channel.tensor_of(np.array([value], np.float32)).double()  # float32 shares, added in float64
        self.channel.allreduce(tensor).wait()
        return float(tensor)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's tensor, on this rank's device. Every rank must call it; others' tensors are overwritten."""
        tensor = tensor.to(self.device)  # of one kind on all ranks: torch has an engine for each kind of device
        if self.channel is not None:
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
            self.channel.broadcast(as_bytes(tensor), rank).wait()
        return tensor
