"""Composition: a value compressor on the values that a sparsifier sends."""

import math
from typing import Any

from grace.core.compressor import Compressor, Payload, Tensor, Traits
from grace.kernels import kernels_of


class Composed(Compressor):
    """``sparsifier | values``: the sparsifier picks entries, and the second method compresses their values.

        C(x) = scatter(V(x[S(x)]))

    The spec is that of both, joined: ``topk(ratio=0.01) | qsgd(levels=7)``. Error feedback, if the sparsifier
    has it by default, covers both errors. It diverges on values whose variance exceeds them, so an unbiased V with
    E||V(v) - v||^2 <= omega ||v||^2 (``variance``) is damped, as Basu et al. do:

        C(x) = scatter(V(x[S(x)])) / (1 + omega)

    which makes the composition a contraction; the residual keeps the rest. Two published methods are compositions:

    - sparse ternary compression (Sattler et al., arXiv 1903.02891): ``topk(ratio=0.01) | efsignsgd``;
    - Qsparse-local-SGD (Basu et al., NeurIPS 2019, arXiv 1906.02367): ``topk(ratio=0.01) | qsgd(levels=7)``,
      with ``backward_passes_per_step`` for its local steps. With ``qsgd(levels=7, bucket_size=64, norm=max)``
      omega is 1/3 instead of 3.2, so less is left for later steps.

    Args:
        sparsifier: a compressor whose first payload tensor holds the values that it picked.
        values: a quantizer or cast; not a voting one (signsgd), whose aggregate is not a mean.

    Raises:
        ConfigError: the two do not compose.

    >>> import numpy as np
    >>> import grace
    >>> stc = grace.make("compressor", "topk(ratio=0.5) | efsignsgd")
    >>> stc.decompress(*stc.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0. , -3.5,  3.5,  0. ], dtype=float32)
    >>> stc.spec
    'topk(ratio=0.5) | efsignsgd'
    """

    name = "composed"

    def __init__(self, sparsifier: Compressor, values: Compressor):
        self.sparsifier, self.values = sparsifier, values
        sparsifier.bounded = False  # what fills up room would be in the values' means and norms
        if not sparsifier.sends_values:
            raise self.refuse(f"{sparsifier.spec} is not a sparsifier that sends values; the first part must be")
        if values.traits.category != "quantization" or values.votes or values.stateful:
            raise self.refuse(f"{values.spec} cannot compress values; use a quantizer or cast without a vote or state")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """What both parts promise together."""
        first, second = self.sparsifier.traits, self.values.traits
        summable = first.summable and second.summable
        return Traits(
            category="hybrid",
            unbiased=first.unbiased and second.unbiased,
            contraction=first.contraction and (second.contraction or self._damps),
            summable=summable,
            fixed_size=False if first.varies or second.varies else first.fixed_size and second.fixed_size,
            communicator="allreduce" if summable else "allgather",
            memory=first.memory,
            needs_memory=first.needs_memory,
        )

    @property
    def spec(self) -> str:
        """Both specs, joined by a bar."""
        return f"{self.sparsifier.spec} | {self.values.spec}"

    @property
    def by_position(self) -> bool:  # type: ignore[override]
        """As the sparsifier does."""
        return self.sparsifier.by_position

    def to_dict(self) -> dict[str, Any]:
        """The dict form: both parts' dict forms."""
        return {"name": self.name, "sparsifier": self.sparsifier.to_dict(), "values": self.values.to_dict()}

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether the sparsifier is; the values' method is not."""
        return self.sparsifier.stateful

    @property
    def _damps(self) -> bool:
        return self.sparsifier.traits.memory != "none" and self.values.variance(1) is not None

    noise_advice = "values of bounded variance, as qsgd or natural have"

    @property
    def noisy(self) -> bool:
        """Whether the values' noise is neither bounded nor damped."""
        return self.values.traits.unbiased and not self.values.traits.exact and not self._damps

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        (values, *where), ctx = self.sparsifier.compress(tensor, name)
        coded, values_ctx = self.values.compress(values, name)
        return [*coded, *where], (ctx, values_ctx, len(coded))

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        return self.sparsifier.decompress(*self._decode(payload, ctx))

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        decoded, first_ctx = self._decode(payload, ctx)
        return self.sparsifier.accumulate(decoded, first_ctx, out, weight)

    def sent_indices(self, payload: Payload, ctx: Any) -> Tensor | None:
        return self.sparsifier.sent_indices(*self._decode(payload, ctx))

    def _decode(self, payload: Payload, ctx: Any) -> tuple[Payload, Any]:
        first_ctx, values_ctx, count = ctx
        coded, where = payload[:count], payload[count:]
        if self.sparsifier.traits.varies:  # another rank sent another number of values
            values_ctx = tuple(where[0].shape)
        values = self.values.decompress(coded, values_ctx)
        k = kernels_of(values)
        variance = self.values.variance(math.prod(values.shape))
        if self._damps and variance is not None:
            values = k.divide(values, values, 1 + variance)
        return [k.flat(values), *where], first_ctx

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        n, count = max(1, math.prod(shape)), self.sparsifier.count(shape)
        whole = self.sparsifier.wire_bits(shape)
        values = None if count is None else self.values.wire_bits((count,))
        if count is None or whole is None or values is None:
            return None
        return whole + (values - 32) * count / n
