"""Error feedback by residuals."""

from dataclasses import dataclass

from grace.core.compressor import Shape, Tensor
from grace.core.memory import ErrorFeedback


@dataclass
class Residual(ErrorFeedback):
    """Memory of the compression error of earlier steps: x = beta r + gamma g, then r = x - decompress(compress(x)).

    :class:`~grace.core.memory.ErrorFeedback` computes both; fused kernels compute the same for whole buckets. r starts
    at 0. With beta = gamma = 1, sent + new residual = gradient + old residual at every step.
    Sources: Seide et al., Interspeech 2014; Stich et al., NeurIPS 2018, arXiv 1809.07599.

    Args:
        beta: decay of the residual.
        gamma: weight of the new gradient.

    >>> import numpy as np
    >>> from grace.compressors.topk import TopK
    >>> memory, topk = Residual(), TopK(ratio=0.5)
    >>> x = memory.compensate(np.float32([3, 1]), "w")
    >>> memory.update(x, "w", topk, *topk.compress(x, "w"))
    >>> memory.compensate(np.float32([0, 0]), "w")
    array([0., 1.], dtype=float32)
    """

    beta: float = 1.0
    gamma: float = 1.0

    name = "residual"

    def __post_init__(self) -> None:
        self.check_number("beta", 0, 1)
        self.check_number("gamma", 0, 1, low_open=True)

    def keeps(self, shape: Shape) -> Shape:
        return shape

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        return self.beta, self.state.get(name), self.gamma

    def keep(self, name: str, residual: Tensor) -> None:
        self.state[name] = residual
