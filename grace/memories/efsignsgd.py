"""EF-SignSGD's memory: error feedback that follows the learning rate."""

from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Compressor, Payload, Tensor
from grace.core.memory import Memory
from grace.kernels import kernels_of


@dataclass
class EFSignSGDMemory(Memory):
    """The paper's error feedback e_{t+1} = p - C(p), p = lr g + e, divided by the learning rate.

        x = r lr_prev / lr + g,    r = x - C(x)

    ``lr`` is read from the optimizer at every step, so schedules are followed. While lr is 0 no update
    reaches the weights, so the gradient alone is sent and r waits. Source: Karimireddy et al., ICML 2019,
    arXiv 1901.09847, algorithm 1.

    >>> import numpy as np
    >>> from grace.compressors.efsignsgd import EFSignSGD
    >>> memory, sign = EFSignSGDMemory(), EFSignSGD()
    >>> x = memory.compensate(np.float32([1, -3]), "w")
    >>> memory.update(x, "w", sign, *sign.compress(x, "w"))
    >>> memory.context.lr = lambda name: 0.5
    >>> memory.compensate(np.float32([0, 0]), "w")
    array([-2., -2.], dtype=float32)
    """

    name = "efsignsgd"
    needs_lr = True

    def keeps(self, shape: tuple[int, ...]) -> Any:
        return {"residual": shape, "lr": float}

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        k = kernels_of(tensor)
        lr = self.context.lr(name)
        if name not in self.state or lr == 0:
            return k.combine(1.0, tensor, 0.0, tensor)
        kept = self.state[name]
        return k.combine(kept["lr"] / lr, kept["residual"], 1.0, tensor)

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Any) -> None:
        lr = self.context.lr(name)
        if lr != 0:
            self.state[name] = {"residual": compressor.accumulate(payload, ctx, tensor, -1.0), "lr": float(lr)}

    def rescale(self, factor: float) -> None:
        self.state.map(lambda value: value if isinstance(value, float) else value * factor)
