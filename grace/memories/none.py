"""No memory."""

from dataclasses import dataclass

from grace.core.compressor import Compressor, Ctx, Payload, Tensor
from grace.core.memory import Memory


@dataclass
class NoMemory(Memory):
    """Memory that keeps nothing: x = g.

    >>> NoMemory().compensate(3.0, "w")
    3.0
    """

    name = "none"
    stateful = False

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        pass
