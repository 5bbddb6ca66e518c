"""EF-SignSGD's memory: error feedback that follows the learning rate."""

from dataclasses import dataclass

from grace.core.compressor import Shape, Tensor
from grace.core.memory import ErrorFeedback


@dataclass
class EFSignSGDMemory(ErrorFeedback):
    """Memory of the paper's error feedback e_{t+1} = p - C(p), p = lr g + e, divided by the learning rate.

        x = r lr_prev / lr + g,    r = x - C(x)

    ``lr`` is read from the optimizer at every step, so schedules are followed. While lr is 0 no update
    reaches the weights, so the gradient alone is sent and r stays. Source: Karimireddy et al., ICML 2019,
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

    def keeps(self, shape: Shape) -> dict[str, Shape | type[float]]:
        return {"residual": shape, "lr": float}

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        lr = self.context.lr(name)
        if name not in self.state or lr == 0:
            return 1.0, None, 1.0
        kept = self.state[name]
        return kept["lr"] / lr, kept["residual"], 1.0

    def keep(self, name: str, residual: Tensor) -> None:
        lr = self.context.lr(name)
        if lr != 0:
            self.state[name] = {"residual": residual, "lr": float(lr)}

    def rescale(self, factor: float) -> None:
        # The learning rate is in other units than gradients.
        self.state.map(lambda value: value if isinstance(value, float) else value * factor)
