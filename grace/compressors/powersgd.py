"""PowerSGD: low-rank compression by one step of power iteration."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Compressor, Payload, Tensor, Traits
from grace.kernels import Kernels, kernels_of


@dataclass
class PowerSGD(Compressor):
    """Approximates the gradient, as a matrix, by P Q^T of the given rank, both averaged over ranks.

    M is the gradient as (first dimension) x (the rest), for convolutions output channels x the rest.

        1. P = M Q              (mean over ranks)
        2. P = orthonormalize(P)
        3. Q = M^T P            (mean over ranks; kept for the next step if ``warm_start``)
        4. C(M) = P Q^T, the same on every rank; the residual is M - P Q^T

    The first Q comes from the shared random stream, and so does any column that has become zero. Tensors
    of fewer than two dimensions, and those that it would not shrink, travel dense. Source: Vogels et al.,
    "PowerSGD", NeurIPS 2019, arXiv 1905.13727.

    Args:
        rank: columns of P and Q.
        warm_start: start from the last step's Q.

    >>> import numpy as np
    >>> m = np.outer(np.float32([1, 2, 3]), np.float32([1, -1]))
    >>> powersgd = PowerSGD(rank=1)
    >>> np.allclose(powersgd.decompress(*powersgd.compress(m, "w")), m, atol=1e-5)
    True
    """

    rank: int = 1
    warm_start: bool = True

    name = "powersgd"
    stateful = True
    shared_state = True
    traits = Traits(
        category="low-rank",
        fixed_size=True,
        contraction=True,
        summable=True,
        rounds=2,
        communicator="allreduce",
        memory="residual",
        needs_memory=True,
    )

    def __post_init__(self) -> None:
        self.check_integer("rank", 1)
        self.check_choice("warm_start", (False, True))

    def keeps(self, shape: tuple[int, ...]) -> Any:
        _, columns, rank = self._sizes(shape)
        return columns, rank

    def exchange(self, tensor: Tensor, name: str) -> Generator[Payload, Payload, tuple[Payload, Any]]:
        k = kernels_of(tensor)
        rows, columns, rank = self._sizes(tuple(tensor.shape))
        matrix = k.reshape(tensor, (rows, columns))
        q = self._start(name, columns, rank, tensor, k)
        (p,) = yield [k.matmul(matrix, q)]
        p = k.orthonormalize(p)
        (q,) = yield [k.matmul(matrix, p, transpose=True)]
        if self.warm_start:
            self.state[name] = q
        return [p, q], tuple(tensor.shape)

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        k = kernels_of(payload[0])
        return self.accumulate(payload, ctx, k.zeros(ctx, "float32", payload[0]))

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        p, q = payload
        return kernels_of(out).matmul_add(out, p, q, weight)

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        return rows, columns, min(self.rank, rows, columns)

    def _start(self, name: str, columns: int, rank: int, like: Tensor, k: Kernels) -> Tensor:
        stream = self.context.stream(name, shared=True)
        fresh = k.combine(2.0, k.uniform(stream, columns * rank, like), -1.0, k.full([1.0], "float32", like))
        fresh = k.reshape(fresh, (columns, rank))
        if name not in self.state:
            return fresh
        return k.fill_zero_columns(self.state[name], fresh)

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        rows, columns, rank = self._sizes(shape)
        return 32 * rank * (rows + columns) / max(1, rows * columns)
