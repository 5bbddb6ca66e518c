"""The backend of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.backend import Backend, Handle, Tensor


class LocalBackend(Backend):
    """One process, no launcher: every collective returns what it was given, and nothing is sent.

    >>> LocalBackend().describe()
    'local, rank 0 of 1'
    """

    name = "local"

    def allreduce(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, tensor)

    def allgather(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, [tensor])

    def alltoall(self, tensor: Tensor) -> Handle:
        return Handle(lambda: None, [tensor])

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return Handle(lambda: None, tensor)

    def gather(self, tensor: Tensor, root: int) -> Handle:
        return Handle(lambda: None, [tensor])

    def beside(self) -> LocalBackend:
        return LocalBackend()

    def among(self, ranks: Sequence[int]) -> LocalBackend | None:
        return LocalBackend() if 0 in ranks else None

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]
