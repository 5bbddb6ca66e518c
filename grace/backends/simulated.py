"""A run of many ranks that one process pretends to be: what exchanges compute can be timed without any other."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grace.core.backend import Backend, Handle, Tensor
from grace.core.route import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, EACH_BROADCASTS, GATHER, Leg, Route
from grace.errors import ConfigError
from grace.kernels import kernels_of

MOST_BYTES = 1 << 28
"""Bytes of copies that a collective makes of what this rank sends; beyond, ranks share copies."""
KNOWN = (ALL_REDUCE, ALL_GATHER, EACH_BROADCASTS, ALL_TO_ALL, GATHER, BROADCAST)
"""Collectives that are pretended."""


class SimulatedRanks(Backend):
    """A backend that pretends ``size`` ranks, all of which send what this rank sends.

    Nothing travels. What arrives is made of copies, as it would be of other memory than what was sent; the seconds that
    copying took are counted in ``spent``, so that who measures an exchange can leave them out. Bytes are counted as
    every backend counts them. What another rank broadcasts is what this rank broadcast before, if that is alike, and
    else what the tensor held before.

    Args:
        size: how many ranks.
        rank: which of them this one is.

    Raises:
        ConfigError: there is no such rank.

    >>> run = SimulatedRanks(3)
    >>> run.allreduce(np.float32([1, 2])).wait(), run.sent_bytes
    (array([3., 6.], dtype=float32), 11)
    >>> [part.tolist() for part in run.alltoall(np.uint8([7, 8, 9])).wait()]
    [[7], [7], [7]]
    """

    name = "simulated"

    def __init__(self, size: int, rank: int = 0):
        if not 0 <= rank < size:
            raise ConfigError(f"of {size} ranks, the numbers are 0 to {size - 1}; there is no rank {rank}")
        self.size, self.rank, self.local_rank = size, rank, rank
        self.spent = 0.0
        """Seconds that its collectives took."""
        self._broadcast: Tensor | None = None
        """Tensor that this rank broadcast last."""

    @property
    def is_its_own_channel(self) -> bool:
        return True  # so that it counts what every exchange sends

    def allreduce(self, tensor: Tensor) -> Handle:
        began = self._count(tensor, 2 * (self.size - 1) / self.size)
        with np.errstate(over="ignore", invalid="ignore"):
            tensor *= self.size  # of W numbers that are the same; a new tensor where tensors cannot change
        return self._done(tensor, began)

    def allgather(self, tensor: Tensor) -> Handle:
        began = self._count(tensor, self.size - 1)
        return self._done(self._copies(tensor), began)

    def concatenate(self, tensor: Tensor) -> Handle:
        began = self._count(tensor, self.size - 1)
        return self._done([kernels_of(tensor).join([tensor] * self.size)], began)

    def alltoall(self, tensor: Tensor) -> Handle:
        began, part = self._count(tensor, (self.size - 1) / self.size), tensor.shape[0] // self.size
        return self._done(self._copies(tensor[self.rank * part : (self.rank + 1) * part]), began)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        began = self._count(tensor, (self.size - 1) * (root == self.rank))
        if root == self.rank:
            self._broadcast = tensor
            return self._done(tensor, began)
        k, given = kernels_of(tensor), self._broadcast
        if given is not None and type(given) is type(tensor):
            alike = tuple(given.shape) == tuple(tensor.shape) and k.dtype(given) == k.dtype(tensor)
            if alike:
                tensor = k.reshape(k.join([k.flat(given)], k.flat(tensor) if k.mutable else None), tuple(tensor.shape))
        return self._done(tensor, began)

    def gather(self, tensor: Tensor, root: int) -> Handle:
        began = self._count(tensor, root != self.rank)
        return self._done(self._copies(tensor) if root == self.rank else [], began)

    def supported(self, route: Route, sums: bool) -> Route:
        """Return a route with known collectives in place of users' own; they bring as many tensors of the same size."""
        return [leg if leg.collective in KNOWN else _with_supported_collective(leg, sums) for leg in route]

    def duplicate(self) -> "SimulatedRanks":
        return self.copy_with(_broadcast=None)  # type: ignore[no-any-return]

    def split(self, ranks: Sequence[int]) -> "SimulatedRanks | None":
        return SimulatedRanks(len(ranks), list(ranks).index(self.rank)) if self.rank in ranks else None

    def allgather_object(self, value: object) -> list[Any]:
        return [value] * self.size

    def _count(self, tensor: Tensor, share: float) -> float:
        """Count the sent share of a tensor's bytes, and return the time."""
        self.count(share * kernels_of(tensor).nbytes(tensor))
        return time.perf_counter()

    def _done(self, result: Tensor | list[Tensor], began: float) -> Handle:
        self.spent += time.perf_counter() - began
        return Handle(lambda: None, result)

    def _copies(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy for each rank; ranks share copies of large tensors."""
        k = kernels_of(tensor)
        apart = max(1, min(self.size, MOST_BYTES // max(1, k.nbytes(tensor))))
        copies = [k.join([tensor]) for _ in range(apart)]
        return [copies[rank % apart] for rank in range(self.size)]


def _with_supported_collective(leg: Leg, sums: bool) -> Leg:
    """Return a leg with a known collective in place of a user's."""
    if sums:
        return replace(leg, collective=ALL_REDUCE)
    return replace(leg, collective=ALL_GATHER if leg.root is None else GATHER)
