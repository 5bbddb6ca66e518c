"""Error feedback by a smoothed error."""

from dataclasses import dataclass
from numbers import Number

from grace.core.compressor import Compressor, Ctx, Payload, Shape, Tensor
from grace.core.memory import Memory
from grace.kernels import kernels_of


@dataclass
class LoCo(Memory):
    """Memory of a moving average of compression errors: x = e + g, then e = (1 - beta) e + beta (x - C(x)).

    If errors are rounding noise, as those of quantizers, the average has less noise than the last error. Unlike a
    residual it does not return everything that was left out. Every ``reset`` steps e begins at 0 again, so that old
    errors do not stay; if that step overflows, or leaves a variable out, at the variable's next step. Source: Xie et
    al., "LoCo", arXiv 2407.04480, algorithm 1, which keeps e in 8 bits; here it is float32.

    Args:
        beta: weight of the newest error; 1 is the last error alone, a residual.
        reset: number of steps after which e is reset to 0; 0 for never.

    >>> import numpy as np
    >>> from grace.compressors.topk import TopK
    >>> memory, topk = LoCo(beta=0.5), TopK(ratio=0.5)
    >>> x = memory.compensate(np.float32([3, 1]), "w")
    >>> memory.update(x, "w", topk, *topk.compress(x, "w"))
    >>> memory.compensate(np.float32([0, 0]), "w")
    array([0. , 0.5], dtype=float32)
    """

    beta: float = 0.5
    reset: int = 512

    name = "loco"

    def __post_init__(self) -> None:
        self.check_number("beta", 0, 1, low_open=True)
        self.check_integer("reset", 0)

    def keeps(self, shape: Shape) -> dict[str, Shape | type[float]]:
        return {"error": shape, "resets": float}

    def _recall(self, name: str) -> Tensor | None:
        """Return e of a variable; None if it is 0."""
        kept = self.state.get(name)
        return None if kept is None or kept["resets"] != self._resets() else kept["error"]

    def _resets(self) -> int:
        """Return the number of resets of e that are due until this step."""
        # A count, where one could clear e: it holds whether or not the step of the reset is rolled back.
        return self.context.step // self.reset if self.reset else 0

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        k, error = kernels_of(tensor), self._recall(name)
        return k.combine(1.0, tensor, 0.0, tensor) if error is None else k.combine(1.0, error, 1.0, tensor)

    def update(self, tensor: Tensor, name: str, compressor: Compressor, payload: Payload, ctx: Ctx) -> None:
        k, error = kernels_of(tensor), self._recall(name)
        left_out = compressor.accumulate(payload, ctx, tensor, -1.0)
        if error is None:
            error = k.zeros(tuple(left_out.shape), "float32", left_out)
        self.state[name] = {"error": k.combine(1 - self.beta, error, self.beta, left_out), "resets": self._resets()}

    def rescale(self, factor: float) -> None:
        # The number of resets is in other units than gradients.
        self.state.map(lambda value: value if isinstance(value, Number) else value * factor)
