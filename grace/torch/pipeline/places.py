"""Where this rank stands in a pipeline, and the groups of ranks that it shares something with."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from grace.core.backend import Backend
from grace.core.waits import waiting
from grace.errors import ConfigError
from grace.partition.plan import Plan
from grace.session.agreement import gather_or_raise
from grace.torch.pipeline.point_to_point import Place

_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""Groups that were made over a process group, which later pipelines use again: freeing one is a collective."""


@contextlib.contextmanager
def together(backend: Backend) -> Iterator[None]:
    """A context in which what fails on a rank fails on all of them. Every rank must enter it.

    Raises:
        RankError: another rank failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    gather_or_raise(backend, "a pipeline", None, error)


class Places:
    """The ranks of a plan. Every rank must make one.

    Args:
        plan: whose ranks are those of the run.
        backend: all ranks.

    Attributes:
        stages: numbers of this rank's stages.
        replica: of this rank, the same in all its stages.
        replicas: of each stage.
        own: the ranks of this rank's stages, as a backend.
        group: all ranks, for what travels between stages; None in a run of one process.
    """

    def __init__(self, plan: Plan, backend: Backend):
        if plan.world_size != backend.size:
            raise ConfigError(f"the plan is for {plan.world_size} ranks, and there are {backend.size}: plan again")
        self.backend, self.rank = backend, backend.rank
        mine = plan.place(backend.rank)
        self.stages = [stage for stage, _ in mine]
        self.replica = mine[0][1]
        self.replicas = plan.replicas
        self.ranks = [stage.ranks for stage in plan.stages]
        self.equal = len(set(self.replicas)) == 1
        for stage, replica in mine:
            if replica != self.replica or self.ranks[stage] != self.ranks[mine[0][0]]:
                raise ConfigError(f"rank {backend.rank} has stages of different replicas in the plan: {mine}")
        columns = list(dict.fromkeys(self.ranks))
        self.positions = len(columns)
        """How many ranks a pipeline has."""
        self.position = columns.index(self.ranks[mine[0][0]])
        self.own: Any = backend
        self.channel: Any = None
        if backend.size > 1:
            self.groups: dict[Any, Any] = _kept.setdefault(backend.group or dist.group.WORLD, {})  # type: ignore
            self.channel = self.groups.get("all") or backend.duplicate()
            self.groups["all"] = self.channel
            for ranks in columns:
                made = self.split(ranks)
                self.own = made if made is not None else self.own
        self.group = None if self.channel is None else self.channel.group

    def split(self, ranks: tuple[int, ...]) -> Any:
        """A backend of some ranks, None on others; all ranks make it."""
        if ranks not in self.groups:
            self.groups[ranks] = self.channel.split(list(ranks))
        return self.groups[ranks]

    def place(self, stage: int) -> Place | None:
        """Where a stage's ranks are; None if there is no such stage."""
        if not 0 <= stage < len(self.ranks):
            return None
        return Place(self.ranks[stage], self.replica if stage in self.stages else 0)

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """If the engine fails in here, the error says which rank has ended, or where it is, as far as it told.

        Raises:
            ExchangeError: it failed.
        """
        with waiting(lambda: what) as wait:
            try:
                yield
            except RuntimeError as error:
                if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                    raise  # the user's own
                raise self.backend.engine_error(wait.place(), "", error) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here on a rank fails on all of them. Every rank must enter it.

        Raises:
            RankError: another rank failed.
        """
        with together(self.backend):
            yield

    def total(self, value: float) -> float:
        """The sum over all ranks; every rank must call it."""
        if self.channel is None:
            return value
        tensor = self.channel.tensor_of([value]).double()
        self.channel.allreduce(tensor).wait()
        return float(tensor)

    def from_rank(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's values, in place; every rank must call it."""
        if self.channel is not None:
            self.channel.broadcast(tensor, rank).wait()
        return tensor
